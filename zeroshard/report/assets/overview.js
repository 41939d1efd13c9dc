// The overview: what was planned or ran and how it ended, curves of all runs, and the settings that differ.

import { pointsOf, runStyle, StepChart, stepsOf } from "./chart.js";
import { columnColor, el, explain, legend, PALETTE, swatch, table } from "./dom.js";
import { lossChart } from "./losses.js";
import { KINDS, verdictBadge } from "./sources.js";
import { binaryUnit, byteTicks, byteTickText, bytesText, countTickText, exactBytes, plainNumber, secondsText, valueText } from "./units.js";

const STATES = { complete: "complete", interrupted: "interrupted", unfinished: "not finished" };
const PART_COLORS = {
  "other, at the peak": PALETTE.purple,
  "reserved, unallocated": PALETTE.gray,
  "context, communicators": PALETTE.yellow,
};
const NOT_SET = "not set";

export class OverviewView {
  constructor(data) {
    const sources = data.sources ?? [];
    const curves = data.curves ?? [];
    this.charts = curves.length ? chartsOf(curves, (step) => this.charts.forEach(({ chart }) => chart.moveTo(step))) : [];
    this.element = el(
      "div",
      { id: "overview" },
      el("div", { class: "cards" }, sources.map(cardOf)),
      sources.some((one) => one.memory)
        ? el(
            "p",
            { class: "muted" },
            "Total: device memory of the fullest rank at its peak. It is what torch's allocator has reserved, and what lies outside the allocator. The verdict compares it with the memory of the device.",
          )
        : null,
      this.charts.length ? curvesOf(curves, this.charts) : null,
      ...["run", "plan"].map((kind) => differencesOf(kind, sources.filter((one) => one.kind === kind))),
    );
  }

  draw() {
    for (const { chart } of this.charts) chart.draw();
  }
}

/** One source: its kind, name and verdict or state, its most important number, the total of a plan, the other numbers. */
function cardOf(source) {
  const [first, ...others] = source.results ?? [];
  return el(
    "article",
    { class: "card", "aria-label": `${KINDS[source.kind]}: ${source.name}` },
    el(
      "div",
      { class: "row spread" },
      el("span", { class: "kind" }, KINDS[source.kind]),
      verdictBadge(source.verdict),
      source.state ? el("span", { class: "badge", "data-state": source.state }, STATES[source.state]) : null,
    ),
    el("h3", {}, source.name),
    source.model ? el("p", { class: "muted" }, modelText(source.model)) : null,
    source.memory ? totalOf(source) : null,
    first ? el("p", {}, el("span", { class: "big", "data-value": String(first.value) }, resultText(first)), ` ${first.what}`) : null,
    others.length
      ? el(
          "dl",
          { class: "numbers" },
          others.map((one) => el("div", {}, el("dt", {}, one.what), el("dd", { "data-value": String(one.value) }, resultText(one)))),
        )
      : null,
  );
}

/** A loss has the digits of the curves; a number that is not finite has none. */
function resultText({ value, unit }) {
  if (value === null) return "not finite";
  return unit.startsWith("nats") ? `${value.toFixed(4)} ${unit}` : valueText(value, unit);
}

function modelText(model) {
  const numel = `${model.parameters_numel.toLocaleString("en-US")} parameters`;
  const details = Object.entries(model.details ?? {}).map(([name, value]) => `${name} ${value}`);
  return [model.name, ...(model.name.includes(numel) ? [] : [numel]), ...details].join(", ");
}

/** The total of a plan, and its parts on the scale of the device. */
function totalOf({ memory, hardware }) {
  const { total_bytes: total, parts } = memory;
  const scale = Math.max(total, hardware?.capacity_bytes ?? 0) || 1;
  const entries = Object.entries(parts).filter(([, nbytes]) => nbytes);
  const color = ([name], place) => PART_COLORS[name] ?? columnColor(name, place);
  const part = (entry, place) => {
    const [name, nbytes] = entry;
    const style = { background: color(entry, place), width: `${(100 * nbytes) / scale}%` };
    return explain(el("i", { style, "data-bytes": String(nbytes) }), () => `${name}: ${exactBytes(nbytes)}`);
  };
  const device = hardware
    ? el("b", { style: { left: `${(100 * hardware.capacity_bytes) / scale}%` }, "aria-hidden": "true" })
    : null;
  return el(
    "div",
    { class: "total" },
    el(
      "p",
      {},
      el("span", { class: "big", "data-total": String(total), title: exactBytes(total) }, bytesText(total)),
      " in total",
      hardware ? `, of ${bytesText(hardware.capacity_bytes)} of ${hardware.name}` : "",
    ),
    el("div", { class: "stack", "aria-hidden": "true" }, entries.map(part), device),
    el(
      "ul",
      { class: "legend" },
      entries.map((entry, place) => el("li", {}, swatch(color(entry, place)), `${entry[0]} ${bytesText(entry[1], binaryUnit(total))}`)),
    ),
  );
}

