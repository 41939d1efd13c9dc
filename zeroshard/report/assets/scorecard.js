// The scorecard: predictions against what was published or measured.

import { el, legend, PALETTE, SERIES, swatch, table } from "./dom.js";
import { GLYPHS, Scatter } from "./scatter.js";
import { logUnitTicks, percentText, roundTicks, tickText, valueText } from "./units.js";

const BAND = 0.05;
const SHAPES = Object.keys(GLYPHS);

/** Median, and the value that nine of ten are below, of absolute relative errors. */
export function errorsOf(scores) {
  const errors = scores.map((one) => Math.abs(errorOf(one))).sort((one, other) => one - other);
  const at = (share) => {
    const place = share * (errors.length - 1);
    const below = Math.floor(place);
    return errors[below] + (place - below) * ((errors[below + 1] ?? errors[below]) - errors[below]);
  };
  return { count: errors.length, median: at(0.5), p90: at(0.9), within: errors.filter((one) => one <= BAND).length };
}

export class ScorecardView {
  constructor(scorecard) {
    this.scores = scorecard.filter((one) => one.measured > 0 && one.predicted > 0);
    this.metrics = [...new Set(this.scores.map((one) => `${one.metric} (${one.unit})`))];
    this.sources = [...new Set(this.scores.map((one) => one.source))];
    this.metric = el(
      "select",
      { id: "scorecard-metric", onchange: () => this.update() },
      this.metrics.map((one) => el("option", { value: one }, one)),
    );
    this.source = el(
      "select",
      { id: "scorecard-source", onchange: () => this.update() },
      el("option", { value: "" }, "all sources"),
      this.sources.map((one) => el("option", { value: one }, one)),
    );
    this.errors = el(
      "button",
      {
        class: "plain",
        type: "button",
        id: "scorecard-errors",
        "aria-pressed": "false",
        onclick: () => {
          this.errors.setAttribute("aria-pressed", String(!this.isOfErrors));
          this.update();
        },
      },
      "Show errors",
    );
    this.summary = el("div", { id: "scorecard-summary" });
    this.detail = el(
      "p",
      { id: "scorecard-detail", role: "status", class: "muted" },
      "Click a mark, or use the arrow keys, for its numbers.",
    );
    this.legend = el("div");
    this.scatter = new Scatter({
      label: "Predicted against measured",
      height: 420,
      under: (scatter) => this._band(scatter),
      onselect: ({ of: one }) => {
        this.detail.textContent = describe(one);
        this.detail.dataset.predicted = String(one.predicted);
      },
    });
    const label = (text, select) => el("label", {}, `${text} `, select);
    this.element = el(
      "div",
      {},
      el(
        "p",
        {},
        `Predictions beside what was published or measured. On the line a prediction is exact; the band is ±${100 * BAND}%.`,
      ),
      el("div", { class: "row" }, label("Quantity", this.metric), label("Source", this.source), this.errors),
      this.legend,
      this.scatter.plot.canvas,
      this.detail,
      this.summary,
    );
    this.update();
  }

  style(source) {
    const place = this.sources.indexOf(source);
    return [SHAPES[place % SHAPES.length], SERIES[place % SERIES.length]];
  }

  update() {
    const inMetric = this.scores.filter((one) => `${one.metric} (${one.unit})` === this.metric.value);
    const shown = inMetric.filter((one) => !this.source.value || one.source === this.source.value);
    const sources = this.sources.filter((source) => inMetric.some((one) => one.source === source));
    this.legend.replaceChildren(
      legend(sources.map((source) => [this.style(source)[1], source, GLYPHS[this.style(source)[0]]])),
    );
    const values = (shown.length ? shown : inMetric).flatMap((one) => [one.predicted, one.measured]);
    const [low, high] = [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
    const unit = inMetric[0]?.unit ?? "";
    const axis = (title) => ({
      low,
      high,
      isLog: true,
      title,
      ticks: logUnitTicks(low, high, unit),
      name: (tick) => tickText(tick, unit),
    });
    const worst = 1.1 * Math.max(2 * BAND, ...shown.map((one) => Math.abs(errorOf(one))));
    const errors = {
      low: -worst,
      high: worst,
      isLog: false,
      title: "error of the prediction",
      ticks: roundTicks(-worst, worst, 8),
      name: (tick) => percentText(tick, 0),
    };
    this.isOfErrors = this.errors.getAttribute("aria-pressed") === "true";
    this.scatter.show(
      shown.map((one) => ({
        x: one.measured,
        y: this.isOfErrors ? errorOf(one) : one.predicted,
        shape: this.style(one.source)[0],
        color: this.style(one.source)[1],
        of: one,
        text: describe(one),
      })),
      axis("measured"),
      this.isOfErrors ? errors : axis("predicted"),
    );
    const line = (name, scores) => {
      const { count, median, p90, within } = errorsOf(scores);
      return [name, String(count), percentText(median).slice(1), percentText(p90).slice(1), `${within} of ${count}`];
    };
    const rows = sources.map((source) =>
      line(
        el("span", {}, swatch(this.style(source)[1]), source),
        inMetric.filter((one) => one.source === source),
      ),
    );
    this.summary.replaceChildren(
      el("h3", {}, "Error by source"),
      table(
        [
          ["source", false],
          ["rows", true],
          ["median error", true],
          ["90th percentile", true],
          [`within ${100 * BAND}%`, true],
        ],
        rows,
        line("all sources", inMetric),
      ),
    );
  }

  _band(scatter) {
    const { plot, xAxis } = scatter;
    const { context } = plot;
    const [low, high] = [xAxis.low, xAxis.high];
    context.save();
    context.beginPath();
    context.rect(plot.left, plot.top, plot.right - plot.left, plot.bottom - plot.top);
    context.clip();
    context.globalAlpha = 0.22;
    context.fillStyle = PALETTE.sky;
    context.beginPath();
    // Of a quantity the exact prediction is the quantity itself, of an error it is 0.
    const exact = this.isOfErrors ? () => 0 : (value) => value;
    const off = (value, share) => (this.isOfErrors ? share : value * (1 + share));
    context.moveTo(scatter.px(low), scatter.py(off(low, BAND)));
    context.lineTo(scatter.px(high), scatter.py(off(high, BAND)));
    context.lineTo(scatter.px(high), scatter.py(off(high, -BAND)));
    context.lineTo(scatter.px(low), scatter.py(off(low, -BAND)));
    context.fill();
    context.globalAlpha = 1;
    plot.line(scatter.px(low), scatter.py(exact(low)), scatter.px(high), scatter.py(exact(high)), plot.color("muted"));
    context.restore();
  }

  draw() {
    this.scatter.plot.draw();
  }
}

function errorOf(one) {
  return one.predicted / one.measured - 1;
}

function describe(one) {
  return `${one.label} (${one.source})\n${one.metric}: predicted ${valueText(one.predicted, one.unit)}, measured ${valueText(one.measured, one.unit)}, ${percentText(errorOf(one))}`;
}
