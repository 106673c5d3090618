// Asks the server what the runs look like now, every two seconds while the page is looked at; sorts, filters and chooses.
"use strict";
const MOST_CHOSEN = 8, PAGE = 100; // curves that can be told apart; rows that are drawn at once
const charts = {}, rows = new Map(), chosen = new Set();
const view = { now: null, search: "", state: null, by: "name", down: false, shown: PAGE, columns: null };
const COLUMNS = 8; // of parameters, until others are chosen
const $ = (id) => document.getElementById(id);

// What is looked at stands in the address, so that it can be bookmarked and sent.
function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  asked.getAll("run").slice(0, MOST_CHOSEN).forEach((name) => chosen.add(name));
  view.search = asked.get("search") || "";
  view.state = asked.get("state");
  view.columns = asked.has("columns") ? asked.get("columns").split(",").filter(Boolean) : null;
  $("search").value = view.search;
}

function writeAddress() {
  const said = new URLSearchParams([...chosen].map((name) => ["run", name]));
  if (view.search) said.set("search", view.search);
  if (view.state) said.set("state", view.state);
  if (view.columns) said.set("columns", view.columns.join(","));
  const text = said.toString();
  if (text !== location.hash.slice(1)) history.replaceState(null, "", text ? `#${text}` : location.pathname);
}

const shownParameters = () => view.columns || view.now.parameters.slice(0, COLUMNS);

function showChooser() {
  const key = JSON.stringify([view.now.parameters, view.columns]);
  if (key === view.chooser) return;
  view.chooser = key;
  $("columns").hidden = !view.now.parameters.length;
  $("columns-boxes").replaceChildren(...view.now.parameters.map((name) => {
    const label = htmlElement("label", {}), box = htmlElement("input", { type: "checkbox", checked: shownParameters().includes(name) }, label);
    label.append(` ${name} `);
    box.addEventListener("change", () => {
      const wanted = new Set(shownParameters());
      if (!wanted.delete(name)) wanted.add(name);
      view.columns = view.now.parameters.filter((one) => wanted.has(one));
      showTable();
    });
    return label;
  }));
}

