"use strict";
// Each process over time, on a canvas: drag to move, wheel or +/- to zoom, click a slice for its details.
class Lanes {
  constructor(ask) {
    this.ask = ask; // (start, end, pixels) → the data of `lanes.py`
    this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": "what each process did over time" });
    this.details = make("p", { class: "faint lanes-details" }, "Drag to move, Ctrl and the wheel (or + and -) to zoom, point at a slice.");
    this.element = make("div", {}, this.details, this.canvas);
    this.start = this.end = null;
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.5 : 1 / 1.5, event.offsetX);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => { this.canvas.setPointerCapture(event.pointerId); this.from = [event.offsetX, this.start, this.end]; this.moved = false; });
    this.canvas.addEventListener("pointermove", (event) => this.drag(event));
    this.canvas.addEventListener("pointerup", () => { if (this.from && this.moved) this.load(); this.from = null; });
    this.canvas.addEventListener("click", (event) => { if (!this.moved) this.describe(event); });
    this.canvas.addEventListener("keydown", (event) => {
      const moves = { "+": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5), ArrowLeft: () => this.shift(-0.2), ArrowRight: () => this.shift(0.2), "0": () => this.whole() };
      if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  get label() { return this.canvas.clientWidth < 600 ? 90 : 170; }
  get width() { return Math.max(1, this.canvas.clientWidth - this.label); }

  async load() {
    const number = this.asked = (this.asked || 0) + 1;
    const data = await this.ask(this.start, this.end, Math.round(this.width));
    if (number !== this.asked) return; // a newer request is under way
    this.data = data;
    this.start ??= data.start; // a file has the whole run for any window
    this.end ??= data.end;
    this.draw();
  }

  whole() { this.start = this.end = null; return this.load(); }

  zoom(factor, x) {
    const at = this.start + (this.end - this.start) * ((x === undefined ? this.label + this.width / 2 : x) - this.label) / this.width;
    const span = Math.max(0.001, (this.end - this.start) * factor);
    this.start = Math.max(this.data.first, at - span * (at - this.start) / (this.end - this.start));
    this.end = Math.min(this.data.last, this.start + span);
    this.draw();
    clearTimeout(this.later);
    this.later = setTimeout(() => this.load(), 150);
  }

  shift(share) {
    const by = share * (this.end - this.start);
    this.start += by;
    this.end += by;
    this.load();
  }

  drag(event) {
    if (!this.from) { this.describe(event); return; }
    this.moved = this.moved || Math.abs(event.offsetX - this.from[0]) > 3;
    const by = (this.from[0] - event.offsetX) * (this.from[2] - this.from[1]) / this.width;
    this.start = this.from[1] + by;
    this.end = this.from[2] + by;
    this.draw();
  }

  place(seconds) { return this.label + (this.data.start + seconds - this.start) / (this.end - this.start) * this.width; }

  draw() {
    if (!this.data) return;
    const row = 18, top = 22, scale = devicePixelRatio || 1, lanes = this.data.lanes;
    const height = top + row * lanes.length + 6, width = this.canvas.clientWidth;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let at = 0; at <= 4; at += 1) {
      const x = this.label + this.width * at / 4, time = this.start - this.data.first + (this.end - this.start) * at / 4;
      pen.fillStyle = ink("--line");
      pen.fillRect(x, top - 4, 1, height);
      pen.fillStyle = ink("--faint");
      pen.textAlign = at === 4 ? "right" : at ? "center" : "left";
      pen.fillText(`${time.toFixed(this.end - this.start < 2 ? 3 : 1)} s`, x, 8);
    }
    pen.textAlign = "left";
    this.boxes = [];
    lanes.forEach((lane, index) => {
      const y = top + row * index, first = index === 0 || lanes[index - 1].process !== lane.process;
      pen.fillStyle = ink(first ? "--ink" : "--faint");
      if (!lane.depth) pen.fillText(first ? `${lane.process} ${lane.line}`.trim() : `   ${lane.line}`, 0, y + row / 2, this.label - 6);
      for (const [name, start, end, group, step, detail, number] of lane.slices) {
        const x = Math.max(this.label, this.place(start)), right = Math.min(width, this.place(end));
        if (right <= this.label || x >= width) continue;
        pen.fillStyle = colour(causeOf(name));
        pen.fillRect(x, y + 2, Math.max(0.5, right - x), row - 4);
        this.boxes.push([x, right, y, { name, seconds: end - start, group, step, detail, number, process: lane.process }]);
        if (right - x > 40) {
          pen.fillStyle = "#fff";
          pen.fillText(shown(name), x + 3, y + row / 2, right - x - 6);
        }
      }
    });
  }

  describe(event) {
    const found = (this.boxes || []).findLast(([x, right, y]) => event.offsetX >= x - 1 && event.offsetX <= right + 1 && event.offsetY >= y && event.offsetY < y + 18);
    if (!found) return;
    const slice = found[3];
    const more = [slice.number > 1 ? `${slice.number} of them` : "", slice.group >= 0 ? `group ${slice.group}` : "", slice.step >= 0 ? `step or version ${slice.step}` : "", slice.detail];
    this.details.textContent = shown([`${slice.process}: ${slice.name}, ${seconds(slice.seconds)}`, ...more.filter(Boolean)].join(", "));
  }
}
