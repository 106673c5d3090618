// Curves with bands as SVG: responsive, readable by pointer, touch and keyboard. No library: two hundred lines against
// megabytes, and the page stays one quiet file.
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

function niceTicks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= raw * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(tick);
  return ticks.map((tick) => Number(tick.toPrecision(12)));
}

const shortNumber = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());

// chart = {title, y, series: [{label, colour, dashed, x, mean, low, high}], marks: [rounds]}
class Chart {
  constructor(parent, chart) {
    this.hidden = new Set();
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
    const labels = chart.series.map((series) => series.label).join("\n");
    if (labels !== this.labels) {
      this.labels = labels;
      this.legend.replaceChildren(...chart.series.map((series) => this.legendItem(series)));
    }
    this.svg.setAttribute("aria-label", this.describe());
    this.draw();
  }

  describe() {
    const ends = this.chart.series.map((series) => `${series.label} ends at ${shortNumber(series.mean.at(-1))}`);
    return `${this.chart.title}. ${ends.join("; ")}. Arrow keys read values.`;
  }

  legendItem(series) {
    const item = htmlElement("li", {});
    const button = htmlElement("button", { type: "button" }, item);
    button.setAttribute("aria-pressed", String(!this.hidden.has(series.label)));
    const swatch = htmlElement("span", { className: "swatch" }, button);
    swatch.style.background = series.dashed
      ? `repeating-linear-gradient(90deg, ${series.colour} 0 .4em, transparent .4em .6em)` : series.colour;
    button.append(series.label);
    button.addEventListener("click", () => {
      if (!this.hidden.delete(series.label)) this.hidden.add(series.label);
      button.setAttribute("aria-pressed", String(!this.hidden.has(series.label)));
      this.draw();
    });
    return item;
  }

  visible() {
    return this.chart.series.filter((series) => !this.hidden.has(series.label) && series.x.length);
  }

  draw() {
    const width = Math.max(280, this.figure.clientWidth), height = Math.round(Math.min(380, Math.max(220, width * 0.5)));
    const margin = { left: 52, right: 20, top: 10, bottom: 38 };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const series = this.visible();
    if (!series.length) {
      svgElement("text", { x: margin.left, y: height / 2, fill: "#555" }, this.svg).textContent = "nothing to show yet";
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
        svgElement("line", { x1: this.toX(mark), x2: this.toX(mark), y1: bottom - 6, y2: bottom + 2, stroke: "#8a8a8a" }, axis);
      }
    }
    svgElement("path", { d: `M${left} ${top}V${bottom}H${right}`, stroke: "#8a8a8a" }, axis);
    const below = this.chart.marks && this.chart.marks.length ? "round (ticks: deployments)" : "round";
    svgElement("text", { x: right, y: bottom + 33, "text-anchor": "end" }, axis).textContent = below;
  }

  drawSeries(series) {
    const place = (values) => series.x.map((x, i) => [x, values[i]]).filter(([, y]) => y !== null)
      .map(([x, y]) => `${this.toX(x).toFixed(1)},${this.toY(y).toFixed(1)}`);
    if (series.low.some((value, i) => value !== series.high[i])) {
      const around = [...place(series.high), ...place(series.low).reverse()];
      svgElement("polygon", { points: around.join(" "), fill: series.colour, opacity: 0.16 }, this.svg);
    }
    const points = place(series.mean);
    if (points.length === 1) {
      const [x, y] = points[0].split(",");
      svgElement("circle", { cx: x, cy: y, r: 3, fill: series.colour }, this.svg);
    }
    const line = { points: points.join(" "), fill: "none", stroke: series.colour, "stroke-width": 1.8, "stroke-linejoin": "round" };
    if (series.dashed) line["stroke-dasharray"] = "6 4";
    svgElement("polyline", line, this.svg);
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
    svgElement("line", { x1: this.toX(round), x2: this.toX(round), y1: top, y2: bottom, stroke: "#555" }, this.cursor);
    const said = [];
    for (const series of this.visible()) {
      const i = nearest(series.x, round), value = series.mean[i];
      if (value === null || round - series.x[i] > (this.area.last - this.area.first) / 50) continue;
      svgElement("circle", { cx: this.toX(series.x[i]), cy: this.toY(value), r: 3.5, fill: series.colour }, this.cursor);
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
