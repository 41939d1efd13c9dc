// The two clocks: what computes and what communicates, on the time axis of the film above.

import { hideTooltip, PALETTE, showTooltip, table } from "./dom.js";
import { Plot } from "./plot.js";
import { roundTicks, secondsText, timeTickTexts } from "./units.js";

const LANE_HEIGHT = 26;

export class Clocks {
  /** `axis` is the film: it turns seconds into pixels, and has the cursor. */
  constructor(axis, lanes) {
    this.axis = axis;
    this.lanes = lanes;
    this.plot = new Plot({
      height: LANE_HEIGHT * lanes.length + 42,
      margin: { top: 4, bottom: 38 },
      isFocusable: false,
      draw: () => this._draw(),
      label: "What computes and what communicates, on the time axis of the film",
    });
  }

  table() {
    const span = this.axis.stop - this.axis.start;
    return table(
      [
        ["lane", false],
        ["busy", true],
        ["of the step", true],
        ["exposed", true],
      ],
      this.lanes.map(({ name, spans }) => {
        let [busy, exposed] = [0, 0];
        spans.start_s.forEach((start, place) => {
          busy += spans.stop_s[place] - start;
          if (spans.is_exposed[place]) exposed += spans.stop_s[place] - start;
        });
        return [
          name,
          secondsText(busy),
          `${((100 * busy) / span).toFixed(1)}%`,
          exposed ? secondsText(exposed) : "none",
        ];
      }),
    );
  }

  explain(event) {
    const lane = this.lanes[Math.floor((event.offsetY - this.plot.top) / LANE_HEIGHT)];
    const seconds = this.axis.timeAt(event.offsetX);
    const slack = (this.axis.range[1] - this.axis.range[0]) / 400;
    const place = lane
      ? lane.spans.start_s.findIndex(
          (start, one) => start - slack <= seconds && seconds <= lane.spans.stop_s[one] + slack,
        )
      : -1;
    if (place < 0) return hideTooltip();
    const { start_s: starts, stop_s: stops, label, is_exposed: exposed } = lane.spans;
    return showTooltip(
      `${lane.name}: ${label[place]}\n${secondsText(stops[place] - starts[place])} from ${secondsText(starts[place])}${exposed[place] ? "\nexposed: the computation waits" : ""}`,
      event.clientX,
      event.clientY,
    );
  }

  _draw() {
    const { plot: clocks, lanes, axis } = this;
    const { context } = clocks;
    const left = clocks.left;
    lanes.forEach(({ name, spans }, row) => {
      const y = clocks.top + row * LANE_HEIGHT;
      clocks.text(name, left - 6, y + LANE_HEIGHT / 2, { align: "right", limit: left - 8 });
      clocks.line(left, y + LANE_HEIGHT - 0.5, clocks.right, y + LANE_HEIGHT - 0.5, clocks.color("grid"));
      for (const exposed of [false, true]) {
        context.fillStyle = exposed ? PALETTE.vermilion : row === 0 ? PALETTE.gray : PALETTE.sky;
        context.beginPath();
        const labels = [];
        spans.start_s.forEach((start, place) => {
          const [from, to] = [axis.x(start), axis.x(spans.stop_s[place])];
          if (spans.is_exposed[place] !== exposed || to < left || from > clocks.right) return;
          const [a, b] = [Math.max(left, from), Math.min(clocks.right, Math.max(to, from + 0.7))];
          context.rect(a, y + 3, b - a, LANE_HEIGHT - 7);
          if (b - a > 34) labels.push([spans.label[place], a, b - a]);
        });
        context.fill();
        if (exposed) this._stripe(y);
        for (const [label, x, width] of labels)
          clocks.text(label, x + 4, y + LANE_HEIGHT / 2, { color: "#0c1013", limit: width - 8 });
        if (labels.length && !exposed)
          labels.forEach(([, x, width]) =>
            clocks.line(x + width - 0.5, y + 3, x + width - 0.5, y + LANE_HEIGHT - 4, clocks.color("paper")),
          );
      }
    });
    const ticks = roundTicks(...axis.range, clocks.width / 110);
    const texts = timeTickTexts(ticks);
    clocks.xAxis(
      ticks,
      (tick) => axis.x(tick),
      (tick) => texts.get(tick),
      "time since the step began",
    );
    axis.drawCursor(clocks, true);
  }

  /** Stripes over what was just filled, so that exposed time does not rest on colour alone. */
  _stripe(y) {
    const { context } = this.plot;
    context.save();
    context.clip();
    context.strokeStyle = "rgb(255 255 255 / 55%)";
    context.lineWidth = 1.5;
    context.beginPath();
    for (let x = this.plot.left - LANE_HEIGHT; x < this.plot.right; x += 7) {
      context.moveTo(x, y + LANE_HEIGHT);
      context.lineTo(x + LANE_HEIGHT, y);
    }
    context.stroke();
    context.restore();
  }
}
