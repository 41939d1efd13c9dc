// The step film, the two clocks under it on the same time axis, and where every byte goes at one moment.

import { Clocks } from "./clocks.js";
import { bytesCell, columnColor, el, hideTooltip, legend, PALETTE, showTooltip, swatch, table } from "./dom.js";
import { Icicle } from "./icicle.js";
import { onceAFrame, Plot } from "./plot.js";
import { hardwareOf, sourcesOf } from "./sources.js";
import { Timeline, treeOf } from "./timeline.js";
import { byteTickText, byteTicks, bytesText, exactBytes, secondsText } from "./units.js";

const LIVE_ROWS = 200;
const TICK_ROWS = [
  ["gather", PALETTE.blue],
  ["release", PALETTE.gray],
  ["reduce", PALETTE.orange],
  ["publish", PALETTE.green],
  ["step", PALETTE.purple],
];

export class FilmView {
  constructor(data) {
    this.data = data;
    this.hardware = hardwareOf(data, "film");
    this.total = sourcesOf(data, "film").find((one) => one.memory)?.memory.total_bytes ?? 0;
    this.timeline = new Timeline(data.film, data.columns);
    this.lanes = data.lanes ?? [];
    this.start = this.timeline.start;
    this.stop = Math.max(
      this.timeline.stop,
      ...this.lanes.map((lane) => lane.spans.stop_s.reduce((a, b) => Math.max(a, b), 0)),
    );
    this.range = [this.start, this.stop];
    this.moment = this.timeline.peak;
    this.ticks = data.film.ticks;
    this.tickRows = TICK_ROWS.filter(([kind]) => this.ticks?.kind.includes(kind));
    this.redraw = onceAFrame(() => this.draw());
    this.element = this._build();
    this._describe();
  }

  _build() {
    const { timeline, data } = this;
    this.film = new Plot({
      height: 330,
      margin: { top: 26, bottom: 12 },
      draw: () => this._drawFilm(),
      role: "slider",
      label: "Memory over one step, in bytes; arrow keys move the cursor from event to event",
    });
    this.strip = this.tickRows.length
      ? new Plot({
          height: 14 * this.tickRows.length + 6,
          margin: { top: 3, bottom: 3 },
          isFocusable: false,
          draw: () => this._drawTicks(),
          label: "Gathers, reductions and releases over time",
        })
      : null;
    this.clocks = new Clocks(this, this.lanes);
    this.icicle = new Icicle(data.columns);
    this.readout = el("div", { id: "film-readout", role: "status" });
    this.liveTable = el("div", {
      id: "film-live",
      class: "scroll",
      tabIndex: 0,
      role: "region",
      "aria-label": "Live storages",
    });
    this._listen(this.film);
    this._listen(this.clocks.plot);
    if (this.strip) this._listen(this.strip);
    const zoom = (factor) => () => this.zoom(factor, timeline.timeOf(this.moment));
    const button = (text, action, title) =>
      el("button", { class: "plain", type: "button", onclick: action, title }, text);
    const peak = button("Jump to peak", () => this.moveTo(timeline.peak), "Key p");
    peak.id = "film-jump";
    const fit = button(
      "Fit height",
      () => {
        this.isFitted = !this.isFitted;
        fit.setAttribute("aria-pressed", String(this.isFitted));
        this.redraw();
      },
      "Cut the axis off below what is in view",
    );
    fit.setAttribute("aria-pressed", "false");
    return el(
      "div",
      {},
      el(
        "p",
        {},
        "What torch's allocator has allocated on one rank over one step, stacked by column",
        this.total
          ? `. The dashed line is the total of the plan, ${bytesText(this.total)}, which adds what the allocator has reserved and not allocated, context and communicators`
          : "",
        this.hardware ? `. ${this.hardware.name} has ${bytesText(this.hardware.capacity_bytes)}` : "",
        ". Move the pointer, or use the arrow keys: ",
        "← → go from event to event, with Shift a hundredth of the step; + and − zoom, p jumps to the peak.",
      ),
      el(
        "div",
        { class: "row spread" },
        this.readout,
        el(
          "div",
          { class: "row" },
          peak,
          button("Zoom in", zoom(0.5), "Key +"),
          button("Zoom out", zoom(2), "Key −"),
          button("Whole step", () => this.zoom(Infinity, this.start), "Key 0"),
          fit,
        ),
      ),
      legend(data.columns.map((name, place) => [columnColor(name, place), name])),
      this.film.canvas,
      this.strip?.canvas,
      this.lanes.length ? el("h3", {}, "Two clocks") : null,
      this.lanes.length
        ? el(
            "p",
            { class: "muted" },
            "Compute and communication on the same time axis. Red with stripes is exposed: the computation waits for it.",
          )
        : null,
      this.clocks.plot.canvas,
      this.lanes.length ? this.clocks.table() : null,
      el("h3", {}, "Where every byte goes"),
      el(
        "p",
        { class: "muted" },
        "What is live at the cursor: column, module, tensor. Click, or Enter, zooms into a part; Escape zooms out.",
      ),
      this.icicle.element,
      el("h3", {}, "Live at the cursor"),
      this.liveTable,
    );
  }

