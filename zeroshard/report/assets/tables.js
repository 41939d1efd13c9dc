// The ranks, and the plan against the measurement: tables with bars.

import { bytesCell, columnColor, el, explain, legend, PALETTE, swatch, table } from "./dom.js";
import { KINDS, verdictBadge } from "./sources.js";
import { bytesText, exactBytes, percentText, valueText } from "./units.js";

/** The ranks of each plan and run, under its name and on a scale of its own. */
export class RanksView {
  constructor(data) {
    const sources = data.sources ?? [];
    const places = [...new Set(data.ranks.map((rank) => rank.source ?? null))];
    this.element = el(
      "div",
      { id: "ranks" },
      el("p", {}, "Bytes that each rank holds between steps, by column."),
      places.map((place) => {
        const source = place === null ? null : sources[place];
        const ranks = data.ranks.filter((rank) => (rank.source ?? null) === place);
        const columns = data.columns ?? [];
        return el(
          "section",
          {},
          source ? el("h3", {}, el("span", { class: "kind" }, KINDS[source.kind]), source.name, verdictBadge(source.verdict)) : null,
          ranks.some((rank) => rank.peak_bytes)
            ? el(
                "p",
                { class: "muted" },
                `The grey part of each bar reaches to what is allocated at the peak; the total adds what torch's allocator has reserved, and what lies outside it${source?.hardware ? `. ${source.hardware.name} has ${bytesText(source.hardware.capacity_bytes)}` : ""}.`,
              )
            : null,
          ranksTable(ranks, columns),
        );
      }),
    );
  }
}

function ranksTable(ranks, columns) {
  const resident = (rank) => Object.values(rank.resident_bytes).reduce((sum, one) => sum + one, 0);
  const widest = (rank) => Math.max(resident(rank), rank.peak_bytes ?? 0) || 1;
  const most = Math.max(...ranks.map(widest));
  const bar = (rank) => {
    const line = el(
      "div",
      { class: "stack", style: { width: `${(100 * widest(rank)) / most}%` } },
      columns.map((column, place) => {
        const nbytes = rank.resident_bytes[column] ?? 0;
        const part = el("i", {
          style: { background: columnColor(column, place), width: `${(100 * nbytes) / widest(rank)}%` },
        });
        return explain(part, () => `${rank.name}, ${column}: ${exactBytes(nbytes)}`);
      }),
    );
    return el("div", { class: "ranks-bar" }, line);
  };
  const shown = columns.filter((column) => ranks.some((rank) => rank.resident_bytes[column]));
  const optional = [
    ["allocated at the peak", "peak_bytes"],
    ["total", "total_bytes"],
  ].filter(([, key]) => ranks.some((rank) => rank[key]));
  return el(
    "div",
    {},
    legend(shown.map((column) => [columnColor(column, columns.indexOf(column)), column])),
    table(
      [
        ["ranks", false],
        ["number", true],
        ["between steps", true],
        ...optional.map(([title]) => [title, true]),
        ["", false],
        ...shown.map((column) => [column, true]),
      ],
      ranks.map((rank) => [
        rank.name,
        rank.count.toLocaleString("en-US"),
        bytesCell(resident(rank)),
        ...optional.map(([, key]) => (rank[key] ? bytesCell(rank[key]) : "")),
        bar(rank),
        ...shown.map((column) => bytesCell(rank.resident_bytes[column] ?? 0)),
      ]),
    ),
  );
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
