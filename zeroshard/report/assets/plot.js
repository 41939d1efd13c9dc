// A canvas that keeps its size and theme: charts draw in CSS pixels, and again whenever either changes.

import { el } from "./dom.js";

export class Plot {
  /** `draw(plot)` draws; `label` is what a screen reader says. */
  constructor({ height, label, margin, draw, isFocusable = true, role = "img" }) {
    this.height = height;
    this.margin = { left: 64, right: 12, top: 10, bottom: 28, ...margin };
    this.width = 0;
    this.canvas = el("canvas", { role, "aria-label": label, tabIndex: isFocusable ? 0 : -1 });
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext("2d");
    this.paint = draw;
    new ResizeObserver(() => this.canvas.clientWidth !== this.width && this.draw()).observe(this.canvas);
    addEventListener("themechange", () => this.draw());
  }

  get left() {
    return this.margin.left;
  }
  get right() {
    return this.width - this.margin.right;
  }
  get top() {
    return this.margin.top;
  }
  get bottom() {
    return this.height - this.margin.bottom;
  }

  color(name) {
    return this.style.getPropertyValue(`--${name}`).trim();
  }

  setHeight(height) {
    this.height = height;
    this.canvas.style.height = `${height}px`;
  }

  draw() {
    this.width = this.canvas.clientWidth;
    if (!this.width) return;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.style = getComputedStyle(document.documentElement);
    const context = this.context;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = '12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
    context.lineWidth = 1;
    this.paint(this);
  }

  line(x0, y0, x1, y1, color, { dash = [], width = 1 } = {}) {
    const context = this.context;
    context.save();
    context.strokeStyle = color;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
    context.restore();
  }

  text(
    text,
    x,
    y,
    { align = "left", baseline = "middle", color = this.color("muted"), isOnPaper = false, limit = 0 } = {},
  ) {
    const context = this.context;
    let shown = text;
    if (limit) {
      while (shown.length > 1 && context.measureText(shown).width > limit) shown = `${shown.slice(0, -2)}…`;
      if (shown.length < 3 && shown !== text) return;
    }
    context.textAlign = align;
    context.textBaseline = baseline;
    if (isOnPaper) {
      const width = context.measureText(shown).width;
      context.fillStyle = this.color("paper");
      context.fillRect(
        x - (align === "right" ? width + 3 : align === "center" ? width / 2 + 3 : 3),
        y - 8,
        width + 6,
        16,
      );
    }
    context.fillStyle = color;
    context.fillText(shown, x, y);
  }

  /** Horizontal grid lines with labels at the left. */
  yAxis(ticks, place, name) {
    for (const tick of ticks) {
      const y = Math.round(place(tick)) + 0.5;
      this.line(this.left, y, this.right, y, this.color("grid"));
      this.text(name(tick), this.left - 6, y, { align: "right" });
    }
  }

  /** Marks and labels at the bottom, as many as there is room for. */
  xAxis(ticks, place, name, title = "") {
    let end = -Infinity;
    this.line(this.left, this.bottom + 0.5, this.right, this.bottom + 0.5, this.color("line"));
    for (const tick of ticks) {
      const x = place(tick);
      const label = name(tick);
      const half = this.context.measureText(label).width / 2;
      const shown = Math.min(Math.max(x, this.left + half - 20), this.right - half);
      if (shown - half < end + 8) continue;
      end = shown + half;
      this.line(x, this.bottom, x, this.bottom + 4, this.color("muted"));
      this.text(label, shown, this.bottom + 13, { align: "center" });
    }
    if (title) this.text(title, (this.left + this.right) / 2, this.bottom + 32, { align: "center" });
  }

  /** The title of the vertical axis, along it. */
  yTitle(title) {
    const context = this.context;
    context.save();
    context.translate(11, (this.top + this.bottom) / 2);
    context.rotate(-Math.PI / 2);
    this.text(title, 0, 0, { align: "center" });
    context.restore();
  }
}

/** Redraws at most once a frame. */
export function onceAFrame(draw) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      draw();
    });
  };
}
