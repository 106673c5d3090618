// Curves with bands as SVG: responsive, readable by pointer, touch and keyboard, in the page's own colours, light or dark.
"use strict";
const SVG = "http://www.w3.org/2000/svg";

function svgElement(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.appendChild(element);
  return element;
}

function htmlElement(name, properties, parent) {
  const element = Object.assign(document.createElement(name), properties);
  if (parent) parent.appendChild(element);
  return element;
}

// Round values between two ends: about as many as asked for, and never fewer than three.
function niceTicks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const steps = [10, 5, 2, 1, 0.5, 0.2, 0.1].map((digit) => digit * power);
  let ticks = [];
  for (const step of steps.slice(steps.findLastIndex((size) => size >= raw * 0.999))) {
    ticks = [];
    for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(tick);
    if (ticks.length >= 3) break;
  }
  return ticks.map((tick) => Number(tick.toPrecision(12)));
}

// A colour that stylesheets can use, and brighten on dark paper.
function paint(element, colour) {
  element.style.setProperty("--series", colour);
  return element;
}

const shortNumber = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());

// chart = {title, series: [{label, colour, dashed, x, mean, low, high}], marks: [rounds]}; best first, and those that
// have no colour are drawn only when somebody picks them: a curve then takes the colour of the one it replaces.
class Chart {
  constructor(parent, chart) {
    this.hidden = new Set();
    this.picked = new Map();
    this.figure = htmlElement("figure", {}, parent);
    this.legend = htmlElement("ul", { className: "legend" }, this.figure);
    this.svg = svgElement("svg", { role: "img", tabindex: "0" }, this.figure);
    this.readout = htmlElement("div", { className: "readout" }, this.figure);
    this.readout.setAttribute("aria-live", "polite");
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.select(null));
    this.svg.addEventListener("blur", () => this.select(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.figure);
    this.show(chart);
  }

  show(chart) {
    this.chart = chart;
    this.drawLegend();
    this.svg.setAttribute("aria-label", this.describe());
    this.draw();
  }

  // The curves that have a place, in their styles.
  placed() {
    const taken = new Map([...this.picked].map(([out, instead]) => [instead, out]));
    const styles = new Map(this.chart.series.map((series) => [series.label, series]));
    return this.chart.series.filter((series) => (series.colour !== null ? !this.picked.has(series.label) : taken.has(series.label)))
      .map((series) => {
        const style = series.colour !== null ? series : styles.get(taken.get(series.label)) || series;
        return { ...series, colour: style.colour || "#595959", dashed: style.dashed };
      });
  }

  drawLegend() {
    const placed = this.placed(), shown = new Set(placed.map((series) => series.label));
    const others = this.chart.series.filter((series) => !shown.has(series.label)).map((series) => series.label);
    const labels = JSON.stringify([placed.map((series) => [series.label, series.colour]), others]);
    if (labels === this.labels) return;
    this.labels = labels;
    const items = placed.map((series) => this.legendItem(series));
    if (others.length) items.push(this.picker(others));
    this.legend.replaceChildren(...items);
  }

  // Another curve comes in for the last one that was not itself picked.
  picker(others) {
    const item = htmlElement("li", {}), select = htmlElement("select", {}, item);
    select.setAttribute("aria-label", "show another curve");
    htmlElement("option", { value: "", textContent: `${others.length} more: show one instead of the last` }, select);
    for (const label of others) htmlElement("option", { value: label, textContent: label }, select);
    select.addEventListener("change", () => this.pick(select.value));
    return item;
  }

  pick(label) {
    const series = this.chart.series.find((one) => one.label === label);
    if (!series) return;
    if (series.colour !== null) this.picked.delete(label);
    else {
      const leaving = this.chart.series.filter((one) => one.colour !== null && !this.picked.has(one.label)).at(-1)
        || this.chart.series.filter((one) => one.colour !== null).at(-1);
      this.picked.set(leaving.label, label);
    }
    this.drawLegend();
    this.draw();
  }

  describe() {
    const ends = this.placed().map((series) => `${series.label} ends at ${shortNumber(series.mean.at(-1))}`);
    return `${this.chart.title}. ${ends.join("; ")}. Arrow keys read values.`;
  }

  legendItem(series) {
    const item = htmlElement("li", {});
    const button = htmlElement("button", { type: "button" }, item);
    button.setAttribute("aria-pressed", String(!this.hidden.has(series.label)));
    paint(htmlElement("span", { className: series.dashed ? "swatch dashed" : "swatch" }, button), series.colour);
    button.append(series.label);
    button.addEventListener("click", () => {
      if (!this.hidden.delete(series.label)) this.hidden.add(series.label);
      button.setAttribute("aria-pressed", String(!this.hidden.has(series.label)));
      this.draw();
    });
    return item;
  }

  visible() {
    return this.placed().filter((series) => !this.hidden.has(series.label) && series.x.length);
  }

