// An icicle: each part of the memory as wide as its bytes, its parts under it.

import { columnColor, el, hideTooltip, showTooltip } from "./dom.js";
import { Plot } from "./plot.js";
import { exactBytes, bytesText } from "./units.js";

const ROW = 34;
const LEVELS = ["live", "column", "module", "tensor"];

export class Icicle {
  constructor(columns) {
    this.columns = columns;
    this.plot = new Plot({
      height: ROW * LEVELS.length + 2,
      margin: { left: 64, right: 12, top: 0, bottom: 0 },
      draw: () => this._draw(),
      role: "application",
      label: "Bytes by column, module and tensor; arrow keys move, Enter zooms in, Escape zooms out",
    });
    this.readout = el("div", { id: "icicle-readout", class: "muted", role: "status" });
    this.element = el("div", {}, this.plot.canvas, this.readout);
    this.boxes = [];
    const { canvas } = this.plot;
    canvas.addEventListener("pointermove", (event) => {
      const node = this._hit(event);
      if (node) showTooltip(this.describe(node), event.clientX, event.clientY);
      else hideTooltip();
    });
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener("click", (event) => {
      const node = this._hit(event);
      if (node) this._zoom(node === this.zoomed ? (node.parent ?? node) : node);
    });
    canvas.addEventListener("keydown", (event) => this._key(event));
  }

  /** Shows a tree; what was zoomed into stays so, if it is still there. */
  show(root) {
    const path = [];
    for (let node = this.zoomed; node?.parent; node = node.parent) path.unshift(node.name);
    this.root = root;
    this.zoomed = root;
    for (const name of path) this.zoomed = this.zoomed.children.find((child) => child.name === name) ?? this.zoomed;
    this._select(this.zoomed);
  }

  describe(node) {
    const path = [];
    for (let one = node; one?.parent; one = one.parent) path.unshift(one.name);
    const share = this.root.nbytes ? (100 * node.nbytes) / this.root.nbytes : 0;
    return `${path.join(" / ") || "everything"}: ${exactBytes(node.nbytes)}, ${share.toFixed(1)}% of what is live`;
  }

  _select(node) {
    this.selected = node;
    this.readout.textContent = this.describe(node);
    this.readout.dataset.bytes = String(node.nbytes);
  }

  _zoom(node) {
    this.zoomed = node;
    this._select(node);
    this.plot.draw();
  }

  _key(event) {
    const node = this.selected;
    const siblings = node.parent?.children ?? [node];
    const place = siblings.indexOf(node);
    const moves = {
      ArrowRight: () => siblings[place + 1],
      ArrowLeft: () => siblings[place - 1],
      ArrowDown: () => node.children[0],
      ArrowUp: () => node.parent,
    };
    if (moves[event.key]) this._select(moves[event.key]() ?? node);
    else if (event.key === "Enter") this.zoomed = node;
    else if (event.key === "Escape") this._select((this.zoomed = this.zoomed.parent ?? this.root));
    else return;
    event.preventDefault();
    this.plot.draw();
  }

  _hit(event) {
    const row = Math.floor(event.offsetY / ROW);
    return this.boxes.find(
      (box) => box.row === row && event.offsetX >= box.x && event.offsetX < box.x + Math.max(1, box.width),
    )?.node;
  }

  draw() {
    this.plot.draw();
  }

  _draw() {
    const { plot } = this;
    this.boxes = [];
    LEVELS.forEach((name, row) => plot.text(name, plot.left - 6, row * ROW + ROW / 2, { align: "right" }));
    // What lies above the part that is zoomed into is as wide as the picture.
    for (let node = this.zoomed.parent; node; node = node.parent) this._box(node, plot.left, plot.right - plot.left);
    this._place(this.zoomed, plot.left, plot.right - plot.left);
  }

  _place(node, x, width) {
    this._box(node, x, width);
    let from = x;
    for (const child of node.children) {
      const share = node.nbytes ? (width * child.nbytes) / node.nbytes : 0;
      if (share >= 0.5) this._place(child, from, share);
      from += share;
    }
  }

  _box(node, x, width) {
    const { plot } = this;
    const { context } = plot;
    const y = node.depth * ROW;
    this.boxes.push({ node, x, width, row: node.depth });
    context.fillStyle = node.depth ? columnColor(this.columns[node.column], node.column) : plot.color("panel");
    context.globalAlpha = node.depth > 1 ? (node.depth === 2 ? 0.75 : 0.5) : 1;
    context.fillRect(x, y + 1, Math.max(0.6, width - (width > 3 ? 1 : 0)), ROW - 2);
    context.globalAlpha = 1;
    if (node === this.selected && width > 2) {
      context.strokeStyle = plot.color("ink");
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 2, width - 3, ROW - 4);
      context.lineWidth = 1;
    }
    if (width < 30) return;
    const label = node.depth ? node.name : "everything";
    const ink =
      node.depth === 0 || node.depth > 1
        ? plot.color("ink")
        : ["parameters", "states"].includes(node.name)
          ? "#ffffff"
          : "#0c1013";
    plot.text(label, x + 5, y + 11, { color: ink, limit: width - 9 });
    plot.text(bytesText(node.nbytes), x + 5, y + 24, { color: ink, limit: width - 9 });
  }
}
