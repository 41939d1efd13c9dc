// The stage player: bytes of each rank by closed forms, for any ZeRO stage, number of ranks, batch and sequence.

import { bytesCell, columnColor, el, explain, legend, STATE_COLUMNS, swatch, table } from "./dom.js";
import { BADGES } from "./sources.js";
import { byteTickText, byteTicks, bytesText, countText, exactBytes } from "./units.js";

const SHOWN_RANKS = 16;
const REST = "other";
const REST_COLOR = "var(--rest)";
const STAGE_NAMES = [
  "plain data parallelism: each rank holds everything",
  "optimizer states are sharded",
  "optimizer states and gradients are sharded",
  "optimizer states, gradients and parameters are sharded",
];

const sum = (values) => values.reduce((total, one) => total + one, 0);

/**
 * Returns bytes by column of one rank.
 *
 * `rows` is the residency table: for each ZeRO stage which columns a rank keeps a shard of.
 * A shard of a unit of P elements is ceil(P / ranks), rounded up to `align_numel`. What is sharded has the elements that
 * the rank owns in its column and the rest of the shard in "padding"; what is whole has all elements, and the padding of
 * all shards. With one rank nothing travels, so every stage is plain data parallelism.
 */
export function rankBytes(player, rows, { stage, ranks, batch, sequence }, rank) {
  const align = player.align_numel ?? 1;
  const sharded = rows[stage];
  const widths = { parameters: player.parameter_bytes, gradients: player.gradient_bytes, states: player.state_bytes };
  const bytes = Object.fromEntries(STATE_COLUMNS.map((column) => [column, 0]));
  const full = player.units.map((numel) => shardNumel(numel, ranks, align) * ranks);
  player.units.forEach((numel, unit) => {
    const shard = full[unit] / ranks;
    const owned = Math.max(0, Math.min(shard, numel - rank * shard));
    for (const [column, width] of Object.entries(widths)) {
      bytes[column] += width * (sharded[column] ? owned : numel);
      bytes.padding += width * (sharded[column] ? shard - owned : full[unit] - numel);
    }
  });
  const { bytes_per_token_block: perBlock, blocks, fixed_bytes_per_token: fixed } = player.activation;
  bytes.activations = (perBlock * blocks + fixed) * batch * sequence;
  if (ranks > 1) {
    const [root, ...others] = full;
    const two = others.sort((one, other) => other - one).slice(0, 2);
    if (sharded.parameters) bytes.transient += player.parameter_bytes * (root + sum(two));
    if (sharded.gradients) bytes.transient += player.gradient_bytes * Math.max(...full);
  }
  return bytes;
}

function shardNumel(numel, ranks, align) {
  return Math.ceil(Math.ceil(numel / ranks) / align) * align;
}

const outsideOf = (player) => player.capacity_bytes - player.usable_bytes;

/**
 * Returns the total of a rank: closed forms times what the plan reserves over what they say at the plan's own setting,
 * where the total is equal to the plan's, and what lies outside the allocator.
 */
export function playerTotal(player, rows, setting, rank) {
  return Math.round(scaleOf(player, rows) * sum(Object.values(rankBytes(player, rows, setting, rank)))) + outsideOf(player);
}

function scaleOf(player, rows) {
  if (!player.total_bytes || !player.defaults) return 1;
  const closed = [0, player.defaults.ranks - 1].map((rank) =>
    sum(Object.values(rankBytes(player, rows, player.defaults, rank))),
  );
  return (player.total_bytes - outsideOf(player)) / (Math.max(...closed) || 1);
}

/** The largest total with which 95 of 100 runs would fit. */
export function fittingBytes(player) {
  return player.usable_bytes / (player.p90_ratio ?? 1) + outsideOf(player);
}

/** "fits" if 95 of 100 runs would, "tight" if it may, "no" if it does not. */
export function verdictOf(player, total) {
  if (total > player.capacity_bytes) return "no";
  return total <= fittingBytes(player) ? "fits" : "tight";
}

/** The closed form of each column, in symbols and in numbers. */
export function formulas(player, rows, { stage, ranks, batch, sequence }) {
  const sharded = rows[stage];
  const numel = countText(sum(player.units));
  const state = (column, symbol, width) =>
    sharded[column]
      ? [`${symbol} · P / N`, `${width} B · ${numel} / ${ranks}`]
      : [`${symbol} · P`, `${width} B · ${numel}`];
  const transient = [
    ...(sharded.parameters ? ["b_p · (root + two largest units)"] : []),
    ...(sharded.gradients ? ["b_g · largest unit"] : []),
  ];
  const { bytes_per_token_block: perBlock, blocks, fixed_bytes_per_token: fixed } = player.activation;
  return {
    parameters: state("parameters", "b_p", player.parameter_bytes),
    gradients: state("gradients", "b_g", player.gradient_bytes),
    states: state("states", "K", player.state_bytes),
    padding: ["shards rounded up", `to ${player.align_numel ?? 1} elements`],
    activations: [
      "(a · blocks + c) · batch · sequence",
      `(${countText(perBlock)} B · ${blocks} + ${countText(fixed)} B) · ${batch} · ${sequence.toLocaleString("en-US")}`,
    ],
    transient:
      ranks > 1 && transient.length
        ? [transient.join(" + "), "units on their way"]
        : ["0", ranks > 1 ? "nothing is gathered" : "one rank: nothing travels"],
  };
}