  _listen(plot) {
    const { canvas } = plot;
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this._explain(plot, event);
      if (event.buttons & 1) this._point(event);
    });
    canvas.addEventListener("pointerdown", (event) => this._point(event));
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event.offsetX));
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => this._key(event));
  }

  _point(event) {
    this.moveTo(this.timeline.momentAt(this.timeAt(event.offsetX)));
  }

  _key(event) {
    const { timeline, moment } = this;
    const hundredth = (this.range[1] - this.range[0]) / 100;
    const jump = (seconds) => timeline.momentAt(timeline.timeOf(moment) + seconds);
    const moves = {
      ArrowRight: () => this.moveTo(event.shiftKey ? Math.max(moment + 1, jump(hundredth)) : moment + 1),
      ArrowLeft: () => this.moveTo(event.shiftKey ? Math.min(moment - 1, jump(-hundredth)) : moment - 1),
      Home: () => this.moveTo(0),
      End: () => this.moveTo(timeline.count),
      p: () => this.moveTo(timeline.peak),
      "+": () => this.zoom(0.5, timeline.timeOf(moment)),
      "-": () => this.zoom(2, timeline.timeOf(moment)),
      0: () => this.zoom(Infinity, this.start),
    };
    if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    moves[event.key]();
  }

  _explain(plot, event) {
    if (plot === this.clocks.plot) return this.clocks.explain(event);
    const seconds = this.timeAt(event.offsetX);
    const moment = this.timeline.momentAt(seconds);
    const lines = this.data.columns
      .map((name, column) => [this.timeline.byColumn[column][moment], name])
      .filter(([nbytes]) => nbytes)
      .map(([nbytes, name]) => `${name}: ${bytesText(nbytes)}`)
      .reverse();
    showTooltip(
      [`${secondsText(seconds)}: ${bytesText(this.timeline.totals[moment])}`, ...lines].join("\n"),
      event.clientX,
      event.clientY,
    );
    return null;
  }

  x(seconds) {
    return (
      this.film.left +
      ((seconds - this.range[0]) / (this.range[1] - this.range[0])) * (this.film.right - this.film.left)
    );
  }

  timeAt(x) {
    const share = (x - this.film.left) / (this.film.right - this.film.left);
    return this.range[0] + Math.min(1, Math.max(0, share)) * (this.range[1] - this.range[0]);
  }

  zoom(factor, center) {
    const width = Math.min(this.stop - this.start, (this.range[1] - this.range[0]) * factor);
    if (width < (this.stop - this.start) * 1e-7) return;
    const start = Math.max(this.start, Math.min(this.stop - width, center - width / 2));
    this.range = [start, start + width];
    this.redraw();
  }

  moveTo(moment) {
    this.moment = Math.max(0, Math.min(this.timeline.count, moment));
    const seconds = this.timeline.timeOf(this.moment);
    if (seconds < this.range[0] || seconds > this.range[1]) this.zoom(1, seconds);
    this._describe();
    this.redraw();
  }

  _describe() {
    const { timeline, moment, data } = this;
    const total = timeline.totals[moment];
    const place = moment - 1;
    const last =
      place < 0
        ? "before the first event"
        : `${timeline.events.nbytes[place] < 0 ? "after the release of" : "after"} ${[data.names[timeline.events.module[place]] || "(model)", data.names[timeline.events.tensor[place]]].filter(Boolean).join(" · ")}`;
    this.readout.replaceChildren(
      el(
        "span",
        { class: "big", id: "film-now", "data-bytes": String(total), "data-moment": String(moment) },
        bytesText(total),
      ),
      ` at ${secondsText(timeline.timeOf(moment))}, event ${moment.toLocaleString("en-US")} of ${timeline.count.toLocaleString("en-US")}, ${last}. `,
      el(
        "span",
        { id: "film-peak", "data-bytes": String(timeline.peakBytes), "data-moment": String(timeline.peak) },
        `Allocated at the peak: ${exactBytes(timeline.peakBytes)} at ${secondsText(timeline.timeOf(timeline.peak))}.`,
      ),
    );
    this.film.canvas.setAttribute("aria-valuenow", String(moment));
    this.film.canvas.setAttribute("aria-valuemin", "0");
    this.film.canvas.setAttribute("aria-valuemax", String(timeline.count));
    this.film.canvas.setAttribute("aria-valuetext", `${bytesText(total)} at ${secondsText(timeline.timeOf(moment))}`);
    this._list();
  }

  _list() {
    const { data } = this;
    const live = this.timeline.live(this.moment);
    this.icicle.show(treeOf(live, data.columns, data.names));
    const rows = live
      .slice(0, LIVE_ROWS)
      .map((one) => [
        el(
          "span",
          { class: "keep" },
          swatch(columnColor(data.columns[one.column], one.column)),
          data.columns[one.column],
        ),
        bytesCell(one.nbytes),
        data.names[one.module] || "(model)",
        data.names[one.tensor],
        data.names[one.operation],
      ]);
    const rest = live.slice(LIVE_ROWS).reduce((sum, one) => sum + one.nbytes, 0);
    const total = live.reduce((sum, one) => sum + one.nbytes, 0);
    if (rest)
      rows.push([`and ${(live.length - LIVE_ROWS).toLocaleString("en-US")} smaller`, bytesCell(rest), "", "", ""]);
    const shown = table(
      [
        ["column", false],
        ["bytes", true],
        ["module", false],
        ["tensor", false],
        ["operation", false],
      ],
      rows,
      [`${live.length.toLocaleString("en-US")} storages`, bytesCell(total), "", "", ""],
    );
    shown.dataset.bytes = String(total);
    this.liveTable.replaceChildren(shown);
  }

  draw() {
    this.film.draw();
    this.strip?.draw();
    this.clocks.plot.draw();
    this.icicle.draw();
  }

  _drawFilm() {
    const { film, timeline, data } = this;
    const { context } = film;
    const { hardware, total } = this;
    const isNear = hardware && hardware.capacity_bytes < 1.8 * Math.max(total, timeline.peakBytes);
    const level = Math.max(total, isNear ? hardware.capacity_bytes : 0);
    const moments = timeline.sample(...this.range, Math.max(1, Math.floor(film.right - film.left)));
    const [low, top] = this._heights(moments, level);
    const y = (nbytes) => film.bottom - ((nbytes - low) / (top - low)) * (film.bottom - film.top);
    const x = (seconds) => this.x(seconds);
    this._drawPhases(film);
    film.yAxis(byteTicks(top, 5, low), y, byteTickText);
    context.save();
    context.beginPath();
    context.rect(film.left, film.top, film.right - film.left, film.bottom - film.top);
    context.clip();
    const base = new Float64Array(moments.length);
    const pixels = moments.map((moment) => x(timeline.timeOf(moment)));
    const end = x(this.stop);
    timeline.byColumn.forEach((values, column) => {
      const before = base.slice();
      moments.forEach((moment, place) => {
        base[place] += values[moment];
      });
      context.fillStyle = columnColor(data.columns[column], column);
      context.beginPath();
      steps(context, pixels, base, y, end);
      stepsBack(context, pixels, before, y, end);
      context.fill();
    });
    context.restore();
    if (!this.isFitted) this._drawLevels(y, isNear);
    const [px, py] = [x(timeline.timeOf(timeline.peak)), y(timeline.peakBytes)];
    if (px >= film.left - 1 && px <= film.right + 1 && py >= film.top) {
      context.fillStyle = film.color("ink");
      context.beginPath();
      context.moveTo(px, py - 1);
      context.lineTo(px - 5, py - 10);
      context.lineTo(px + 5, py - 10);
      context.fill();
      const isLeft = px > (film.left + film.right) / 2;
      film.text(`peak ${bytesText(timeline.peakBytes)}`, px + (isLeft ? -9 : 9), py - 8, {
        align: isLeft ? "right" : "left",
        color: film.color("ink"),
        isOnPaper: true,
      });
    }
    film.peakPixel = [px, py];
    this.drawCursor(film, true);
  }

  /** The bytes at the bottom and at the top: from 0, or, where the height is fitted, what is in view. */
  _heights(moments, level) {
    const { totals, peakBytes } = this.timeline;
    if (!this.isFitted) return [0, Math.max(peakBytes * 1.12, level * 1.08, 1)];
    let [low, high] = [Infinity, 0];
    for (const moment of moments) [low, high] = [Math.min(low, totals[moment]), Math.max(high, totals[moment])];
    const spare = Math.max(1024, 0.12 * (high - low));
    return [Math.max(0, low - spare), high + spare];
  }

  /** The total and the device's memory; the label of the higher line is above it, that of the lower one below. */
  _drawLevels(y, isNear) {
    const { film, hardware, total } = this;
    const levels = [
      ...(total ? [[`total: ${bytesText(total)}`, total, [6, 4]]] : []),
      ...(isNear ? [[`${hardware.name}: ${bytesText(hardware.capacity_bytes)}`, hardware.capacity_bytes, []]] : []),
    ].sort((one, other) => other[1] - one[1]);
    const color = film.color("ink");
    this.labels = levels.map(([text, nbytes, dash], place) => {
      film.line(film.left, y(nbytes), film.right, y(nbytes), color, { dash });
      const at = y(nbytes) + (place ? 10 : -9);
      film.text(text, film.left + 4, at, { color, isOnPaper: true });
      return [text, at];
    });
  }

  _drawPhases(film) {
    (this.data.film.phases ?? []).forEach((phase, place) => {
      const [from, to] = [phase.start_s, phase.stop_s].map((seconds) =>
        Math.min(film.right, Math.max(film.left, this.x(seconds))),
      );
      if (to - from < 1) return;
      film.context.fillStyle = place % 2 ? film.color("paper") : film.color("panel");
      film.context.fillRect(from, film.top, to - from, film.bottom - film.top);
      film.text(phase.name, (from + to) / 2, film.top - 13, { align: "center", limit: to - from });
      film.line(to, film.top - 20, to, film.bottom, film.color("line"));
    });
  }

  drawCursor(plot, isInside = false) {
    const x = this.x(this.timeline.timeOf(this.moment));
    if (x < plot.left - 1 || x > plot.right + 1) return;
    plot.line(x, isInside ? plot.top : 0, x, isInside ? plot.bottom : plot.height, plot.color("ink"), { width: 1.5 });
  }

  _drawTicks() {
    const { strip, ticks } = this;
    this.tickRows.forEach(([kind, color], row) => {
      const y = strip.top + 14 * row;
      strip.text(kind, strip.left - 6, y + 7, { align: "right" });
      strip.context.fillStyle = color;
      let drawn = -1;
      ticks.t_s.forEach((seconds, place) => {
        if (ticks.kind[place] !== kind) return;
        const x = Math.round(this.x(seconds));
        if (x === drawn || x < strip.left || x > strip.right) return;
        drawn = x;
        strip.context.fillRect(x - 1, y + 2, 2, 10);
      });
      strip.line(strip.left, y + 13.5, strip.right, y + 13.5, strip.color("grid"));
    });
    this.drawCursor(strip);
  }
}

/** The upper edge of a stacked area that changes at events only. */
function steps(context, pixels, values, y, end) {
  context.moveTo(pixels[0], y(values[0]));
  for (let place = 1; place < pixels.length; place += 1) {
    context.lineTo(pixels[place], y(values[place - 1]));
    context.lineTo(pixels[place], y(values[place]));
  }
  context.lineTo(Math.max(end, pixels.at(-1)), y(values.at(-1)));
}

function stepsBack(context, pixels, values, y, end) {
  context.lineTo(Math.max(end, pixels.at(-1)), y(values.at(-1)));
  for (let place = pixels.length - 1; place > 0; place -= 1) {
    context.lineTo(pixels[place], y(values[place]));
    context.lineTo(pixels[place], y(values[place - 1]));
  }
  context.lineTo(pixels[0], y(values[0]));
}