function duration(seconds) {
  if (seconds === null) return "";
  const minutes = Math.floor(seconds / 60);
  return minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.ceil(seconds)} s`;
}

const said = (value) => (value === null || value === undefined ? "" : typeof value === "number" ? shortNumber(value) : String(value));

const breakable = (text) => text.replace(/([._])/g, "$1\u200b"); // a long name may be broken after its parts

// The columns: what the head says, what a cell shows, what it is sorted by.
function columns() {
  const fixed = [
    { key: "name", head: "run", value: (run) => run.title },
    { key: "status", head: "state", value: (run) => run.status },
    { key: "rounds", head: "rounds", value: (run) => run.rounds / run.of },
    { key: "left", head: "time left", value: (run) => run.seconds_left, text: (run) => duration(run.seconds_left) },
    { key: "reward", head: "reward", value: (run) => run.reward, text: (run) => shortNumber(run.reward) },
    { key: "running", head: "running average", value: (run) => run.running_reward, text: (run) => shortNumber(run.running_reward) },
  ];
  const place = (key) => view.now.parameters.indexOf(key);
  const shown = shownParameters().filter((key) => place(key) >= 0);
  return fixed.concat(shown.map((key) => ({ key, head: key, value: (run) => run.values[place(key)], text: (run) => said(run.values[place(key)]) })));
}

function cell(row, head, text, className) {
  const element = htmlElement("td", { textContent: text, className: className || "number" }, row);
  if (text === "") element.classList.add("empty");
  element.dataset.head = head;
  return element;
}

function runRow(run) {
  const row = htmlElement("tr", { className: chosen.has(run.name) ? "chosen" : "" });
  const name = htmlElement("th", { scope: "row", className: "wrap" }, row);
  const label = htmlElement("label", {}, name);
  const box = htmlElement("input", { type: "checkbox", checked: chosen.has(run.name) }, label);
  box.addEventListener("change", () => choose(run.name, box));
  label.append(` ${run.title}`);
  label.title = run.name;
  if (run.error) htmlElement("div", { className: "error", textContent: run.error }, name);
  htmlElement("span", { className: `status ${run.status}`, textContent: run.status }, cell(row, "state", " ", "name"));
  const rounds = cell(row, "rounds", " ", "number name"), inside = htmlElement("span", {}, rounds);
  const bar = htmlElement("progress", { value: run.rounds, max: run.of, className: "wide" }, inside);
  bar.setAttribute("aria-label", `${run.rounds} of ${run.of} rounds`);
  inside.append(` ${run.rounds} / ${run.of}`);
  for (const column of columns().slice(3)) cell(row, column.head, column.text(run), typeof column.value(run) === "number" ? "number name" : "number wrap");
  return row;
}

// A row is made again only when what it shows has changed, so that a choice keeps the focus.
function rowOf(run) {
  const key = JSON.stringify([run, shownParameters(), chosen.has(run.name)]);
  const known = rows.get(run.name);
  if (known && known.key === key) return known.row;
  const row = runRow(run);
  rows.set(run.name, { key, row });
  return row;
}

function choose(name, box) {
  if (!chosen.delete(name)) {
    if (chosen.size >= MOST_CHOSEN) { box.checked = false; $("some").textContent = `at most ${MOST_CHOSEN} runs at a time`; return; }
    chosen.add(name);
  }
  showTable();
  look();
}

function compare(a, b) {
  const empty = (value) => value === null || value === undefined || value === "";
  if (empty(a) || empty(b)) return empty(a) - empty(b);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  return view.down ? -order : order;
}

function wanted() {
  const text = (run) => [run.name, run.title, run.status, run.configuration, ...run.values.map((value, i) => value === null ? "" : `${view.now.parameters[i]}=${said(value)}`)].join(" ").toLowerCase();
  const texts = new Map(view.now.runs.map((run) => [run, text(run)])), common = view.now.common.join(" ").toLowerCase();
  const apart = (word) => [...texts.values()].some((one) => one.includes(word));
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean).filter((word) => apart(word) || !common.includes(word)); // what all share fits all
  const column = columns().find((one) => one.key === view.by) || columns()[0];
  return view.now.runs.filter((run) => (view.state === null || run.status === view.state) && (!words.length || words.every((word) => texts.get(run).includes(word))))
    .sort((a, b) => compare(column.value(a), column.value(b)));
}

function sortBy(key) {
  view.down = view.by === key ? !view.down : ["reward", "running", "rounds"].includes(key);
  view.by = key;
  showTable();
}

function showHeads() {
  const every = columns(), key = JSON.stringify([every.map((one) => one.head), view.by, view.down]);
  if (key === view.heads) return;
  view.heads = key;
  const row = htmlElement("tr", {});
  for (const column of every) {
    const head = htmlElement("th", { scope: "col", className: column.key === "name" || column.key === "status" ? "" : "number" }, row);
    if (column.key === view.by) head.setAttribute("aria-sort", view.down ? "descending" : "ascending");
    const button = htmlElement("button", { type: "button", className: "sort", textContent: breakable(column.head) }, head);
    button.addEventListener("click", () => { sortBy(column.key); $("heads").querySelectorAll("button")[every.indexOf(column)].focus(); });
  }
  $("heads").replaceChildren(row);
  $("order").replaceChildren(...every.map((column) => htmlElement("option", { value: column.key, textContent: column.head, selected: column.key === view.by })));
}

function showStates() {
  const counts = new Map();
  for (const run of view.now.runs) counts.set(run.status, (counts.get(run.status) || 0) + 1);
  const key = JSON.stringify([[...counts], view.state]);
  if (key === view.states) return;
  view.states = key;
  $("states").replaceChildren(...["running", "finished", "stopped", "eliminated", "failed"].filter((state) => counts.has(state) || state === view.state).map((state) => {
    const button = htmlElement("button", { type: "button", textContent: `${state} ${counts.get(state) || 0}` });
    button.setAttribute("aria-pressed", String(view.state === state));
    button.addEventListener("click", () => { view.state = view.state === state ? null : state; showTable(); });
    return button;
  }));
}

function showTable() {
  writeAddress();
  showChooser();
  showHeads();
  showStates();
  const found = wanted(), drawn = found.slice(0, view.shown).map(rowOf), body = $("runs");
  if (drawn.length !== body.children.length || drawn.some((row, i) => row !== body.children[i])) body.replaceChildren(...drawn);
  const names = new Set(view.now.runs.map((run) => run.name));
  for (const name of rows.keys()) if (!names.has(name)) rows.delete(name);
  $("more").hidden = found.length <= view.shown;
  $("more").textContent = `Show ${Math.min(PAGE, found.length - view.shown)} more of ${found.length}`;
}

function showChosen(comparison) {
  $("compared").hidden = !comparison.rows.length;
  const best = Math.max(...comparison.rows.map((one) => one.running_reward ?? -Infinity));
  const heads = ["run", "running average", "behind the best", ...comparison.keys];
  const top = htmlElement("tr", {});
  heads.forEach((head, i) => htmlElement("th", { scope: "col", textContent: breakable(head), className: i ? "number" : "" }, top));
  $("compared-heads").replaceChildren(top);
  $("compared-runs").replaceChildren(...[...comparison.rows].sort((a, b) => (b.running_reward ?? -Infinity) - (a.running_reward ?? -Infinity)).map((one) => {
    const row = htmlElement("tr", {});
    htmlElement("th", { scope: "row", className: "wrap", textContent: one.name }, row);
    cell(row, heads[1], shortNumber(one.running_reward));
    cell(row, heads[2], one.running_reward === null || one.running_reward === best ? "–" : shortNumber(best - one.running_reward));
    one.values.forEach((value, i) => cell(row, comparison.keys[i], said(value), "number wrap"));
    return row;
  }));
}

function show(now) {
  view.now = now;
  const count = (status) => now.runs.filter((run) => run.status === status).length;
  const parts = ["running", "finished", "stopped", "eliminated", "failed"].map((status) => [count(status), status]).filter(([n]) => n);
  const text = now.runs.length ? parts.map(([n, status]) => `${n} ${status}`).join(", ") : "no runs here yet";
  const left = now.runs.map((run) => run.seconds_left).filter((seconds) => seconds !== null);
  $("state").textContent = `${now.folder}: ${text}${left.length ? `; those that run take about ${duration(Math.max(...left))} more` : ""}`;
  const some = now.comparison.rows.length ? "The chosen runs, each on its own."
    : now.shown < now.configurations ? `${now.shown} of ${now.configurations} configurations: those that run, and the best of the others. Choose runs below to compare them.`
      : "Mean over seeds; the band is one standard deviation. Choose runs below to compare them.";
  $("some").textContent = some;
  showTable();
  showChosen(now.comparison);
  const problem = (one) => htmlElement("p", { className: "error", textContent: `${one.name}: ${one.reason}` });
  $("problems").replaceChildren(...now.problems.map(problem));
  for (const [id, chart] of Object.entries(now.charts)) {
    if (charts[id]) charts[id].show(chart);
    else charts[id] = new Chart($(id), chart);
  }
}

let asking = 0;
async function look() {
  const turn = ++asking, query = [...chosen].map((name) => `run=${encodeURIComponent(name)}`).join("&");
  try {
    const answer = await fetch(`runs.json${query ? `?${query}` : ""}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const now = await answer.json();
    if (turn === asking) show(now); // an older answer must not undo a newer choice
  } catch (error) {
    $("state").textContent = `no answer from fedbandit watch (${error.message}); trying again`;
  }
}

async function follow() {
  if (!document.hidden) await look();
  setTimeout(follow, 2000);
}

$("search").addEventListener("input", (event) => { view.search = event.target.value; view.shown = PAGE; if (view.now) showTable(); });
$("order").addEventListener("change", (event) => sortBy(event.target.value));
$("more").addEventListener("click", () => { view.shown += PAGE; showTable(); });
$("forget").addEventListener("click", () => { chosen.clear(); if (view.now) showTable(); look(); });
readAddress();
follow();
