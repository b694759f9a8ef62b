// Where the nodes of the trie stand, and which of them a picture shows: depth to the right, leaves below each other.
// Plain numbers, no canvas.

export const STEP_X = 64;
export const STEP_Y = 18;
const NEAREST = 4; // pixels between two nodes of a level: what would come nearer is folded into the one before
const MARGIN = 20; // pixels around the canvas that still count as seen

/** From the API's nodes, parents before children, to `{nodes, byId, roots, levels, width, height}`. Each node has gained
 * `x`, `y`, `top` and `bottom` (of all that is below it), `below`, `level` and `order` (in `levels[level]`, from above). */
export function layout(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, { ...node, below: [] }]));
  const roots = [];
  const levels = [];
  for (const node of byId.values()) (byId.get(node.parent)?.below ?? roots).push(node);
  let row = 0;
  const stack = roots.map((node) => [node, 0, false]).reverse();
  while (stack.length) {
    const [node, level, done] = stack.pop();
    if (done) {
      node.y = (node.below[0].y + node.below.at(-1).y) / 2;
      [node.top, node.bottom] = [node.below[0].top, node.below.at(-1).bottom];
      continue;
    }
    node.x = level * STEP_X;
    node.level = level;
    node.order = (levels[level] ??= []).push(node) - 1;
    if (!node.below.length) {
      node.y = node.top = node.bottom = row * STEP_Y;
      row += 1;
      continue;
    }
    stack.push([node, level, true]);
    for (const child of [...node.below].reverse()) stack.push([child, level + 1, false]);
  }
  const width = Math.max(0, levels.length - 1) * STEP_X;
  return { nodes: [...byId.values()], byId, roots, levels, width, height: Math.max(0, row - 1) * STEP_Y };
}

/** What a canvas of this size shows: `{seen: [[node, parent]], visited}`, parents first.
 *
 * A level has a node every `NEAREST` pixels at most; a subtree that is folded is lower than twice that. So `seen` and
 * `visited`, the nodes that were looked at, are bounded by the canvas and the depth, whatever the trie has.
 * `view`: `x` and `y` in pixels, `across` and `scale` pixels per unit of layout. */
export function visible(roots, { x, y, across, scale }, width, height) {
  const [top, bottom, gap] = [(-MARGIN - y) / scale, (height + MARGIN - y) / scale, NEAREST / scale];
  const lowest = []; // by level, the node that was shown last
  const seen = [];
  let visited = 0;
  const look = (siblings, parent, level) => {
    // The first from `at` on of which an edge is at `from` or below it: siblings stand from above to below.
    const next = (at, from, edge) => {
      if (at < siblings.length && edge(siblings[at]) >= from) return at;
      let [low, high] = [at, siblings.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        visited += 1;
        if (edge(siblings[middle]) < from) low = middle + 1;
        else high = middle;
      }
      return low;
    };
    let at = next(0, top, (node) => node.bottom);
    for (;;) {
      if (lowest[level] !== undefined) at = next(at, lowest[level] + gap, (node) => node.y);
      const node = siblings[at];
      if (!node || node.top > bottom) return;
      visited += 1;
      lowest[level] = node.y;
      seen.push([node, parent]);
      if (node.below.length && x + node.x * across < width + MARGIN) look(node.below, node, level + 1);
      at += 1;
    }
  };
  look(roots, null, 0);
  return { seen, visited };
}

/** The tier that answers first with this node: `device`, `cpu`, `redis`, or `none` where only its name is remembered. */
export function tierOf(node) {
  if (node.tiers?.device?.length) return "device";
  if (node.tiers?.cpu) return "cpu";
  return node.tiers?.redis ? "redis" : "none";
}

/** The node next to `node` in a direction, or itself: `ArrowLeft` leads to its parent, `ArrowRight` to its first child. */
export function neighbour(placed, node, arrow) {
  if (!node) return placed.roots[0];
  if (arrow === "ArrowLeft") return placed.byId.get(node.parent) ?? node;
  if (arrow === "ArrowRight") return node.below[0] ?? node;
  return placed.levels[node.level][node.order + (arrow === "ArrowDown" ? 1 : -1)] ?? node;
}
