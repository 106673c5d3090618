// Asks the server what the runs look like now, every two seconds while the page is looked at.
"use strict";
const charts = {};

function cell(row, text, className) {
  return htmlElement("td", { textContent: text, className: className || "" }, row);
}

function duration(seconds) {
  if (seconds === null) return "";
  const minutes = Math.floor(seconds / 60);
  return minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.ceil(seconds)} s`;
}

function runRow(run) {
  const row = htmlElement("tr", {});
  const name = cell(row, run.name, "wrap");
  if (run.error) htmlElement("div", { className: "error", textContent: run.error }, name);
  htmlElement("span", { className: `status ${run.status}`, textContent: run.status }, cell(row, ""));
  const rounds = cell(row, "");
  const bar = htmlElement("progress", { value: run.rounds, max: run.of, className: "wide" }, rounds);
  bar.setAttribute("aria-label", `${run.rounds} of ${run.of} rounds`);
  rounds.append(` ${run.rounds} / ${run.of}`);
  cell(row, shortNumber(run.reward), "number");
  cell(row, shortNumber(run.running_reward), "number");
  cell(row, duration(run.seconds_left), "number");
  return row;
}

function show(now) {
  const count = (status) => now.runs.filter((run) => run.status === status).length;
  const parts = ["running", "finished", "stopped", "failed"].map((status) => [count(status), status]).filter(([n]) => n);
  const text = now.runs.length ? parts.map(([n, status]) => `${n} ${status}`).join(", ") : "no runs here yet";
  document.getElementById("state").textContent = `${now.folder}: ${text}`;
  const some = now.shown < now.configurations ? `${now.shown} of ${now.configurations} configurations: those that run, and the best of the others` : "";
  document.getElementById("some").textContent = some;
  document.getElementById("runs").replaceChildren(...now.runs.map(runRow));
  const problem = (one) => htmlElement("p", { className: "error", textContent: `${one.name}: ${one.reason}` });
  document.getElementById("problems").replaceChildren(...now.problems.map(problem));
  for (const [id, chart] of Object.entries(now.charts)) {
    if (charts[id]) charts[id].show(chart);
    else charts[id] = new Chart(document.getElementById(id), chart);
  }
}

async function follow() {
  if (!document.hidden) {
    try {
      const answer = await fetch("runs.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      show(await answer.json());
    } catch (error) {
      document.getElementById("state").textContent = `no answer from fedbandit watch (${error.message}); trying again`;
    }
  }
  setTimeout(follow, 2000);
}
follow();
