// The walk: one step at ZeRO stage 3 on a few ranks, event by event, as the engine's trace has it.

import { columnColor, el, explain, legend, SERIES, STATE_COLUMNS, swatch } from "./dom.js";
import { bytesText, exactBytes } from "./units.js";

const PLAY_MS = 2600;
const OWNERS = [SERIES[0], SERIES[4], SERIES[2], SERIES[3], SERIES[5], SERIES[1], SERIES[6]];

export class WalkView {
  constructor(walk) {
    this.walk = walk;
    this.place = 0;
    this.timer = null;
    this.sentence = el("p", { class: "walk-sentence", id: "walk-sentence", "aria-live": "polite" });
    this.count = el("span", { class: "muted", id: "walk-count" });
    this.slider = el("input", {
      type: "range",
      id: "walk-slider",
      min: "0",
      max: String(walk.steps.length),
      value: "0",
      "aria-label": "Event of the step",
      oninput: () => {
        this.stop();
        this.moveTo(Number(this.slider.value));
      },
    });
    const button = (id, text, action, title) =>
      el("button", { class: "plain", type: "button", id, onclick: action, title }, text);
    this.play = button("walk-play", "Play", () => this.toggle(), "Space");
    this.play.setAttribute("aria-pressed", "false");
    this.progress = walk.steps.map(() => el("i"));
    const phases = [...new Set(walk.steps.map((step) => step.event.phase))].map((phase) => [
      phase,
      walk.steps.filter((step) => step.event.phase === phase).length,
    ]);
    this.element = el(
      "div",
      { id: "walk", tabIndex: 0, onkeydown: (event) => this._key(event) },
      el(
        "p",
        {},
        `One step at ZeRO stage 3 with activation checkpointing and mixed precision, as the engine ran it on ${walk.ranks} ranks: ${walk.model}. `,
        "Each of the steps below is one event of its trace, and the bytes are those that the ranks held. ← → walk, Space plays.",
      ),
      el(
        "div",
        { class: "row" },
        button(
          "walk-previous",
          "◀ Previous",
          () => {
            this.stop();
            this.moveTo(this.place - 1);
          },
          "←",
        ),
        this.play,
        button(
          "walk-next",
          "Next ▶",
          () => {
            this.stop();
            this.moveTo(this.place + 1);
          },
          "→",
        ),
        this.count,
      ),
      this.slider,
      el("div", { class: "walk-phase", "aria-hidden": "true" }, this.progress),
      el(
        "div",
        { class: "walk-names", "aria-hidden": "true" },
        phases.map(([phase, count]) => el("span", { style: { flex: String(count), "min-width": "3.2em" } }, phase)),
      ),
      this.sentence,
      el(
        "ul",
        { class: "legend" },
        [...Array(walk.ranks).keys()].map((rank) => el("li", {}, swatch(this.owner(rank)), `shard of rank ${rank}`)),
        el(
          "li",
          {},
          "tall: bf16 parameters · middle: fp32 gradients, after their reduction · striped: fp32 masters and Adam's two states · ■ input kept for recomputation",
        ),
      ),
      this._grid(),
    );
    this.moveTo(0);
  }

  owner(rank) {
    return OWNERS[rank % OWNERS.length];
  }

  _grid() {
    const { walk } = this;
    const ranks = [...Array(walk.ranks).keys()];
    const isNarrow = matchMedia("(max-width: 640px)");
    const columns = () => {
      grid.style.gridTemplateColumns = isNarrow.matches
        ? `repeat(${walk.ranks}, 1fr)`
        : `minmax(70px, 120px) repeat(${walk.ranks}, 1fr)`;
    };
    const strip = (kind, rank) =>
      el(
        "div",
        { class: `strip ${kind}` },
        ranks.map((owner) =>
          el("i", {
            class: kind === "masters thin" && owner === rank ? "on" : "",
            style: { "--owner": this.owner(owner) },
          }),
        ),
      );
    this.cells = [];
    this.names = [];
    const rows = walk.units.map((unit) => {
      const name = el(
        "div",
        { class: "unit", title: `${unit.numel.toLocaleString("en-US")} parameters` },
        unit.name || "root unit",
      );
      this.names.push(name);
      const cells = ranks.map((rank) => {
        const parts = {
          parameters: strip("", rank),
          gradients: strip("thin", rank),
          masters: strip("masters thin", rank),
          kept: el("span", { class: "kept", title: "input kept for recomputation" }, "■"),
        };
        const cell = el("div", { class: "cell" }, Object.values(parts));
        explain(cell, () => this._explain(unit, rank));
        return { ...parts, cell, unit, rank };
      });
      this.cells.push(...cells);
      return [name, cells.map(({ cell }) => cell)];
    });
    this.stacks = ranks.map((rank) => {
      const parts = STATE_COLUMNS.map((column) =>
        explain(
          el("i", { style: { background: columnColor(column) }, "data-column": column }),
          () => `rank ${rank}, ${column}: ${exactBytes(this.state.resident_bytes[rank][column] ?? 0)}`,
        ),
      );
      const text = el("span", {});
      return { parts, text, element: el("div", { class: "bytes" }, el("div", { class: "stack" }, parts), text) };
    });
    const grid = el(
      "div",
      { class: "walk" },
      el("div", { class: "corner" }),
      ranks.map((rank) => el("div", { class: "head" }, swatch(this.owner(rank)), `rank ${rank}`)),
      rows,
      el("div", { class: "unit" }, "measured bytes"),
      this.stacks.map(({ element }) => element),
    );
    columns();
    isNarrow.addEventListener("change", columns);
    return el(
      "div",
      {},
      grid,
      legend(STATE_COLUMNS.map((column) => [columnColor(column), column])),
      el(
        "p",
        { class: "muted" },
        "Transient bytes hold whole units, and the pooled buffers for gradients and messages, which the engine keeps from step to step.",
      ),
    );
  }

