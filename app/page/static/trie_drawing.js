// How the trie looks: colour by tier, a ring by hotness, circles for prompts and squares for answers,
// a bar to the right where a model with states can be resumed.

import { tierOf } from "./trie_layout.js";

const RADIUS = 5;
const COLOURS = ["device", "cpu", "redis", "recomputed", "hot", "line", "faint", "text"];

/** Draws the nodes of `seen`, `[node, parent]` each, and marks the `chosen` one; returns how many lie on the canvas.
 *
 * `at(node)`: its place in CSS pixels. `scale`: below 1 nodes are drawn smaller, and without numbers. */
export function drawTrie(canvas, seen, chosen, at, scale) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const pen = cleared(canvas, width, height);
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const [node, parent] of seen) {
    if (!parent) continue;
    pen.moveTo(...at(parent));
    pen.lineTo(...at(node));
  }
  pen.stroke();
  let drawn = 0;
  pen.font = "11px system-ui, sans-serif";
  for (const [node] of seen) {
    const [x, y] = at(node);
    if (x < -20 || x > width + 20 || y < -20 || y > height + 20) continue;
    drawn += 1;
    drawNode(pen, node, [x, y], colours, scale);
    if (node.hidden && scale > 0.6) {
      pen.fillStyle = colours.faint;
      pen.fillText(`+${node.hidden}`, x + 11, y + 4);
    }
  }
  if (chosen) {
    const [x, y] = at(chosen);
    drawNode(pen, chosen, [x, y], colours, scale); // it may be folded into another one
    pen.strokeStyle = colours.text;
    pen.lineWidth = 2;
    pen.strokeRect(x - 10, y - 10, 20, 20);
  }
  return drawn;
}

function cleared(canvas, width, height) {
  const density = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * density) || canvas.height !== Math.round(height * density)) {
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(density, 0, 0, density, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function drawNode(pen, node, [x, y], colours, scale) {
  const size = Math.min(1.2, Math.max(0.45, scale));
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
  pen.fillStyle = pen.strokeStyle = tier === "none" ? colours.recomputed : colours[tier];
  pen.lineWidth = 1.5;
  if (tier === "none") pen.stroke();
  else pen.fill();
  if (node.landings?.length) {
    pen.fillStyle = colours.text;
    pen.fillRect(x + radius + 1.5 * size, y - radius, 2 * size, 2 * radius);
  }
  if (node.pinned) {
    shape(radius + 5.5 * size);
    pen.stroke();
  }
}