function powers(limit, extra) {
  const values = [];
  for (let value = 1; value <= limit; value *= 2) values.push(value);
  return [...new Set([...values, ...extra])].sort((one, other) => one - other);
}

export class PlayerView {
  constructor(player, rows, hardware) {
    this.player = player;
    this.rows = rows;
    this.hardware = hardware;
    const defaults = { stage: 3, ranks: 8, batch: 1, sequence: 2048, ...player.defaults };
    this.choices = {
      stage: [...rows.keys()],
      ranks: powers(4096, [3, 6, 12, defaults.ranks]),
      batch: powers(512, [3, 6, 12, defaults.batch]),
      sequence: powers(2 ** 20, [defaults.sequence]).filter((one) => one >= 64 || one === defaults.sequence),
    };
    this.setting = defaults;
    this.bars = el("div", { class: "bars", id: "player-bars" });
    this.stage = el("span", { class: "muted", id: "player-row" });
    this.badge = el("span", { class: "badge", id: "player-badge" });
    this.total = el("span", { class: "big", id: "player-total" });
    this.lines = el("div", { id: "player-formulas" });
    this.element = el(
      "div",
      {},
      el(
        "p",
        {},
        player.total_bytes
          ? "The total of each rank, by closed forms, which are scaled so that the plan's own setting has the plan's own total. Hover over a part of a bar, or move the focus to it, for its formula; the step film has the exact trace of the plan."
          : "The total of each rank, by closed forms. Hover over a part of a bar, or move the focus to it, for its formula.",
      ),
      el("div", { class: "row" }, this.total, this.badge, this.stage),
      el(
        "div",
        { class: "sliders" },
        this._slider("stage", "ZeRO stage", String),
        this._slider("ranks", "Ranks (N)", (value) => value.toLocaleString("en-US")),
        this._slider("batch", "Batch of one rank, sequences", (value) => value.toLocaleString("en-US")),
        this._slider("sequence", "Sequence, tokens", (value) => value.toLocaleString("en-US")),
      ),
      legend([...STATE_COLUMNS.map((column) => [columnColor(column), column]), [REST_COLOR, REST]]),
      this.bars,
      el("h3", { style: { "margin-top": "34px" } }, "Closed forms"),
      this.lines,
    );
    this.update();
  }

  _slider(key, title, name) {
    const choices = this.choices[key];
    const output = el("output", {}, name(this.setting[key]));
    const input = el("input", {
      type: "range",
      id: `player-${key}`,
      min: "0",
      max: String(choices.length - 1),
      value: String(choices.indexOf(this.setting[key])),
      "aria-valuetext": name(this.setting[key]),
    });
    input.addEventListener("input", () => {
      this.setting = { ...this.setting, [key]: choices[Number(input.value)] };
      output.textContent = name(this.setting[key]);
      input.setAttribute("aria-valuetext", output.textContent);
      this.update();
    });
    return el("label", {}, output, title, input);
  }

  update() {
    const { player, setting } = this;
    const shown =
      setting.ranks <= SHOWN_RANKS
        ? [...Array(setting.ranks).keys()]
        : [...Array(SHOWN_RANKS - 2).keys(), setting.ranks - 1];
    const bytes = new Map(shown.map((rank) => [rank, rankBytes(player, this.rows, setting, rank)]));
    const totals = new Map(shown.map((rank) => [rank, playerTotal(player, this.rows, setting, rank)]));
    const most = Math.max(...totals.values());
    const verdict = verdictOf(player, most);
    this.total.textContent = `${bytesText(most)} in total`;
    this.total.dataset.bytes = String(most);
    this.badge.textContent = BADGES[verdict];
    this.badge.dataset.verdict = verdict;
    this.stage.textContent = `Stage ${setting.stage}: ${STAGE_NAMES[setting.stage]}.`;
    const top = Math.max(most, player.capacity_bytes) * 1.05;
    this._drawBars(shown, bytes, totals, top);
    this._drawLevels(top);
    this._drawFormulas(bytes.get(0), totals.get(0));
  }

