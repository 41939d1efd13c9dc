// Elements, the tooltip and the colours. Text of the data goes through textContent only, never through markup.

import { bytesText, exactBytes } from "./units.js";

// Okabe and Ito's palette, which people with any form of colour blindness can tell apart.
export const PALETTE = {
  orange: "#E69F00",
  sky: "#56B4E9",
  green: "#009E73",
  yellow: "#F0E442",
  blue: "#0072B2",
  vermilion: "#D55E00",
  purple: "#CC79A7",
  gray: "#8C8C8C",
};
const COLUMN_COLORS = {
  parameters: PALETTE.blue,
  gradients: PALETTE.orange,
  states: PALETTE.green,
  padding: PALETTE.gray,
  activations: PALETTE.sky,
  transient: PALETTE.purple,
};
const SPARE = [PALETTE.yellow, PALETTE.vermilion, PALETTE.gray];
export const SERIES = [
  PALETTE.blue,
  PALETTE.vermilion,
  PALETTE.green,
  PALETTE.purple,
  PALETTE.orange,
  PALETTE.sky,
  PALETTE.gray,
];

/** The columns of the residency table, and what is beside them. */
export const STATE_COLUMNS = ["parameters", "gradients", "states", "padding", "activations", "transient"];

export function columnColor(name, place = 0) {
  return COLUMN_COLORS[name] ?? SPARE[place % SPARE.length];
}

/** Makes an element: properties, then children (elements, text, arrays; null is left out). */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, one] of Object.entries(value)) element.style.setProperty(name, one);
    else if (key === "class" || key.includes("-") || key === "role" || key === "for") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export function swatch(color) {
  return el("span", { class: "swatch", style: { background: color }, "aria-hidden": "true" });
}

/** Entries are [colour, text, glyph]; without a glyph a square is shown. */
export function legend(entries) {
  const sign = (color, glyph) =>
    glyph ? el("span", { class: "glyph", style: { color }, "aria-hidden": "true" }, glyph) : swatch(color);
  return el(
    "ul",
    { class: "legend" },
    entries.map(([color, text, glyph]) => el("li", {}, sign(color, glyph), text)),
  );
}

/** Bytes in a table: rounded, and exact under the pointer. */
export function bytesCell(nbytes) {
  return el("span", { title: exactBytes(nbytes), "data-bytes": String(nbytes) }, bytesText(nbytes));
}

/**
 * A table; `columns` are [title, isNumber], cells are text or elements. On a narrow screen a table of more than two
 * columns has a line for each cell, with the title of its column (`style.css`); the roles keep it a table for readers.
 */
export function table(columns, rows, footer = null) {
  const line = (cells) =>
    el(
      "tr",
      { role: "row" },
      cells.map((cell, place) =>
        el(
          "td",
          {
            role: "cell",
            class: [columns[place][1] ? "number" : "name", ...(cell === "" ? ["empty"] : [])].join(" "),
            "data-title": columns[place][0],
          },
          cell,
        ),
      ),
    );
  return el(
    "div",
    { class: columns.length > 2 ? "table wraps" : "table" },
    el(
      "table",
      { role: "table" },
      el(
        "thead",
        { role: "rowgroup" },
        el(
          "tr",
          { role: "row" },
          columns.map(([title, isNumber]) =>
            el("th", { class: isNumber ? "number" : "", scope: "col", role: "columnheader" }, title),
          ),
        ),
      ),
      el(
        "tbody",
        { role: "rowgroup" },
        rows.map((cells) => line(cells)),
      ),
      footer ? el("tfoot", { role: "rowgroup" }, line(footer)) : null,
    ),
  );
}

export function showTooltip(text, x, y) {
  const tip = document.getElementById("tooltip");
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}

export function hideTooltip() {
  document.getElementById("tooltip").hidden = true;
}

/** Shows text while the pointer or the focus is on an element. */
export function explain(element, text) {
  element.addEventListener("pointermove", (event) => {
    event.stopPropagation(); // a part explains itself, not the whole that it is in
    showTooltip(text(), event.clientX, event.clientY);
  });
  element.addEventListener("pointerleave", hideTooltip);
  element.addEventListener("focus", () => {
    const box = element.getBoundingClientRect();
    showTooltip(text(), box.left + box.width / 2, box.top);
  });
  element.addEventListener("blur", hideTooltip);
  return element;
}