/** The charts that have something to show, each with its title. */
function chartsOf(curves, onmove) {
  const steps = stepsOf(curves);
  const columns = (key) => curves.map((one, place) => ({ run: one.run, ...runStyle(place), points: one[key] ? pointsOf(one.step, one[key]) : [] }));
  const losses = columns("loss").map((one, place) => {
    const { heldout } = curves[place];
    return { ...one, heldout: heldout ? pointsOf(heldout.step, heldout.loss) : [] };
  });
  const chart = (title, key, name, more = {}) => ({
    title,
    chart: new StepChart({ title, series: columns(key), steps, name, onmove, ...more }),
  });
  const hasHeldout = losses.some((one) => one.heldout.length);
  return [
    {
      title: `Loss, nats per token${hasHeldout ? "; circles: on held-out text" : ""}`,
      chart: lossChart(losses, steps, { onmove }),
    },
    chart("Learning rate", "learning_rate", rateText, { isFromZero: true }),
    chart("Norm of the gradients, before clipping", "grad_norm", rateText, { mayBeLog: true }),
    chart("Tokens per second, all ranks", "tokens_per_s", plainNumber, { tickName: countTickText, isFromZero: true }),
    chart("Clock: seconds since the first step of all runs", "clock_s", secondsText, { isFromZero: true }),
    chart("Part of the devices' peak (MFU)", "mfu", (value) => `${(100 * value).toFixed(1)}%`, { isFromZero: true }),
    chart("State memory of rank 0: sum of its columns' peaks, without activations", "memory_bytes", bytesText, {
      tickName: byteTickText,
      ticks: (low, high, count) => byteTicks(high, count, low),
      isFromZero: true,
    }),
  ].filter(({ chart: one }) => one.series.length);
}

function rateText(value) {
  return String(Number(value.toPrecision(4)));
}

function curvesOf(curves, charts) {
  return el(
    "div",
    {},
    el("h3", {}, "Curves"),
    el(
      "p",
      { class: "muted" },
      `Against the step, on the same axes for all runs. The line under each title has the values at the cursor, or the last ones.`,
    ),
    curves.length > 1 ? legend(curves.map(({ run }, place) => [runStyle(place).color, run])) : null,
    el(
      "div",
      { class: "charts" },
      charts.map(({ title, chart }) => el("figure", {}, el("h4", {}, title), chart.readout, chart.plot.canvas)),
    ),
  );
}

/** The settings that differ between sources of a kind, and behind a button those that are equal. */
function differencesOf(kind, sources) {
  const withOptions = sources.filter((one) => Object.keys(one.options ?? {}).length);
  if (!withOptions.length) return null;
  const names = [...new Set(withOptions.flatMap((one) => Object.keys(one.options)))];
  const values = (name) => withOptions.map((one) => optionText(one.options[name]));
  const differing = names.filter((name) => new Set(values(name)).size > 1);
  const equal = names.filter((name) => !differing.includes(name));
  const plural = `${kind}s`;
  const isOne = withOptions.length === 1;
  return el(
    "section",
    { id: `settings-${kind}` },
    el("h3", {}, isOne ? `Settings of the ${kind}` : `Settings that differ between the ${plural}`),
    differing.length
      ? table([["setting", false], ...withOptions.map((one) => [one.name, false])], differing.map((name) => [name, ...values(name)]))
      : isOne
        ? null
        : el("p", {}, `All settings of the ${plural} are equal.`),
    equal.length
      ? el(
          "details",
          {},
          el("summary", {}, isOne ? `${equal.length} settings` : `${equal.length} settings are equal`),
          el(
            "dl",
            { class: "numbers" },
            equal.map((name) => el("div", {}, el("dt", {}, name), el("dd", {}, values(name)[0]))),
          ),
        )
      : null,
  );
}

function optionText(value) {
  if (value === undefined) return NOT_SET;
  if (value === "") return "empty";
  return String(value);
}