  _drawBars(shown, bytes, totals, top) {
    const old = new Map(
      [...this.bars.querySelectorAll(".bar[data-rank]")].map((bar) => [Number(bar.dataset.rank), bar]),
    );
    const forms = () => formulas(this.player, this.rows, this.setting);
    const elements = shown.flatMap((rank, place) => {
      const bar = old.get(rank) ?? this._makeBar(rank, forms);
      const total = totals.get(rank);
      const columns = sum(Object.values(bytes.get(rank)));
      // Columns that together are more than the total are largest at different times: each is drawn smaller.
      const shrink = Math.min(1, total / (columns || 1));
      for (const part of bar.querySelectorAll("i[data-column]")) {
        const nbytes = bytes.get(rank)[part.dataset.column];
        part.dataset.bytes = String(nbytes);
        part.style.height = `${(100 * shrink * nbytes) / top}%`;
      }
      const rest = bar.querySelector("i.rest");
      rest.dataset.bytes = String(Math.max(0, total - columns));
      rest.style.height = `${(100 * Math.max(0, total - columns)) / top}%`;
      bar.dataset.total = String(total);
      bar.setAttribute(
        "aria-label",
        `rank ${rank}: total ${bytesText(total)}, ${STATE_COLUMNS.map((column) => `${column} ${bytesText(bytes.get(rank)[column])}`).join(", ")}`,
      );
      const isGap = rank - (shown[place - 1] ?? rank) > 1;
      return isGap ? [el("div", { class: "bar gap", title: "ranks between hold the same" }, "⋯"), bar] : [bar];
    });
    this.bars.replaceChildren(...elements);
  }

  _makeBar(rank, forms) {
    const bar = el("div", { class: "bar", tabIndex: 0, role: "img", "data-rank": String(rank) });
    for (const column of STATE_COLUMNS) {
      const part = el("i", { style: { background: columnColor(column), height: "0%" }, "data-column": column });
      explain(
        part,
        () => `rank ${rank}, ${column}: ${exactBytes(Number(part.dataset.bytes))}\n${forms()[column].join("\n= ")}`,
      );
      bar.append(part);
    }
    const rest = el("i", { class: "rest", style: { background: REST_COLOR, height: "0%" } });
    explain(rest, () => `rank ${rank}, ${REST}: ${exactBytes(Number(rest.dataset.bytes))}`);
    bar.append(rest);
    explain(bar, () => bar.getAttribute("aria-label").replaceAll(/: |, /g, "\n"));
    bar.append(el("small", {}, String(rank)));
    return bar;
  }

  _drawLevels(top) {
    const { player, hardware } = this;
    const place = (nbytes) => ({ bottom: `${(100 * nbytes) / top}%` });
    const rules = byteTicks(top, 4).map((tick) =>
      el("div", { class: "rule", style: place(tick) }, el("span", { class: "tick" }, byteTickText(tick))),
    );
    const level = (name, nbytes, kind) =>
      el(
        "div",
        { class: `level ${kind}`, style: place(nbytes), "data-bytes": String(nbytes) },
        el("span", {}, `${name}: ${bytesText(nbytes)}`),
      );
    this.bars.append(
      ...rules,
      level(hardware?.name ?? "device", player.capacity_bytes, "solid"),
      level("fits up to", fittingBytes(player), "below"),
    );
  }

  _drawFormulas(bytes, total) {
    const forms = formulas(this.player, this.rows, this.setting);
    const columns = sum(Object.values(bytes));
    const rows = STATE_COLUMNS.map((column) => [
      el("span", { class: "keep" }, swatch(columnColor(column)), column),
      el("span", { class: "formula" }, forms[column][0]),
      el("span", { class: "formula muted" }, forms[column][1]),
      bytesCell(bytes[column]),
    ]);
    rows.push([
      el("span", { class: "keep" }, swatch(REST_COLOR), REST),
      "",
      total < columns ? "less: columns are largest at different times" : "reserved beyond the columns, or outside the allocator",
      el("span", { "data-bytes": String(total - columns) }, `${total < columns ? "−" : ""}${bytesText(Math.abs(total - columns))}`),
    ]);
    this.lines.replaceChildren(
      table(
        [
          ["column", false],
          ["formula", false],
          ["with numbers", false],
          ["rank 0", true],
        ],
        rows,
        ["total", "", "", bytesCell(total)],
      ),
      el(
        "p",
        { class: "muted" },
        `P: ${countText(sum(this.player.units))} parameters in ${this.player.units.length} units; N: ranks; b_p, b_g, K: bytes of a parameter, of a held gradient, of optimizer states with masters; a, c: bytes of activations of a token, in each block and outside.`,
      ),
    );
  }
}
