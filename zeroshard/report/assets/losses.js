// Loss curves of several runs.

import { el, hideTooltip, SERIES, showTooltip, swatch, table } from "./dom.js";
import { Plot } from "./plot.js";
import { roundTicks } from "./units.js";

// Gaps in the lines that are drawn later, so that equal curves show each of their colours.
const DASHES = [[], [12, 12], [4, 20], [8, 8, 2, 8]];

export class LossView {
  constructor(losses) {
    this.runs = losses.map(({ run, step, loss }, place) => ({
      name: run,
      color: SERIES[place % SERIES.length],
      dash: DASHES[place % DASHES.length],
      points: step.map((one, index) => [one, loss[index]]).filter(([, value]) => value !== null),
      lost: loss.filter((value) => value === null).length,
    }));
    const points = this.runs.flatMap((run) => run.points);
    this.steps = extent(points.map(([step]) => step));
    this.values = extent(points.map(([, loss]) => loss));
    this.plot = new Plot({
      height: 380,
      margin: { left: 70, bottom: 46, right: 18 },
      draw: () => this._draw(),
      role: "application",
      label: "Loss over steps; arrow keys move the cursor",
    });
    const { canvas } = this.plot;
    canvas.addEventListener("pointermove", (event) => this._point(event));
    canvas.addEventListener("pointerleave", () => {
      hideTooltip();
      this.cursor = null;
      this.plot.draw();
    });
    canvas.addEventListener("keydown", (event) => this._key(event));
    this.readout = el("p", { id: "loss-readout", role: "status", class: "muted" });
    this.smooth = el(
      "select",
      { id: "loss-smooth", onchange: () => this.draw() },
      [1, 10, 50, 200].map((steps) =>
        el("option", { value: String(steps) }, steps === 1 ? "each step" : `mean of ${steps} steps`),
      ),
    );
    const rows = this.runs.map((run) => {
      const [lowest, last] = [
        run.points.reduce((best, one) => (one[1] < best[1] ? one : best), run.points[0] ?? [0, NaN]),
        run.points.at(-1) ?? [0, NaN],
      ];
      return [
        el("span", {}, swatch(run.color), run.name),
        String(run.points.length + run.lost),
        lossText(last[1]),
        lossText(lowest[1]),
        String(lowest[0]),
        ...(this.runs.length > 1 ? [this._equalTo(run)] : []),
      ];
    });
    this.element = el(
      "div",
      { id: "losses" },
      el("p", {}, "Training loss in nats a token, after each step."),
      el("label", { class: "row" }, "Show", this.smooth),
      this.plot.canvas,
      this.readout,
      table(
        [
          ["run", false],
          ["steps", true],
          ["last loss", true],
          ["lowest loss", true],
          ["at step", true],
          ...(this.runs.length > 1 ? [["equal to", false]] : []),
        ],
        rows,
      ),
    );
  }

  /** Names an earlier run that has the same loss at each step, to the last digit. */
  _equalTo(run) {
    const text = JSON.stringify(run.points);
    const other = this.runs.find((one) => JSON.stringify(one.points) === text);
    return other === run ? "" : `${other.name}, at each step`;
  }

  x(step) {
    return (
      this.plot.left + ((step - this.steps[0]) / (this.steps[1] - this.steps[0])) * (this.plot.right - this.plot.left)
    );
  }

  y(loss) {
    return (
      this.plot.bottom -
      ((loss - this.values[0]) / (this.values[1] - this.values[0])) * (this.plot.bottom - this.plot.top)
    );
  }

  _point(event) {
    const share = (event.offsetX - this.plot.left) / (this.plot.right - this.plot.left);
    this._moveTo(Math.round(this.steps[0] + Math.min(1, Math.max(0, share)) * (this.steps[1] - this.steps[0])));
    showTooltip(this.readout.textContent, event.clientX, event.clientY);
  }

  _key(event) {
    const from = this.cursor ?? this.steps[0];
    const jump = Math.max(1, Math.round((this.steps[1] - this.steps[0]) / 100)) * (event.shiftKey ? 10 : 1);
    const to = { ArrowRight: from + jump, ArrowLeft: from - jump, Home: this.steps[0], End: this.steps[1] }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this._moveTo(Math.min(this.steps[1], Math.max(this.steps[0], to)));
  }

  _moveTo(step) {
    this.cursor = step;
    const near = this.runs.map((run) => {
      const point = run.points.reduce(
        (best, one) => (Math.abs(one[0] - step) < Math.abs(best[0] - step) ? one : best),
        run.points[0] ?? [0, NaN],
      );
      return `${run.name} ${lossText(point[1])}`;
    });
    this.readout.textContent = `step ${step}: ${near.join(", ")}`;
    this.plot.draw();
  }

  draw() {
    this.plot.draw();
  }

  _draw() {
    const { plot } = this;
    const { context } = plot;
    plot.yAxis(
      roundTicks(...this.values, 6),
      (tick) => this.y(tick),
      (tick) => tick.toFixed(this.values[1] - this.values[0] < 0.5 ? 3 : 2),
    );
    plot.xAxis(
      roundTicks(...this.steps, plot.width / 90).filter(Number.isInteger),
      (tick) => this.x(tick),
      (tick) => tick.toLocaleString("en-US"),
      "step",
    );
    plot.yTitle("loss, nats a token");
    for (const run of this.runs) {
      context.save();
      context.strokeStyle = run.color;
      context.lineWidth = 2;
      context.lineJoin = "round";
      context.setLineDash(run.dash);
      context.beginPath();
      for (const [step, loss] of thinned(averaged(run.points, Number(this.smooth.value)), plot.right - plot.left))
        context.lineTo(this.x(step), this.y(loss));
      context.stroke();
      context.restore();
    }
    if (this.cursor !== null && this.cursor !== undefined)
      plot.line(this.x(this.cursor), plot.top, this.x(this.cursor), plot.bottom, plot.color("ink"));
  }
}

function lossText(loss) {
  return Number.isNaN(loss) ? "none" : loss.toFixed(4);
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (!(high >= low)) return [0, 1];
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

/** Puts in place of each loss the mean of it and of those before it, `steps` in all. */
function averaged(points, steps) {
  let sum = 0;
  return points.map(([step, loss], place) => {
    sum += loss - (place >= steps ? points[place - steps][1] : 0);
    return [step, steps === 1 ? loss : sum / Math.min(steps, place + 1)];
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