  get state() {
    return this.place ? this.walk.steps[this.place - 1].state : this.walk.start;
  }

  _explain(unit, rank) {
    const { state } = this;
    const shard = unit.shard_numel;
    return [
      `${unit.name || "root unit"} on rank ${rank}`,
      `bf16 parameters: ${state.whole.includes(unit.name) ? `whole, ${bytesText(2 * shard * this.walk.ranks)}` : `its shard, ${bytesText(2 * shard)}`}`,
      `fp32 gradients: ${state.reduced.includes(unit.name) ? `its shard of the sum, ${bytesText(4 * shard)}` : "none held"}`,
      `fp32 masters and Adam's states: its shard, ${bytesText(12 * shard)}${state.is_updated ? ", updated" : ""}`,
      state.kept.includes(unit.name) ? "its input is kept for recomputation" : "",
    ]
      .filter(Boolean)
      .join("\n");
  }

  _key(event) {
    const moves = {
      ArrowRight: () => this.moveTo(this.place + 1),
      ArrowLeft: () => this.moveTo(this.place - 1),
      Home: () => this.moveTo(0),
      End: () => this.moveTo(this.walk.steps.length),
    };
    if (event.key === " " && event.target.tagName !== "BUTTON") this.toggle();
    else if (moves[event.key]) {
      this.stop();
      moves[event.key]();
    } else return;
    event.preventDefault();
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.place === this.walk.steps.length) this.moveTo(0);
    this.timer = setInterval(
      () => (this.place < this.walk.steps.length ? this.moveTo(this.place + 1) : this.stop()),
      PLAY_MS,
    );
    this.play.textContent = "Pause";
    this.play.setAttribute("aria-pressed", "true");
    return this.moveTo(this.place + 1);
  }

  hide() {
    this.stop();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "Play";
    this.play.setAttribute("aria-pressed", "false");
  }

  moveTo(place) {
    const { walk } = this;
    this.place = Math.max(0, Math.min(walk.steps.length, place));
    const step = this.place ? walk.steps[this.place - 1] : null;
    const { state } = this;
    this.slider.value = String(this.place);
    this.slider.setAttribute(
      "aria-valuetext",
      step ? `${step.event.phase}: ${step.event.kind} ${step.event.unit || "root unit"}` : "between two steps",
    );
    this.count.textContent = step
      ? `${this.place} of ${walk.steps.length}: ${step.event.kind}${step.event.kind === "step" ? "" : ` ${step.event.unit || "root unit"}`}`
      : `${walk.steps.length} events`;
    this.sentence.textContent = step
      ? step.sentence
      : "Between two steps each rank holds its shard of everything: bf16 parameters, fp32 masters and Adam's states. No gradient is held, and no unit is whole.";
    this.progress.forEach((mark, one) => mark.classList.toggle("done", one < this.place));
    for (const { cell, unit, rank, parameters, gradients, masters, kept } of this.cells) {
      const isWhole = state.whole.includes(unit.name);
      [...parameters.children].forEach((part, owner) => part.classList.toggle("on", isWhole || owner === rank));
      [...gradients.children].forEach((part, owner) =>
        part.classList.toggle("on", owner === rank && state.reduced.includes(unit.name)),
      );
      // Before a reduction each rank has whole gradients of its own batch; it sends what the other ranks keep.
      gradients.classList.toggle("sent", step?.event.kind === "reduce" && step.event.unit === unit.name);
      masters.classList.toggle("updated", state.is_updated);
      kept.classList.toggle("on", state.kept.includes(unit.name));
      cell.classList.toggle("active", step !== null && (step.event.unit === unit.name || step.event.kind === "step"));
    }
    walk.units.forEach((unit, one) =>
      this.names[one].classList.toggle(
        "active",
        step !== null && step.event.kind !== "step" && step.event.unit === unit.name,
      ),
    );
    const most = this._most();
    this.stacks.forEach(({ parts, text }, rank) => {
      const bytes = state.resident_bytes[rank];
      STATE_COLUMNS.forEach((column, one) => {
        parts[one].style.flexBasis = `${(100 * (bytes[column] ?? 0)) / most}%`;
      });
      const total = Object.values(bytes).reduce((sum, one) => sum + one, 0);
      text.textContent = bytesText(total);
      text.dataset.bytes = String(total);
    });
  }

  _most() {
    this.most ??= Math.max(
      ...[this.walk.start, ...this.walk.steps.map((step) => step.state)].flatMap((state) =>
        state.resident_bytes.map((bytes) => Object.values(bytes).reduce((sum, one) => sum + one, 0)),
      ),
    );
    return this.most;
  }
}
