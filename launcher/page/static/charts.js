"use strict";
// Figures on a canvas: lines over stacked areas and bars. Drag over a part to zoom in, double-click to zoom out, point at a
// value to show it, click a name to hide its series.
//
// A series: { name, x, y, kind: "line" (else "area" or "bar", which stack), colour, width, dash, faint (without a name), hold
// (a value holds until the next one), strength }. Options: { x, y (titles), zero, log, share, marks (x), bound (y) }.
const LEFT = 62, RIGHT = 12, TOP = 8, BOTTOM = 40;

class Chart {
  constructor(element) {
    this.names = make("div", { class: "names" });
    this.canvas = make("canvas", { role: "img" });
    this.reading = make("p", { class: "faint" });
    this.hidden = new Set();
    element.replaceChildren(this.names, this.canvas, this.reading);
    const listen = (name, work) => this.canvas.addEventListener(name, work);
    listen("pointerdown", (event) => { this.canvas.setPointerCapture(event.pointerId); this.from = event.offsetX; });
    listen("pointermove", (event) => { this.at = event.offsetX; this.draw(); });
    listen("pointerleave", () => { this.at = this.from = undefined; this.draw(); });
    listen("pointerup", (event) => this.chosen(event.offsetX));
    listen("dblclick", () => { this.window = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(series, options, clicked) {
    Object.assign(this, { series, options, clicked });
    const named = series.filter((each) => !each.faint);
    this.canvas.setAttribute("aria-label", shown(`${options.y || ""} over ${options.x || ""}: ${named.map((each) => each.name).join(", ")}`));
    this.names.replaceChildren(...(named.length < 2 ? [] : named.map((each) => make("button", { type: "button", "aria-pressed": String(!this.hidden.has(each.name)), onclick: () => this.toggle(each.name) },
      make("i", { style: `background:${each.colour};opacity:${each.strength || 1}` }), each.name))));
    this.draw();
  }

  toggle(name) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    this.show(this.series, this.options, this.clicked);
  }

  chosen(x) {
    const [low, high] = [Math.min(this.from, x), Math.max(this.from, x)].map((at) => this.value(at));
    if (this.from !== undefined && Math.abs(x - this.from) > 4) this.window = [low, high];
    else if (this.clicked && this.xs.length) this.clicked(this.nearest(x));
    this.from = undefined;
    this.draw();
  }

  value(pixel) { return this.low + (pixel - LEFT) / this.width * (this.high - this.low); }
  place(x) { return LEFT + (x - this.low) / (this.high - this.low) * this.width; }
  nearest(pixel) { return this.xs.reduce((best, x) => (Math.abs(x - this.value(pixel)) < Math.abs(best - this.value(pixel)) ? x : best)); }

  // Each value with its base: areas and bars stand on the series before them.
  stacked() {
    const below = { area: new Map(), bar: new Map() };
    return this.series.filter((each) => !this.hidden.has(each.name)).map((each) => {
      const sums = below[each.kind];
      const points = each.x.map((x, at) => {
        const y = each.y[at], base = sums?.get(x) ?? 0;
        if (sums && y !== null) sums.set(x, base + y);
        return { x, y: y === null || y === undefined || (this.options.log && y <= 0) ? null : sums ? base + y : y, base, value: y };
      });
      return { ...each, points };
    });
  }

  // The visible points, and the range of their values.
  measure(drawn) {
    this.xs = [...new Set(drawn.flatMap((each) => each.x))].sort((a, b) => a - b);
    this.bar = this.xs.slice(1).reduce((least, x, at) => Math.min(least, x - this.xs[at]), this.xs.length > 1 ? Infinity : 1);
    const room = drawn.some((each) => each.kind === "bar") || this.xs.length < 2 ? this.bar / 2 : 0;
    [this.low, this.high] = this.window || [(this.xs[0] ?? 0) - room, (this.xs[this.xs.length - 1] ?? 1) + room];
    const { log, zero, bound } = this.options, scale = log ? Math.log10 : (y) => y;
    const stands = zero || drawn.some((each) => each.kind !== "line");
    let [least, most] = stands && !log ? [0, 0] : [Infinity, -Infinity];
    for (const y of [bound, ...drawn.flatMap((each) => each.points.filter((point) => point.x >= this.low && point.x <= this.high).map((point) => point.y))]) {
      if (y !== null && y !== undefined) { least = Math.min(least, scale(y)); most = Math.max(most, scale(y)); }
    }
    this.measured = drawn.some((each) => each.points.some((point) => point.y !== null));
    if (least > most) [least, most] = [0, 1];
    const margin = (most - least || Math.abs(2 * most) || 1) * 0.05;
    return [stands && !log && least === 0 ? 0 : least - margin, most + margin, scale];
  }

  draw() {
    if (!this.series || !this.canvas.clientWidth) return;
    const { canvas, options } = this, scale = devicePixelRatio || 1, height = canvas.clientHeight - TOP - BOTTOM;
    this.width = Math.max(1, canvas.clientWidth - LEFT - RIGHT);
    canvas.width = canvas.clientWidth * scale;
    canvas.height = canvas.clientHeight * scale;
    const pen = canvas.getContext("2d"), drawn = this.stacked(), [least, most, scaled] = this.measure(drawn);
    const rise = (y) => TOP + height * (1 - (scaled(y) - least) / (most - least));
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    this.axes(pen, height, least, most, rise);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, this.width, height);
    pen.clip();
    for (const each of drawn.filter((one) => one.kind !== "line")) this.fill(pen, each, rise, TOP + height);
    for (const each of drawn.filter((one) => one.kind === "line").reverse()) this.line(pen, each, rise); // the first on top
    pen.globalAlpha = 1;
    pen.fillStyle = pen.strokeStyle = ink("--faint");
    if (options.bound !== undefined && options.bound !== null) this.dashed(pen, LEFT, rise(options.bound), LEFT + this.width, rise(options.bound));
    for (const mark of options.marks || []) this.dashed(pen, this.place(mark), TOP, this.place(mark), TOP + height);
    pen.globalAlpha = 0.2;
    if (this.from !== undefined && this.at !== undefined) pen.fillRect(Math.min(this.from, this.at), TOP, Math.abs(this.at - this.from), height);
    pen.restore();
    this.describe(pen, drawn, height);
    canvas.dataset.drawn = String(drawn.length);
  }

  axes(pen, height, least, most, rise) {
    const tick = (text, x, y, ...line) => {
      pen.fillStyle = ink("--line");
      pen.fillRect(...line);
      pen.fillStyle = ink("--faint");
      pen.fillText(text, x, y);
    };
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const y of this.options.log ? decades(least, most) : ticks(least, most, 5)) tick(this.worded(y), LEFT - 6, rise(y), LEFT, rise(y), this.width, 1);
    pen.textAlign = "center";
    for (const x of ticks(this.low, this.high, Math.max(2, this.width / 90), this.xs.every(Number.isInteger) ? 1 : 0)) tick(number(x), this.place(x), TOP + height + 11, this.place(x), TOP, 1, height);
    if (!this.measured) pen.fillText("not measured", LEFT + this.width / 2, TOP + height / 2);
    pen.fillText(this.options.x || "", LEFT + this.width / 2, TOP + height + 28);
    pen.save();
    pen.rotate(-Math.PI / 2);
    pen.fillText(shown(this.options.y || ""), -(TOP + height / 2), 8);
    pen.restore();
  }

