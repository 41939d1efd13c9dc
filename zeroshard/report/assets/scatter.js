// Scatter plots whose points can be pointed at, clicked, and walked through with the keyboard.

import { hideTooltip, showTooltip } from "./dom.js";
import { Plot } from "./plot.js";

const NEAR_PX = 16;
const DENSE = 800; // marks, above which they are small and let others shine through

/** Shapes of marks, and letters that look like them. */
export const GLYPHS = { circle: "●", square: "■", triangle: "▲", diamond: "◆", cross: "✕" };

export class Scatter {
  /** Points are { x, y, shape, color, text, of }; axes are { low, high, isLog, ticks, name, title }. */
  constructor({ label, height, onselect, under = () => {}, margin = {} }) {
    this.points = [];
    this.onselect = onselect;
    this.under = under;
    this.plot = new Plot({
      height,
      label: `${label}; arrow keys go from point to point`,
      margin: { left: 78, bottom: 46, top: 14, right: 18, ...margin },
      draw: () => this._draw(),
      role: "application",
    });
    const { canvas } = this.plot;
    canvas.addEventListener("pointermove", (event) => {
      const point = this._near(event);
      canvas.style.cursor = point ? "pointer" : "";
      if (point) showTooltip(point.text, event.clientX, event.clientY);
      else hideTooltip();
    });
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener("click", (event) => this.select(this._near(event) ?? this.selected));
    canvas.addEventListener("keydown", (event) => this._key(event));
  }

  show(points, x, y) {
    this.points = [...points].sort((one, other) => one.x - other.x || one.y - other.y);
    [this.xAxis, this.yAxis] = [x, y];
    this.selected = null;
    this.plot.draw();
  }

  select(point) {
    this.selected = point;
    if (point) this.onselect(point);
    this.plot.draw();
  }

  _key(event) {
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    const edge = { Home: 0, End: this.points.length - 1 }[event.key];
    if ((step === undefined && edge === undefined) || !this.points.length) return;
    event.preventDefault();
    const place = edge ?? Math.max(0, Math.min(this.points.length - 1, this.points.indexOf(this.selected) + step));
    this.select(this.points[place]);
  }

  px(value) {
    return this._scale(value, this.xAxis, this.plot.left, this.plot.right);
  }

  py(value) {
    return this._scale(value, this.yAxis, this.plot.bottom, this.plot.top);
  }

  _scale(value, { low, high, isLog }, from, to) {
    const share = isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return from + share * (to - from);
  }

  _near(event) {
    let [best, least] = [null, NEAR_PX];
    for (const point of this.points) {
      const far = Math.hypot(this.px(point.x) - event.offsetX, this.py(point.y) - event.offsetY);
      if (far < least) [best, least] = [point, far];
    }
    return best;
  }

  _draw() {
    if (!this.xAxis) return;
    const { plot, xAxis, yAxis } = this;
    plot.yAxis(yAxis.ticks, (tick) => this.py(tick), yAxis.name);
    plot.xAxis(xAxis.ticks, (tick) => this.px(tick), xAxis.name, xAxis.title);
    plot.yTitle(yAxis.title);
    this.under(this);
    const isDense = this.points.length > DENSE;
    plot.context.globalAlpha = isDense ? 0.6 : 1;
    const place = ({ x, y, shape, color }, size) => mark(plot.context, this.px(x), this.py(y), shape, color, size);
    for (const point of this.points) if (point.shape !== "star") place(point, isDense ? 2.8 : 4.5);
    plot.context.globalAlpha = 1;
    for (const point of this.points) if (point.shape === "star") place(point, 4.5);
    if (this.selected) {
      const { context } = plot;
      context.strokeStyle = plot.color("ink");
      context.lineWidth = 2;
      context.beginPath();
      context.arc(this.px(this.selected.x), this.py(this.selected.y), 9, 0, 7);
      context.stroke();
    }
  }
}

function mark(context, x, y, shape, color, size) {
  context.fillStyle = color;
  context.strokeStyle = color;
  context.lineWidth = 2;
  context.beginPath();
  if (shape === "cross") {
    context.moveTo(x - size, y - size);
    context.lineTo(x + size, y + size);
    context.moveTo(x + size, y - size);
    context.lineTo(x - size, y + size);
    context.stroke();
  } else if (shape === "triangle") {
    context.moveTo(x, y - size - 1);
    context.lineTo(x + size + 1, y + size);
    context.lineTo(x - size - 1, y + size);
    context.fill();
  } else if (shape === "square") {
    context.fillRect(x - size, y - size, 2 * size, 2 * size);
  } else if (shape === "diamond") {
    context.moveTo(x, y - size - 1.5);
    context.lineTo(x + size + 1.5, y);
    context.lineTo(x, y + size + 1.5);
    context.lineTo(x - size - 1.5, y);
    context.fill();
  } else if (shape === "star") {
    for (let point = 0; point < 10; point += 1) {
      const radius = point % 2 ? size * 0.9 : size * 2;
      context.lineTo(x + radius * Math.sin((point * Math.PI) / 5), y - radius * Math.cos((point * Math.PI) / 5));
    }
    context.fill();
  } else {
    context.arc(x, y, size, 0, 7);
    context.fill();
  }
  context.lineWidth = 1;
}
