// Loss curves of several runs.

import { pointsOf, runStyle, StepChart, stepsOf } from "./chart.js";
import { el, swatch, table } from "./dom.js";
import { roundTicks } from "./units.js";

export class LossView {
  constructor(curves) {
    this.runs = curves.map(({ run, step, loss, heldout }, place) => ({
      run,
      ...runStyle(place),
      points: pointsOf(step, loss),
      heldout: heldout ? pointsOf(heldout.step, heldout.loss) : [],
      lost: loss.filter((value) => value === null).length,
    }));
    this.chart = lossChart(this.runs, stepsOf(curves), { height: 380 });
    this.chart.readout.id = "loss-readout";
    this.smooth = el(
      "select",
      {
        id: "loss-smooth",
        onchange: () => {
          this.chart.average = Number(this.smooth.value);
          this.draw();
        },
      },
      [1, 10, 50, 200].map((steps) =>
        el("option", { value: String(steps) }, steps === 1 ? "each step" : `mean of ${steps} steps`),
      ),
    );
    const hasHeldout = this.runs.some((run) => run.heldout.length);
    const equals = this.runs.map((run) => this._equalTo(run));
    const hasEqual = equals.some((text) => text);
    const rows = this.runs.map((run, place) => {
      const lowest = run.points.reduce((best, one) => (one[1] < best[1] ? one : best), run.points[0] ?? [0, NaN]);
      const last = run.points.at(-1) ?? [0, NaN];
      return [
        el("span", {}, swatch(run.color), run.run),
        String(run.points.length + run.lost),
        lossText(last[1]),
        lossText(lowest[1]),
        String(lowest[0]),
        ...(hasHeldout ? [lossText(run.heldout.at(-1)?.[1] ?? NaN)] : []),
        ...(hasEqual ? [equals[place]] : []),
      ];
    });
    this.element = el(
      "div",
      { id: "losses" },
      el(
        "p",
        {},
        `Training loss in nats per token, after each step${hasHeldout ? "; circles are the loss on held-out text" : ""}.`,
      ),
      el("label", { class: "row" }, "Show", this.smooth),
      this.chart.plot.canvas,
      this.chart.readout,
      table(
        [
          ["run", false],
          ["steps", true],
          ["last loss", true],
          ["lowest loss", true],
          ["at step", true],
          ...(hasHeldout ? [["held-out loss", true]] : []),
          ...(hasEqual ? [["equal to", false]] : []),
        ],
        rows,
      ),
    );
  }

  /** Names an earlier run that has the same loss at each step, to the last digit. */
  _equalTo(run) {
    const text = JSON.stringify(run.points);
    const other = this.runs.find((one) => JSON.stringify(one.points) === text);
    return other === run ? "" : `${other.run}, at each step`;
  }

  draw() {
    this.chart.draw();
  }
}

/** The chart of training losses, with held-out losses as circles. */
export function lossChart(runs, steps, options) {
  const series = runs.flatMap((run) => [
    { ...run, label: run.heldout.length ? `${run.run}, training` : run.run },
    ...(run.heldout.length ? [{ ...run, points: run.heldout, isMarked: true, label: `${run.run}, held out` }] : []),
  ]);
  return new StepChart({
    title: "Loss",
    series,
    steps,
    name: lossText,
    tickName: (tick) => String(Number(tick.toFixed(4))),
    ticks: roundTicks,
    ...options,
  });
}

function lossText(loss) {
  return Number.isNaN(loss) ? "none" : loss.toFixed(4);
}
