// Where the nodes of the trie stand: depth to the right, leaves below each other. Plain numbers, no canvas.

export const STEP_X = 64;
export const STEP_Y = 18;

/** From the API's nodes, parents before children, to `{nodes, byId, width, height}`; each node has gained `x`, `y`, `below`. */
export function layout(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, { ...node, below: [] }]));
  const roots = [];
  for (const node of byId.values()) (byId.get(node.parent)?.below ?? roots).push(node);
  let row = 0;
  let deepest = 0;
  const stack = roots.map((node) => [node, 0, false]).reverse();
  while (stack.length) {
    const [node, level, done] = stack.pop();
    if (done) {
      node.y = (node.below[0].y + node.below.at(-1).y) / 2;
      continue;
    }
    node.x = level * STEP_X;
    node.level = level;
    deepest = Math.max(deepest, level);
    if (!node.below.length) {
      node.y = row * STEP_Y;
      row += 1;
      continue;
    }
    stack.push([node, level, true]);
    for (const child of [...node.below].reverse()) stack.push([child, level + 1, false]);
  }
  return { nodes: [...byId.values()], byId, roots, width: deepest * STEP_X, height: Math.max(0, row - 1) * STEP_Y };
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
  const level = placed.nodes.filter((one) => one.level === node.level).sort((one, other) => one.y - other.y);
  return level[level.indexOf(node) + (arrow === "ArrowDown" ? 1 : -1)] ?? node;
}
