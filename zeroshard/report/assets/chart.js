// Curves of runs against the step: one chart for one quantity of all runs, on common axes.

import { el, hideTooltip, SERIES, showTooltip, swatch } from "./dom.js";
import { Plot } from "./plot.js";
import { logTicks, roundTicks } from "./units.js";

// Gaps in the lines that are drawn later, so that equal curves show each of their colours.
const DASHES = [[], [12, 12], [4, 20], [8, 8, 2, 8]];
const LOG_RATIO = 30;
const MARK = 3.5;

/** The style of the run at a place of the data, in each chart of the page. */
export function runStyle(place) {
  return { color: SERIES[place % SERIES.length], dash: DASHES[place % DASHES.length] };
}

/** Pairs of step and value, without the steps that have no value. */
export function pointsOf(steps, values) {
  return steps.map((step, place) => [step, values[place]]).filter(([, value]) => value !== null);
}

export function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (!(high >= low)) return [0, 1];
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

/** The steps of all runs: the horizontal axis of each chart. */
export function stepsOf(curves) {
  return extent(curves.flatMap(({ step, heldout }) => [...ends(step), ...ends(heldout?.step ?? [])]));
}

const ends = (steps) => (steps.length ? [steps.at(0), steps.at(-1)] : []);

export class StepChart {
  /**
   * `series` are {run, color, dash, points, isMarked, label}; `name(value)` is the text of a value. `onmove(step)` is
   * called when the cursor moves, with null when it leaves. The scale is logarithmic where `mayBeLog` and it has to be.
   */
  constructor({ title, series, steps, name, tickName = name, ticks = roundTicks, height = 220, mayBeLog = false, isFromZero = false, onmove }) {
    this.series = series.filter((one) => one.points.length);
    this.steps = steps;
    this.name = name;
    this.tickName = tickName;
    this.ticks = ticks;
    this.onmove = onmove ?? ((step) => this.moveTo(step));
    this.average = 1;
    this.cursor = null;
    const values = this.series.flatMap((one) => one.points.map(([, value]) => value));
    const [low, high] = extent(values);
    this.isLog = mayBeLog && low > 0 && high / low > LOG_RATIO;
    this.values = isFromZero && low >= 0 ? [0, high > 0 ? high * 1.05 : 1] : this.isLog ? [low / 1.1, high * 1.1] : [low, high];
    this.plot = new Plot({
      height,
      margin: { left: 70, bottom: 46, right: 18 },
      draw: () => this._draw(),
      role: "application",
      label: `${title} over steps; arrow keys move the cursor`,
    });
    const { canvas } = this.plot;
    canvas.addEventListener("pointermove", (event) => this._point(event));
    canvas.addEventListener("pointerleave", () => {
      hideTooltip();
      this.onmove(null);
    });
    canvas.addEventListener("keydown", (event) => this._key(event));
    this.readout = el("div", { class: "readout", role: "status" });
    this.moveTo(null);
  }

  /** The value of a series at the step, or at its last step. */
  valueAt(one, step) {
    if (step === null) return one.points.at(-1);
    return one.points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
  }

  moveTo(step) {
    this.cursor = step;
    this.readout.replaceChildren(
      el("span", {}, step === null ? "last:" : `step ${step.toLocaleString("en-US")}:`),
      ...this.series.map((one) => {
        const [at, value] = this.valueAt(one, step);
        return el("span", { "data-value": String(value), "data-step": String(at) }, swatch(one.color), `${one.label ?? one.run} ${this.name(value)}`);
      }),
    );
    this.plot.draw();
  }

  x(step) {
    return this.plot.left + ((step - this.steps[0]) / (this.steps[1] - this.steps[0])) * (this.plot.right - this.plot.left);
  }

  y(value) {
    const scale = this.isLog ? Math.log : (one) => one;
    const [low, high] = this.values.map(scale);
    return this.plot.bottom - ((scale(value) - low) / (high - low)) * (this.plot.bottom - this.plot.top);
  }

  _point(event) {
    const share = (event.offsetX - this.plot.left) / (this.plot.right - this.plot.left);
    this.onmove(Math.round(this.steps[0] + Math.min(1, Math.max(0, share)) * (this.steps[1] - this.steps[0])));
    showTooltip([...this.readout.children].map((one) => one.textContent).join("\n"), event.clientX, event.clientY);
  }

  _key(event) {
    const from = this.cursor ?? this.steps[0];
    const jump = Math.max(1, Math.round((this.steps[1] - this.steps[0]) / 100)) * (event.shiftKey ? 10 : 1);
    const to = { ArrowRight: from + jump, ArrowLeft: from - jump, Home: this.steps[0], End: this.steps[1] }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.onmove(Math.min(this.steps[1], Math.max(this.steps[0], to)));
  }

  draw() {
    this.plot.draw();
  }

  _draw() {
    const { plot } = this;
    const { context } = plot;
    const count = Math.max(2, (plot.bottom - plot.top) / 45);
    plot.yAxis(
      this.isLog ? logTicks(...this.values) : this.ticks(...this.values, count),
      (tick) => this.y(tick),
      this.tickName,
    );
    plot.xAxis(
      roundTicks(...this.steps, plot.width / 90).filter(Number.isInteger),
      (tick) => this.x(tick),
      (tick) => tick.toLocaleString("en-US"),
      "step",
    );
    for (const one of this.series) {
      context.save();
      context.strokeStyle = context.fillStyle = one.color;
      context.lineWidth = one.isMarked ? 1.5 : 2;
      context.lineJoin = "round";
      context.setLineDash(one.isMarked ? [] : one.dash);
      context.beginPath();
      const points = one.isMarked ? one.points : averaged(one.points, this.average);
      for (const [step, value] of thinned(points, plot.right - plot.left)) context.lineTo(this.x(step), this.y(value));
      context.stroke();
      if (one.isMarked || points.length === 1) this._mark(one.isMarked ? points : points.slice(0, 1));
      context.restore();
    }
    if (this.cursor !== null) plot.line(this.x(this.cursor), plot.top, this.x(this.cursor), plot.bottom, plot.color("ink"));
  }

  /** Circles with the paper inside, as many as a pixel row has room for. */
  _mark(points) {
    const { context } = this.plot;
    context.setLineDash([]);
    for (const [step, value] of thinned(points, (this.plot.right - this.plot.left) / 8)) {
      context.beginPath();
      context.arc(this.x(step), this.y(value), MARK, 0, 2 * Math.PI);
      context.save();
      context.fillStyle = this.plot.color("paper");
      context.fill();
      context.restore();
      context.stroke();
    }
  }
}

/** Puts in place of each value the mean of it and of those before it, `steps` in all. */
function averaged(points, steps) {
  let sum = 0;
  return points.map(([step, value], place) => {
    sum += value - (place >= steps ? points[place - steps][1] : 0);
    return [step, steps === 1 ? value : sum / Math.min(steps, place + 1)];
  });
}

/** Keeps the lowest and highest of each pixel's points. */
function thinned(points, pixels) {
  const each = Math.ceil(points.length / Math.max(1, pixels));
  if (each < 3) return points;
  const kept = [];
  for (let from = 0; from < points.length; from += each) {
    const part = points.slice(from, from + each);
    const low = part.reduce((best, one) => (one[1] < best[1] ? one : best));
    const high = part.reduce((best, one) => (one[1] > best[1] ? one : best));
    kept.push(...[low, high].sort((one, other) => one[0] - other[0]));
  }
  return kept;
}
