// The ranks, and the plan against the measurement: tables with bars.

import { bytesCell, columnColor, el, explain, legend, PALETTE, swatch, table } from "./dom.js";
import { bytesText, exactBytes, percentText, plainNumber, valueText } from "./units.js";

export class RanksView {
  constructor(data) {
    const { ranks, columns, hardware } = data;
    const resident = (rank) => Object.values(rank.resident_bytes).reduce((sum, one) => sum + one, 0);
    const widest = (rank) => Math.max(resident(rank), rank.peak_bytes ?? 0) || 1;
    const most = Math.max(...ranks.map(widest));
    const bar = (rank) => {
      const line = el(
        "div",
        {
          style: {
            display: "flex",
            height: "14px",
            background: "var(--grid)",
            width: `${(100 * widest(rank)) / most}%`,
          },
        },
        columns.map((column, place) => {
          const nbytes = rank.resident_bytes[column] ?? 0;
          const part = el("i", {
            style: { background: columnColor(column, place), width: `${(100 * nbytes) / widest(rank)}%` },
          });
          return explain(part, () => `${rank.name}, ${column}: ${exactBytes(nbytes)}`);
        }),
      );
      return el("div", { style: { "min-width": "140px" } }, line);
    };
    const shown = columns.filter((column) => ranks.some((rank) => rank.resident_bytes[column]));
    const hasPeak = ranks.some((rank) => rank.peak_bytes);
    this.element = el(
      "div",
      {},
      el(
        "p",
        {},
        `Bytes that each rank holds between steps, by column${hasPeak ? ", and the peak of a step, to which the grey part of each bar reaches" : ""}${hardware ? `; ${bytesText(hardware.usable_bytes)} are usable on ${hardware.name}` : ""}.`,
      ),
      legend(shown.map((column) => [columnColor(column, columns.indexOf(column)), column])),
      table(
        [
          ["ranks", false],
          ["number", true],
          ["between steps", true],
          ...(hasPeak ? [["peak", true]] : []),
          ["", false],
          ...shown.map((column) => [column, true]),
        ],
        ranks.map((rank) => [
          rank.name,
          rank.count.toLocaleString("en-US"),
          bytesCell(resident(rank)),
          ...(hasPeak ? [rank.peak_bytes ? bytesCell(rank.peak_bytes) : ""] : []),
          bar(rank),
          ...shown.map((column) => bytesCell(rank.resident_bytes[column] ?? 0)),
        ]),
      ),
    );
    this.element.id = "ranks";
  }
}

export class ComparisonView {
  constructor(comparison) {
    const colors = { predicted: PALETTE.sky, measured: PALETTE.blue };
    const rows = comparison.map((one) => {
      const high = Math.max(Math.abs(one.predicted), Math.abs(one.measured)) || 1;
      const pair = el(
        "div",
        { class: "pair", "aria-hidden": "true" },
        Object.keys(colors).map((key) =>
          el("i", {
            style: { background: colors[key], width: `${(100 * Math.abs(one[key])) / high}%` },
            "data-value": String(one[key]),
          }),
        ),
      );
      const text = (value) =>
        explain(el("span", { "data-value": String(value) }, valueText(value, one.unit)), () =>
          one.unit === "B" ? exactBytes(value) : `${value} ${one.unit}`,
        );
      const error = one.measured ? percentText(one.predicted / one.measured - 1, 2) : one.predicted ? "" : "0.00%";
      return [one.what, pair, text(one.predicted), text(one.measured), error];
    });
    this.element = el(
      "div",
      { id: "comparison" },
      el(
        "p",
        {},
        "What the plan said, and what the run measured. Bars are to the scale of their own line; the error is of the prediction, relative to the measurement.",
      ),
      legend(Object.entries(colors).map(([name, color]) => [color, name])),
      table(
        [
          ["quantity", false],
          ["", false],
          ["predicted", true],
          ["measured", true],
          ["error", true],
        ],
        rows,
      ),
    );
  }
}

/** What the page is about: the model, options and device. */
export function headerOf(data, themeButton) {
  const fact = (name, value) => el("span", {}, `${name} `, el("b", {}, String(value)));
  const facts = [];
  if (data.model) {
    facts.push(fact("model", data.model.name), fact("parameters", data.model.parameters_numel.toLocaleString("en-US")));
    for (const [name, value] of Object.entries(data.model.details ?? {}))
      facts.push(fact(name, typeof value === "number" ? plainNumber(value) : value));
  }
  for (const [name, value] of Object.entries(data.options ?? {}))
    facts.push(fact(name, typeof value === "number" ? plainNumber(value) : value));
  if (data.hardware)
    facts.push(
      fact(
        "device",
        `${data.hardware.name}, ${bytesText(data.hardware.usable_bytes)} usable of ${bytesText(data.hardware.capacity_bytes)}`,
      ),
    );
  return [
    el(
      "div",
      {},
      el("h1", {}, data.title),
      el(
        "div",
        { class: "facts" },
        el(
          "span",
          {},
          { plan: "a plan", run: (data.losses?.length ?? 1) > 1 ? `${data.losses.length} runs` : "a run" }[data.kind],
        ),
        facts,
      ),
    ),
    themeButton,
  ];
}