  draw() {
    const width = Math.max(280, this.figure.clientWidth), height = Math.round(Math.min(380, Math.max(220, width * 0.5)));
    const margin = { left: 52, right: 20, top: 10, bottom: 38 };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const series = this.visible();
    if (!series.length) {
      const axis = svgElement("g", { class: "axis" }, this.svg);
      svgElement("text", { x: margin.left, y: height / 2 }, axis).textContent = "nothing to show yet";
      return;
    }
    const values = series.flatMap((one) => [...one.low, ...one.high, ...one.mean]).filter((value) => value !== null);
    let low = Math.min(...values), high = Math.max(...values);
    if (low === high) { low -= 0.5 * Math.abs(low) || 0.5; high += 0.5 * Math.abs(high) || 0.5; }
    const room = (high - low) * 0.04;
    low = low >= 0 && low - room < 0 ? 0 : low - room;
    high += room;
    const last = Math.max(...series.map((one) => one.x.at(-1))), first = Math.min(...series.map((one) => one.x[0]));
    const ticks = niceTicks(low, high, height / 60);
    margin.left = 14 + 7.5 * Math.max(...ticks.map((tick) => shortNumber(tick).length), 3);
    const right = width - margin.right, bottom = height - margin.bottom;
    this.toX = (x) => margin.left + ((x - first) / (last - first || 1)) * (right - margin.left);
    this.toY = (y) => bottom - ((y - low) / (high - low)) * (bottom - margin.top);
    this.area = { first, last, top: margin.top, bottom, left: margin.left, right };
    this.drawAxes(ticks, width);
    for (const one of series) this.drawSeries(one);
    this.cursor = svgElement("g", { visibility: "hidden" }, this.svg);
    this.select(this.selected ?? null);
  }

  drawAxes(ticks, width) {
    const { first, last, top, bottom, left, right } = this.area;
    const axis = svgElement("g", { class: "axis" }, this.svg);
    for (const tick of ticks) {
      svgElement("line", { x1: left, x2: right, y1: this.toY(tick), y2: this.toY(tick) }, axis);
      svgElement("text", { x: left - 6, y: this.toY(tick) + 4, "text-anchor": "end" }, axis).textContent = shortNumber(tick);
    }
    for (const tick of niceTicks(first, last, width / 110)) {
      const text = svgElement("text", { x: this.toX(tick), y: bottom + 16, "text-anchor": "middle" }, axis);
      text.textContent = shortNumber(tick);
    }
    for (const mark of this.chart.marks || []) {
      if (mark > first && mark < last) {
        svgElement("line", { x1: this.toX(mark), x2: this.toX(mark), y1: bottom - 6, y2: bottom + 2, class: "mark" }, axis);
      }
    }
    svgElement("path", { d: `M${left} ${top}V${bottom}H${right}` }, axis);
    const below = this.chart.marks && this.chart.marks.length ? "round (ticks: deployments)" : "round";
    svgElement("text", { x: right, y: bottom + 33, "text-anchor": "end" }, axis).textContent = below;
  }

  drawSeries(series) {
    const place = (values) => series.x.map((x, i) => [x, values[i]]).filter(([, y]) => y !== null)
      .map(([x, y]) => `${this.toX(x).toFixed(1)},${this.toY(y).toFixed(1)}`);
    if (series.low.some((value, i) => value !== series.high[i])) {
      const around = [...place(series.high), ...place(series.low).reverse()];
      paint(svgElement("polygon", { points: around.join(" "), class: this.visible().length > 4 ? "band faint" : "band" }, this.svg), series.colour);
    }
    const points = place(series.mean);
    if (points.length === 1) {
      const [x, y] = points[0].split(",");
      paint(svgElement("circle", { cx: x, cy: y, r: 3, class: "dot" }, this.svg), series.colour);
    }
    const line = { points: points.join(" "), class: "line", "stroke-width": 1.8, "stroke-linejoin": "round" };
    if (series.dashed) line["stroke-dasharray"] = "6 4";
    paint(svgElement("polyline", line, this.svg), series.colour);
  }

  point(event) {
    if (!this.area) return;
    const box = this.svg.getBoundingClientRect(), scale = this.svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const share = (x - this.area.left) / (this.area.right - this.area.left);
    this.select(this.area.first + Math.min(1, Math.max(0, share)) * (this.area.last - this.area.first));
  }

  key(event) {
    if (!this.area) return;
    const step = (this.area.last - this.area.first) / 40, now = this.selected ?? this.area.last;
    const target = { ArrowLeft: now - step, ArrowRight: now + step, Home: this.area.first, End: this.area.last }[event.key];
    if (event.key === "Escape") this.select(null);
    if (target === undefined) return;
    event.preventDefault();
    this.select(Math.min(this.area.last, Math.max(this.area.first, target)));
  }

  select(round) {
    this.selected = round;
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", round === null ? "hidden" : "visible");
    if (round === null) { this.readout.textContent = ""; return; }
    const { top, bottom } = this.area;
    this.cursor.replaceChildren();
    svgElement("line", { x1: this.toX(round), x2: this.toX(round), y1: top, y2: bottom, class: "cursor" }, this.cursor);
    const said = [];
    for (const series of this.visible()) {
      const i = nearest(series.x, round), value = series.mean[i];
      if (value === null || round - series.x[i] > (this.area.last - this.area.first) / 50) continue;
      paint(svgElement("circle", { cx: this.toX(series.x[i]), cy: this.toY(value), r: 3.5, class: "dot" }, this.cursor), series.colour);
      const band = series.high[i] !== null && series.high[i] !== series.low[i] ? ` ± ${Number(((series.high[i] - series.low[i]) / 2).toPrecision(2))}` : "";
      said.push(`${series.label} ${shortNumber(value)}${band}`);
    }
    this.readout.textContent = `round ${Math.round(round)}: ${said.join("; ")}`;
  }
}

function nearest(sorted, value) {
  let best = 0;
  for (let i = 1; i < sorted.length; i++) if (Math.abs(sorted[i] - value) < Math.abs(sorted[best] - value)) best = i;
  return best;
}
