// The report's page: its data stands in the page itself; only the curves need a script.
"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
for (const line of document.querySelectorAll("[data-colour]")) line.style.setProperty("--series", line.dataset.colour);
for (const [id, chart] of Object.entries(report.charts)) new Chart(document.getElementById(id), chart);
