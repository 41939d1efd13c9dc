// The frontier: tokens/s against memory of all configurations of a search.

import { el, legend, PALETTE, swatch, table } from "./dom.js";
import { GLYPHS, Scatter } from "./scatter.js";
import {
  binaryUnit,
  byteTickText,
  bytesText,
  countText,
  countTickText,
  logTicks,
  logUnitTicks,
  plainNumber,
  roundTicks,
} from "./units.js";

const VERDICTS = {
  fits: ["circle", PALETTE.green, "fits", "fit"],
  tight: ["triangle", PALETTE.orange, "tight", "are tight"],
  no: ["cross", PALETTE.vermilion, "does not fit", "do not fit"],
};

/** Keeps the configurations that no other beats in both memory and speed, by rising memory. */
export function paretoOf(configurations) {
  const sorted = [...configurations].sort(
    (one, other) => one.total_bytes - other.total_bytes || other.tokens_per_s - one.tokens_per_s,
  );
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
      label: "Tokens per second against peak memory of all configurations",
      height: 400,
      onselect: (point) => this._show(point.of),
      under: (scatter) => this._lines(scatter, hardware),
    });
    const counts = Object.entries(VERDICTS).map(([verdict, [shape, color, , name]]) => [
      color,
      `${configurations.filter((one) => one.verdict === verdict).length.toLocaleString("en-US")} ${name}`,
      GLYPHS[shape],
    ]);
    this.element = el(
      "div",
      {},
      el(
        "p",
        {},
        "Each mark is a configuration. The line joins those that no other beats in both memory and speed; the star is the best that fits. Memory is the total of the fullest rank; where a configuration was not planned in full, with what is allocated in place of what is reserved. Click a mark, or use the arrow keys, for its options.",
      ),
      legend(counts),
      this.scatter.plot.canvas,
      this.detail,
    );
    const memory = configurations.map((one) => one.total_bytes);
    const limit = hardware ? hardware.capacity_bytes * 1.05 : 0;
    const high = Math.max(...memory, limit);
    const speed = configurations.map((one) => one.tokens_per_s).filter((one) => one > 0);
    const isLog = Math.max(...memory) / Math.min(...memory) > 20;
    const low = isLog ? Math.min(...memory) / 1.2 : 0;
    const unit = binaryUnit(high);
    const scale = 1024 ** unit;
    const [slow, fast] = [Math.min(...speed), Math.max(...speed)];
    const isLogSpeed = fast / slow > 20;
    this.axes = [
      {
        low,
        high: high * 1.04,
        isLog,
        title: "total of the fullest rank",
        name: byteTickText,
        ticks: isLog ? logUnitTicks(low, high, "B") : roundTicks(0, high / scale, 8).map((tick) => tick * scale),
      },
      {
        low: isLogSpeed ? slow / 1.2 : 0,
        high: fast * (isLogSpeed ? 1.2 : 1.06),
        isLog: isLogSpeed,
        title: "tokens/s, all ranks",
        name: countTickText,
        ticks: isLogSpeed ? logTicks(slow / 1.2, fast * 1.2) : roundTicks(0, fast * 1.06, 6),
      },
    ];
    this.points = configurations
      .filter((one) => one.tokens_per_s > 0)
      .map((one) => ({
        x: one.total_bytes,
        y: one.tokens_per_s,
        shape: one.is_best ? "star" : VERDICTS[one.verdict][0],
        color: VERDICTS[one.verdict][1],
        of: one,
        text: `${one.label}\n${bytesText(one.total_bytes)}, ${countText(one.tokens_per_s)} tokens/s, ${VERDICTS[one.verdict][2]}`,
      }));
    this.scatter.show(this.points, ...this.axes);
    const best = configurations.find((one) => one.is_best);
    if (best) this.scatter.select(this.scatter.points.find((point) => point.of === best));
    else this.detail.append(el("p", { class: "muted" }, "No configuration is marked as the best."));
  }

  _lines(scatter, hardware) {
    const { plot } = scatter;
    const { context } = plot;
    if (hardware) {
      const x = scatter.px(hardware.capacity_bytes);
      plot.line(x, plot.top, x, plot.bottom, plot.color("ink"));
      plot.text(`${hardware.name}: ${bytesText(hardware.capacity_bytes)}`, x - 5, plot.top + 8, {
        align: "right",
        color: plot.color("ink"),
        isOnPaper: true,
      });
    }
    context.strokeStyle = plot.color("ink");
    context.lineWidth = 1.5;
    context.beginPath();
    this.front
      .filter((one) => one.tokens_per_s > 0)
      .forEach((one, place) => {
        const [x, y] = [scatter.px(one.total_bytes), scatter.py(one.tokens_per_s)];
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
      el(
        "p",
        { "data-bytes": String(one.total_bytes) },
        `${bytesText(one.total_bytes)} in total, ${plainNumber(one.tokens_per_s)} tokens/s: `,
        el("span", { class: "badge", "data-verdict": one.verdict }, name),
      ),
      rows.length
        ? table(
            [
              ["option", false],
              ["value", false],
            ],
            rows,
          )
        : "",
    );
  }

  draw() {
    this.scatter.plot.draw();
  }
}
