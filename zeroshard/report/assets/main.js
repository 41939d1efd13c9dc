// Reads the data of the page, and shows a tab for each view that has some.

import { el } from "./dom.js";
import { FilmView } from "./film.js";
import { FrontierView } from "./frontier.js";
import { LossView } from "./losses.js";
import { OverviewView } from "./overview.js";
import { PlayerView } from "./player.js";
import { ScorecardView } from "./scorecard.js";
import { countsOf, hardwareOf, headOf } from "./sources.js";
import { ComparisonView, RanksView } from "./tables.js";
import { WalkView } from "./walk.js";

// Of each view: its name, its title, the entries of the data of which one is enough for it, and how it is made.
const VIEWS = [
  ["overview", "Overview", ["sources", "curves"], (data) => new OverviewView(data)],
  ["ranks", "Ranks", ["ranks"], (data) => new RanksView(data)],
  ["player", "Stage player", ["player"], (data) => new PlayerView(data.player, data.rows, hardwareOf(data, "player"))],
  ["film", "Step film", ["film"], (data) => new FilmView(data)],
  ["frontier", "Frontier", ["frontier"], (data) => new FrontierView(data.frontier, hardwareOf(data, "frontier"))],
  ["scorecard", "Scorecard", ["scorecard"], (data) => new ScorecardView(data.scorecard)],
  ["comparison", "Plan against measurement", ["comparison"], (data) => new ComparisonView(data.comparison)],
  ["losses", "Loss", ["curves"], (data) => new LossView(data.curves)],
  ["walk", "The walk", ["walk"], (data) => new WalkView(data.walk)],
];
const isThere = (entry) => (Array.isArray(entry) ? entry.length > 0 : Boolean(entry));

/** The data is JSON, deflated, as base64. */
async function readData() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

function makeThemeButton() {
  const root = document.documentElement;
  const wished = matchMedia("(prefers-color-scheme: dark)");
  const button = el("button", { class: "plain", type: "button", id: "theme" });
  const set = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", theme === "dark" ? "Switch to light colours" : "Switch to dark colours");
    dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => set(root.dataset.theme === "dark" ? "light" : "dark"));
  wished.addEventListener("change", () => set(wished.matches ? "dark" : "light"));
  set(wished.matches ? "dark" : "light");
  return button;
}

class Tabs {
  constructor(data) {
    this.views = new Map();
    this.data = data;
    this.entries = VIEWS.filter(([, , entries]) => entries.some((entry) => isThere(data[entry]))).map(
      ([key, title, entries, make]) => {
        const tab = el(
          "button",
          { role: "tab", type: "button", id: `tab-${key}`, "aria-controls": key, onclick: () => this.show(key) },
          title,
        );
        const panel = el("section", {
          role: "tabpanel",
          "aria-labelledby": `tab-${key}`,
          id: `panel-${key}`,
          hidden: true,
        });
        return { key, title, tab, panel, entry: entries[0], make: () => make(data) };
      },
    );
    const bar = document.getElementById("tabs");
    bar.append(...this.entries.map(({ tab }) => tab));
    bar.addEventListener("keydown", (event) => this._key(event));
    document.getElementById("panels").append(...this.entries.map(({ panel }) => panel));
    addEventListener("hashchange", () => this.show(location.hash.slice(1)));
  }

  show(key) {
    const entry = this.entries.find((one) => one.key === key) ?? this.entries[0];
    if (!entry) return;
    for (const { tab, panel } of this.entries) {
      const isShown = tab === entry.tab;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
      panel.hidden = !isShown;
    }
    for (const [other, view] of this.views) if (other !== entry.key) view.hide?.();
    // A view is made when it is first seen: a page of all views opens as fast as one of them.
    if (!this.views.has(entry.key)) {
      const view = entry.make();
      this.views.set(entry.key, view);
      const head = headOf(this.data, entry.key === "overview" ? entry.key : entry.entry);
      entry.panel.append(el("h2", {}, entry.title), ...(head ? [head] : []), view.element);
    }
    this.views.get(entry.key).draw?.();
    history.replaceState(null, "", `#${entry.key}`);
  }

  _key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const place = this.entries.findIndex(({ tab }) => tab.getAttribute("aria-selected") === "true");
    const next = this.entries.at((place + step) % this.entries.length);
    this.show(next.key);
    next.tab.focus();
  }
}

/** Says what is wrong instead of leaving the page empty. */
function refuse(error) {
  const text = "The data of this page cannot be read. It needs a browser of 2023 or later, and a file that is whole.";
  document.getElementById("panels").append(el("p", { role: "alert" }, text));
  throw error;
}

const data = await readData().catch(refuse);
document
  .getElementById("header")
  .append(
    el("div", {}, el("h1", {}, data.title), countsOf(data) === data.title ? null : el("p", { class: "muted" }, countsOf(data))),
    makeThemeButton(),
  );
const tabs = new Tabs(data);
tabs.show(location.hash.slice(1));
if (!tabs.entries.length) document.getElementById("panels").append(el("p", {}, "This page has no data to show."));
// For tests and for the console: the data, the views that were made, and when the first one was drawn.
window.zeroshard = { data, views: tabs.views };
requestAnimationFrame(() =>
  setTimeout(() => {
    // after the browser has painted
    window.zeroshard.drawnAfterMs = performance.now();
    document.documentElement.dataset.isReady = "true";
  }),
);
