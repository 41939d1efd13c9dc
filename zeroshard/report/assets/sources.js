// What a view shows: the plans, searches, runs and scorecards of the page, by the entry of the data.

import { el } from "./dom.js";

export const BADGES = { fits: "✓ fits", tight: "≈ tight", no: "✗ does not fit" };
export const KINDS = { plan: "Plan", search: "Search", run: "Run", scorecard: "Scorecard" };
const PLURALS = { plan: "plans", search: "searches", run: "runs", scorecard: "scorecards" };
const RECORDING =
  "A recording of one step of a small GPT on 4 ranks, which comes with the page: none of its plans and runs.";

/** The sources of a view; all of them for a view that the data does not name. */
export function sourcesOf(data, view) {
  const sources = data.sources ?? [];
  return (data.shows?.[view] ?? [...sources.keys()]).map((place) => sources[place]);
}

/** The device of a view, where its sources have one. */
export function hardwareOf(data, view) {
  return sourcesOf(data, view).find((one) => one.hardware)?.hardware ?? null;
}

export function verdictBadge(verdict) {
  return verdict ? el("span", { class: "badge", "data-verdict": verdict }, BADGES[verdict]) : null;
}

/** Counts the sources: "1 plan, 2 runs". */
export function countsOf(data) {
  return Object.entries(PLURALS)
    .map(([kind, plural]) => [(data.sources ?? []).filter((one) => one.kind === kind).length, kind, plural])
    .filter(([count]) => count)
    .map(([count, kind, plural]) => `${count} ${count === 1 ? kind : plural}`)
    .join(", ");
}

/** The header of a view: each of its sources, and the verdict of a plan beside its own name only. */
export function headOf(data, view) {
  // The overview has a card of each source, and ranks that name their source stand under its name.
  if (view === "overview" || (view === "ranks" && data.ranks.some((one) => one.source !== undefined))) return null;
  if (view === "walk") return el("p", { class: "shows muted" }, RECORDING);
  const shown = sourcesOf(data, view);
  if (!shown.length) return null;
  return el(
    "ul",
    { class: "shows", "aria-label": "What this view shows" },
    shown.map((one) => el("li", {}, el("span", { class: "kind" }, KINDS[one.kind]), el("b", {}, one.name), verdictBadge(one.verdict))),
  );
}
