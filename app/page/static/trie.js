// The trie on a canvas: colour by tier, a ring by hotness, circles for prompts and squares for answers.

import { byId } from "./elements.js";
import { layout, neighbour, tierOf } from "./trie_layout.js";

const RADIUS = 5;
const NEAR = 12; // pixels within which a click means a node
const [LEAST, MOST] = [0.05, 6]; // zoom

export class TriePicture {
  /** `chosen(node)` is called with the node that the reader has chosen, `open(node)` when it is to be the root. */
  constructor(chosen, open) {
    this.chosen = chosen;
    this.open = open;
    this.canvas = byId("trie");
    this.placed = layout([]);
    this.hidden = 0;
    this.drawn = 0;
    this.view = { scale: 1, x: 20, y: 20 };
    this.stretch = 1;
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
    this.hidden = hidden;
    const { canvas } = this;
    canvas.dataset.nodes = nodes.length;
    canvas.setAttribute("aria-label", `Trie of cached prefixes: ${nodes.length} nodes shown, ${hidden} beginnings hidden`);
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
    const scale = Math.min((clientWidth - 60) / Math.max(width, 1), (clientHeight - 30) / Math.max(height, 1), 1.5);
    this.stretch = Math.min(4, Math.max(1, (clientWidth - 60) / Math.max(width * scale, 1))); // a tall trie is drawn wide
    this.view = { scale: Math.max(scale, LEAST), x: 20, y: Math.max(15, (clientHeight - height * scale) / 2) };
    this.redraw();
  }

  zoom(by, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const { view } = this;
    const scale = Math.min(MOST, Math.max(LEAST, view.scale * by));
    this.view = { scale, x: x - ((x - view.x) * scale) / view.scale, y: y - ((y - view.y) * scale) / view.scale };
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
      if (!from) return;
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
    for (const node of this.placed.nodes) {
      const [nodeX, nodeY] = this.at(node);
      const distance = Math.hypot(nodeX - x, nodeY - y);
      if (distance < least) [found, least] = [node, distance];
    }
    return found;
  }

  /** A node's place on the canvas, in CSS pixels. */
  at(node) {
    return [this.view.x + node.x * this.view.scale * this.stretch, this.view.y + node.y * this.view.scale];
  }

  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const { canvas } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    const density = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * density) || canvas.height !== Math.round(height * density)) {
      canvas.width = Math.round(width * density);
      canvas.height = Math.round(height * density);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(density, 0, 0, density, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const colours = { device: colour("device"), cpu: colour("cpu"), redis: colour("redis"), none: colour("recomputed"), hot: colour("hot") };
    const seen = ([x, y]) => x > -20 && x < width + 20 && y > -20 && y < height + 20;
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    pen.beginPath();
    for (const node of this.placed.nodes) {
      const parent = this.placed.byId.get(node.parent);
      if (!parent) continue;
      const [from, to] = [this.at(parent), this.at(node)];
      if (!seen(from) && !seen(to)) continue;
      pen.moveTo(...from);
      pen.lineTo(...to);
    }
    pen.stroke();
    this.drawn = 0;
    pen.font = "11px system-ui, sans-serif";
    for (const node of this.placed.nodes) {
      const place = this.at(node);
      if (!seen(place)) continue;
      this.drawn += 1;
      this.drawNode(pen, node, place, colours);
      if (node.hidden && this.view.scale > 0.6) {
        pen.fillStyle = colour("faint");
        pen.fillText(`+${node.hidden}`, place[0] + 11, place[1] + 4);
      }
    }
    if (this.node && this.placed.byId.has(this.node.id)) {
      const [x, y] = this.at(this.node);
      pen.strokeStyle = colour("text");
      pen.lineWidth = 2;
      pen.strokeRect(x - 10, y - 10, 20, 20);
    }
    canvas.dataset.drawn = this.drawn;
  }

  drawNode(pen, node, [x, y], colours) {
    const size = Math.min(1.2, Math.max(0.45, this.view.scale));
    const radius = RADIUS * size;
    const tier = tierOf(node);
    const shape = (half) => {
      pen.beginPath();
      if (node.kind === "answer") pen.rect(x - half, y - half, 2 * half, 2 * half);
      else pen.arc(x, y, half, 0, 2 * Math.PI);
    };
    if (node.hotness > 0.02) {
      pen.globalAlpha = Math.min(1, 0.15 + node.hotness);
      pen.strokeStyle = colours.hot;
      pen.lineWidth = (1 + 2.5 * node.hotness) * size;
      shape(radius + 2.5 * size);
      pen.stroke();
      pen.globalAlpha = 1;
    }
    shape(radius);
    pen.fillStyle = pen.strokeStyle = colours[tier];
    pen.lineWidth = 1.5;
    if (tier === "none") pen.stroke();
    else pen.fill();
    if (node.pinned) {
      shape(radius + 5.5 * size);
      pen.stroke();
    }
  }
}