  fill(pen, series, rise, ground) {
    pen.fillStyle = series.colour;
    pen.globalAlpha = series.strength || 1;
    if (series.kind === "bar") {
      const width = Math.max(1, 0.8 * (this.place(this.bar) - this.place(0)));
      for (const { x, y, base, value } of series.points) if (value) pen.fillRect(this.place(x) - width / 2, rise(y), width, rise(base) - rise(y));
      return;
    }
    const points = series.hold ? series.points.flatMap((point, at) => (at ? [{ ...series.points[at - 1], x: point.x }, point] : [point])) : series.points;
    pen.beginPath();
    for (const { x, y, base } of points) pen.lineTo(this.place(x), rise(y ?? base));
    for (const { x, base } of [...points].reverse()) pen.lineTo(this.place(x), rise(base));
    pen.fill();
  }

  line(pen, series, rise) {
    pen.strokeStyle = pen.fillStyle = series.colour;
    pen.globalAlpha = series.faint ? 0.45 : 1;
    pen.lineWidth = series.width || 1.8;
    pen.setLineDash(series.dash ? [5, 4] : []);
    const few = series.points.length <= 40;
    let run = [];
    for (const point of [...series.points, { y: null }]) {
      if (point.y !== null) { run.push([this.place(point.x), rise(point.y)]); continue; }
      pen.beginPath();
      for (const [x, y] of run) pen.lineTo(x, y);
      pen.stroke();
      // A value between two gaps has no line, so it gets a point.
      if (few || run.length === 1) for (const [x, y] of run) { pen.beginPath(); pen.arc(x, y, 2.5, 0, 7); pen.fill(); }
      run = [];
    }
    pen.setLineDash([]);
  }

  dashed(pen, ...[x, y, right, bottom]) {
    pen.setLineDash([5, 4]);
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(right, bottom);
    pen.stroke();
    pen.setLineDash([]);
  }

  describe(pen, drawn, height) {
    this.reading.textContent = "";
    if (this.at === undefined || !this.xs.length) return;
    const x = this.nearest(this.at);
    pen.fillRect(this.place(x), TOP, 1, height);
    const found = drawn.filter((each) => !each.faint).map((each) => [each.name, each.points.find((point) => point.x === x)?.value]);
    this.reading.textContent = shown(`${this.options.x || ""} ${number(x)}: ${found.filter(([, y]) => y !== null && y !== undefined).map(([name, y]) => `${name} ${this.worded(y)}`).join(", ")}`);
  }

  worded(y) { return this.options.share ? `${number(100 * y)} %` : y !== 0 && (Math.abs(y) < 1e-3 || Math.abs(y) >= 1e6) ? y.toExponential(2).replace(/\.?0+e/, "e") : number(y); }
}

// About `count` round numbers between two numbers, at least `least` apart.
function ticks(low, high, count, least = 0) {
  const rough = Math.max(least, (high - low) / count), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high && found.length < 50; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

// Round numbers between the logarithms of two numbers; with halves if there are few.
function decades(least, most) {
  const factors = most - least < 1.5 ? [1, 2, 5] : [1], found = [];
  for (let power = Math.floor(least); power <= most; power += Math.ceil((most - least) / 8)) {
    found.push(...factors.map((factor) => factor * 10 ** power).filter((y) => Math.log10(y) >= least && Math.log10(y) <= most));
  }
  return found;
}

function plot(element, series, options, clicked) {
  element.chart = element.chart || new Chart(element);
  element.chart.show(series.map((each) => ({ kind: "line", ...each })), options || {}, clicked);
}
