// The trie on a canvas, and how it is walked through. A frame's work is that of what it shows, not of what there is.

import { byId } from "./elements.js";
import { landingsOf } from "./figures.js";
import { drawTrie } from "./trie_drawing.js";
import { layout, neighbour, visible } from "./trie_layout.js";

const NEAR = 12; // pixels within which a click means a node
const [LEAST, MOST, MOST_FITTED] = [0.05, 6, 1.5]; // pixels per unit of layout, downwards
const [MOST_ACROSS, MOST_ACROSS_FITTED] = [1.5, 4]; // and across

export class TriePicture {
  /** `chosen(node)` is called with the node that the reader has chosen, `open(node)` when it is to be the root. */
  constructor(chosen, open) {
    this.chosen = chosen;
    this.open = open;
    this.canvas = byId("trie");
    this.placed = layout([]);
    this.seen = []; // what the last frame has shown: `[node, parent]` each
    this.view = { x: 20, y: 20, scale: 1, across: 1 };
    this.fitted = this.view;
    this.moved = false; // by the reader: the picture no longer fits itself to what comes
    this.canvas.onkeydown = (event) => this.key(event);
    this.canvas.onwheel = (event) => {
      if (document.activeElement !== this.canvas && !event.ctrlKey) return;
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 300), event.offsetX, event.offsetY);
    };
    this.listenToPointers();
    byId("trie-in").onclick = () => this.zoom(1.4);
    byId("trie-out").onclick = () => this.zoom(1 / 1.4);
    byId("trie-fit").onclick = () => this.fit();
    new ResizeObserver(() => (this.moved ? this.redraw() : this.fit())).observe(this.canvas);
  }

  /** Show these nodes. What was chosen and where the reader looks stays. */
  show(nodes, hidden) {
    this.placed = layout(nodes);
    const { canvas } = this;
    canvas.dataset.nodes = nodes.length;
    canvas.dataset.first = nodes[0]?.id ?? "";
    const landings = nodes.filter((node) => node.landings?.length).length;
    const marked = landings ? `, ${landings} of them can be resumed in` : "";
    canvas.setAttribute("aria-label", `Trie of cached prefixes: ${nodes.length} nodes shown${marked}, ${hidden} beginnings hidden`);
    if (this.node) this.choose(this.placed.byId.get(this.node.id), false);
    if (this.moved) this.redraw();
    else this.fit();
  }

  choose(node, tell = true) {
    this.node = node;
    if (tell || node) this.chosen(node);
    this.redraw();
  }

  fit() {
    this.moved = false;
    const { clientWidth, clientHeight } = this.canvas;
    const { width, height } = this.placed;
    const scale = Math.min(Math.max(1, clientHeight - 30) / Math.max(height, 1), MOST_FITTED);
    const across = Math.min(Math.max(1, clientWidth - 60) / Math.max(width, 1), MOST_ACROSS_FITTED);
    this.fitted = this.view = { x: 20, y: Math.max(15, (clientHeight - height * scale) / 2), scale, across };
    this.redraw();
  }

  zoom(by, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const { view, fitted } = this;
    const scale = Math.min(MOST, Math.max(Math.min(LEAST, fitted.scale), view.scale * by));
    // Across it grows less than downwards: a tall trie is fitted flat, and its levels are to stay within the canvas.
    const across = Math.min(Math.max(fitted.across, MOST_ACROSS), (fitted.across * scale) / fitted.scale);
    const place = (at, from, was, now) => at - ((at - from) * now) / was;
    this.view = { scale, across, x: place(x, view.x, view.across, across), y: place(y, view.y, view.scale, scale) };
    this.moved = true;
    this.redraw();
  }

  pan(x, y) {
    this.view.x += x;
    this.view.y += y;
    this.moved = true;
    this.redraw();
  }

  key(event) {
    if (event.key === "+" || event.key === "=") this.zoom(1.4);
    else if (event.key === "-") this.zoom(1 / 1.4);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.node) this.open(this.node);
    else if (!event.key.startsWith("Arrow")) return;
    else if (event.shiftKey) {
      const [x, y] = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] }[event.key];
      this.pan(x, y);
    } else {
      this.choose(neighbour(this.placed, this.node, event.key));
      this.see(this.node);
    }
    event.preventDefault();
  }

  /** Pans so that a node is within the canvas. */
  see(node) {
    if (!node) return;
    const [x, y] = this.at(node);
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (x < 20 || x > width - 20 || y < 20 || y > height - 20) this.pan(width / 2 - x, height / 2 - y);
  }

  listenToPointers() {
    const { canvas } = this;
    let from = null;
    let dragged = false;
    canvas.onpointerdown = (event) => {
      canvas.setPointerCapture(event.pointerId);
      from = [event.offsetX, event.offsetY];
      dragged = false;
    };
    canvas.onpointermove = (event) => {
      if (!from) {
        const words = landingsOf(this.nearest(event.offsetX, event.offsetY) ?? {});
        if (canvas.title !== words) canvas.title = words;
        return;
      }
      const [x, y] = [event.offsetX - from[0], event.offsetY - from[1]];
      if (!dragged && Math.hypot(x, y) < 4) return;
      dragged = true;
      from = [event.offsetX, event.offsetY];
      this.pan(x, y);
    };
    canvas.onpointerup = (event) => {
      if (from && !dragged) this.choose(this.nearest(event.offsetX, event.offsetY));
      from = null;
    };
    canvas.onpointercancel = () => (from = null);
    canvas.ondblclick = () => this.node && this.open(this.node);
  }

  nearest(x, y) {
    let found;
    let least = NEAR;
    for (const [node] of this.seen) {
      const [nodeX, nodeY] = this.at(node);
      const distance = Math.hypot(nodeX - x, nodeY - y);
      if (distance < least) [found, least] = [node, distance];
    }
    return found;
  }

  /** A node's place on the canvas, in CSS pixels. */
  at(node) {
    return [this.view.x + node.x * this.view.across, this.view.y + node.y * this.view.scale];
  }

  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const { canvas, placed, view } = this;
    const { seen, visited } = visible(placed.roots, view, canvas.clientWidth, canvas.clientHeight);
    const chosen = this.node && placed.byId.get(this.node.id);
    this.seen = seen;
    canvas.dataset.visited = visited;
    canvas.dataset.drawn = drawTrie(canvas, seen, chosen, (node) => this.at(node), view.scale);
  }
}
