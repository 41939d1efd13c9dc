// Scatter plots: the frontier of configurations, and the scorecard of predictions.

import { el, hideTooltip, legend, PALETTE, SERIES, showTooltip, swatch, table } from "./dom.js";
import { Plot } from "./plot.js";
import { binaryUnit, byteTickText, bytesText, countText, countTickText, logTicks, logUnitTicks, percentText, plainNumber, roundTicks, tickText, valueText } from "./units.js";

const NEAR_PX = 16;
const BAND = 0.05;
const VERDICTS = {
  fits: ["circle", PALETTE.green, "fits", "fit"], tight: ["triangle", PALETTE.orange, "tight", "are tight"],
  no: ["cross", PALETTE.vermilion, "does not fit", "do not fit"],
};

const SHAPES = ["circle", "square", "triangle", "diamond", "cross"];
const GLYPHS = { circle: "●", square: "■", triangle: "▲", diamond: "◆", cross: "✕" };

class Scatter {
  /** Points are { x, y, shape, color, text, of }; axes are { low, high, isLog, ticks, name, title }. */
  constructor({ label, height, onselect, under = () => {}, margin = {} }) {
    this.points = [];
    this.onselect = onselect;
    this.under = under;
    this.plot = new Plot({ height, label: `${label}; arrow keys go from point to point`, margin: { left: 78, bottom: 46, top: 14, right: 18, ...margin }, draw: () => this._draw(), role: "application" });
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

  px(value) { return this._scale(value, this.xAxis, this.plot.left, this.plot.right); }

  py(value) { return this._scale(value, this.yAxis, this.plot.bottom, this.plot.top); }

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
    for (const point of this.points) mark(plot.context, this.px(point.x), this.py(point.y), point.shape, point.color, 4.5);
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

/** Keeps the configurations that no other beats in both memory and speed, by rising memory. */
export function paretoOf(configurations) {
  const sorted = [...configurations].sort((one, other) => one.peak_bytes - other.peak_bytes || other.tokens_per_s - one.tokens_per_s);
  const front = [];
  for (const one of sorted) if (!front.length || one.tokens_per_s > front.at(-1).tokens_per_s) front.push(one);
  return front;
}

export class FrontierView {
  constructor(configurations, hardware) {
    this.configurations = configurations;
    this.front = paretoOf(configurations);
    this.detail = el("div", { id: "frontier-detail", role: "status" });
    this.scatter = new Scatter({
      label: "Tokens per second against peak memory of all configurations", height: 400,
      onselect: (point) => this._show(point.of), under: (scatter) => this._lines(scatter, hardware),
    });
    const counts = Object.entries(VERDICTS).map(([verdict, [shape, color, , name]]) => [color, `${configurations.filter((one) => one.verdict === verdict).length.toLocaleString("en-US")} ${name}`, GLYPHS[shape]]);
    this.element = el("div", {},
      el("p", {}, "Each mark is a configuration. The line joins those that no other beats in both memory and speed; the star is the best that fits. Click a mark, or use the arrow keys, for its options."),
      legend(counts), this.scatter.plot.canvas, this.detail);
    const memory = configurations.map((one) => one.peak_bytes);
    const limit = hardware ? hardware.usable_bytes * 1.05 : 0;
    const high = Math.max(...memory, limit);
    const speed = configurations.map((one) => one.tokens_per_s).filter((one) => one > 0);
    const isLog = Math.max(...memory) / Math.min(...memory) > 20;
    const low = isLog ? Math.min(...memory) / 1.2 : 0;
    const unit = binaryUnit(high);
    const scale = 1024 ** unit;
    const [slow, fast] = [Math.min(...speed), Math.max(...speed)];
    const isLogSpeed = fast / slow > 20;
    this.axes = [
      { low, high: high * 1.04, isLog, title: "peak of the fullest rank", name: byteTickText, ticks: isLog ? logUnitTicks(low, high, "B") : roundTicks(0, high / scale, 8).map((tick) => tick * scale) },
      { low: isLogSpeed ? slow / 1.2 : 0, high: fast * (isLogSpeed ? 1.2 : 1.06), isLog: isLogSpeed, title: "tokens/s, all ranks", name: countTickText, ticks: isLogSpeed ? logTicks(slow / 1.2, fast * 1.2) : roundTicks(0, fast * 1.06, 6) },
    ];
    this.points = configurations.filter((one) => one.tokens_per_s > 0).map((one) => ({
      x: one.peak_bytes, y: one.tokens_per_s, shape: one.is_best ? "star" : VERDICTS[one.verdict][0], color: VERDICTS[one.verdict][1], of: one,
      text: `${one.label}\n${bytesText(one.peak_bytes)}, ${countText(one.tokens_per_s)} tokens/s, ${VERDICTS[one.verdict][2]}`,
    }));
    // The best is drawn last, so that nothing hides it.
    this.points.sort((one, other) => Number(one.of.is_best) - Number(other.of.is_best));
    this.scatter.show(this.points, ...this.axes);
    const best = configurations.find((one) => one.is_best);
    if (best) this.scatter.select(this.scatter.points.find((point) => point.of === best));
    else this.detail.append(el("p", { class: "muted" }, "No configuration is marked as the best."));
  }

  _lines(scatter, hardware) {
    const { plot } = scatter;
    const { context } = plot;
    if (hardware) {
      const x = scatter.px(hardware.usable_bytes);
      plot.line(x, plot.top, x, plot.bottom, plot.color("ink"), { dash: [6, 4] });
      plot.text(`usable: ${bytesText(hardware.usable_bytes)}`, x - 5, plot.top + 8, { align: "right", color: plot.color("ink"), isOnPaper: true });
    }
    context.strokeStyle = plot.color("ink");
    context.lineWidth = 1.5;
    context.beginPath();
    this.front.filter((one) => one.tokens_per_s > 0).forEach((one, place) => {
      const [x, y] = [scatter.px(one.peak_bytes), scatter.py(one.tokens_per_s)];
      if (place) context.lineTo(x, scatter.py(this.front[place - 1].tokens_per_s));
      context.lineTo(x, y);
    });
    context.stroke();
    context.lineWidth = 1;
  }

  _show(one) {
    const [, color, name] = VERDICTS[one.verdict];
    const rows = Object.entries(one.options).map(([key, value]) => [key, String(value)]);
    this.detail.replaceChildren(
      el("h3", {}, swatch(color), one.label, one.is_best ? " ★ the best that fits" : ""),
      el("p", { "data-bytes": String(one.peak_bytes) }, `${bytesText(one.peak_bytes)} at the peak, ${plainNumber(one.tokens_per_s)} tokens/s: `, el("span", { class: "badge", "data-verdict": one.verdict }, name)),
      rows.length ? table([["option", false], ["value", false]], rows) : "");
  }

  draw() { this.scatter.plot.draw(); }
}

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
    this.metric = el("select", { id: "scorecard-metric", onchange: () => this.update() }, this.metrics.map((one) => el("option", { value: one }, one)));
    this.source = el("select", { id: "scorecard-source", onchange: () => this.update() }, el("option", { value: "" }, "all sources"), this.sources.map((one) => el("option", { value: one }, one)));
    this.errors = el("button", {
      class: "plain", type: "button", id: "scorecard-errors", "aria-pressed": "false",
      onclick: () => { this.errors.setAttribute("aria-pressed", String(!this.isOfErrors)); this.update(); },
    }, "Show errors");
    this.summary = el("div", { id: "scorecard-summary" });
    this.detail = el("p", { id: "scorecard-detail", role: "status", class: "muted" }, "Click a mark, or use the arrow keys, for its numbers.");
    this.legend = el("div");
    this.scatter = new Scatter({
      label: "Predicted against measured", height: 420, under: (scatter) => this._band(scatter),
      onselect: ({ of: one }) => { this.detail.textContent = describe(one); this.detail.dataset.predicted = String(one.predicted); },
    });
    const label = (text, select) => el("label", {}, `${text} `, select);
    this.element = el("div", {},
      el("p", {}, `Predictions beside what was published or measured. On the line a prediction is exact; the band is ±${100 * BAND}%.`),
      el("div", { class: "row" }, label("Quantity", this.metric), label("Source", this.source), this.errors),
      this.legend, this.scatter.plot.canvas, this.detail, this.summary);
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
    this.legend.replaceChildren(legend(sources.map((source) => [this.style(source)[1], source, GLYPHS[this.style(source)[0]]])));
    const values = (shown.length ? shown : inMetric).flatMap((one) => [one.predicted, one.measured]);
    const [low, high] = [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
    const unit = inMetric[0]?.unit ?? "";
    const axis = (title) => ({ low, high, isLog: true, title, ticks: logUnitTicks(low, high, unit), name: (tick) => tickText(tick, unit) });
    const worst = 1.1 * Math.max(2 * BAND, ...shown.map((one) => Math.abs(errorOf(one))));
    const errors = { low: -worst, high: worst, isLog: false, title: "error of the prediction", ticks: roundTicks(-worst, worst, 8), name: (tick) => percentText(tick, 0) };
    this.isOfErrors = this.errors.getAttribute("aria-pressed") === "true";
    this.scatter.show(shown.map((one) => ({
      x: one.measured, y: this.isOfErrors ? errorOf(one) : one.predicted, shape: this.style(one.source)[0], color: this.style(one.source)[1], of: one, text: describe(one),
    })), axis("measured"), this.isOfErrors ? errors : axis("predicted"));
    const line = (name, scores) => {
      const { count, median, p90, within } = errorsOf(scores);
      return [name, String(count), percentText(median).slice(1), percentText(p90).slice(1), `${within} of ${count}`];
    };
    const rows = sources.map((source) => line(el("span", {}, swatch(this.style(source)[1]), source), inMetric.filter((one) => one.source === source)));
    this.summary.replaceChildren(el("h3", {}, "Error by source"),
      table([["source", false], ["rows", true], ["median error", true], ["90th percentile", true], [`within ${100 * BAND}%`, true]], rows, line("all sources", inMetric)));
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

  draw() { this.scatter.plot.draw(); }
}

function errorOf(one) {
  return one.predicted / one.measured - 1;
}

function describe(one) {
  return `${one.label} (${one.source})\n${one.metric}: predicted ${valueText(one.predicted, one.unit)}, measured ${valueText(one.measured, one.unit)}, ${percentText(errorOf(one))}`;
}
