// What an answer cost: time to its first token, tokens a second, and where its prompt's KV came from, as the API says it.

import { bytes, count, make } from "./elements.js";

export const SOURCES = ["device", "cpu", "redis", "recomputed"];
export const NAMES = { device: "device", cpu: "CPU", redis: "Redis", recomputed: "recomputed", blended: "blended" };

/** What `reason` means, as docs/concepts/loading.md has it. */
const REASONS = {
  hit: "all that is stored was loaded",
  partial: "the first part was loaded; computing the rest is faster",
  recompute_faster: "something is stored, and computing is faster",
  recompute_always: "something is stored; the server is set to compute",
  blend: "chunks were blended",
  probe: "a little was loaded, to measure",
  unmeasured: "stored, where nobody knows yet how long loads take",
  device: "the device had all that is stored",
  evicted: "seen before, stored nowhere",
  cold: "never seen before",
  no_state: "stored, without the model's states to go on from",
  short: "too short to be planned",
  no_plan: "the manager did not answer in time",
  computed_whole: "the request wants all of it computed",
  load_failed: "not all that was planned came",
};

/** A reason, or several, with its meaning. */
export const why = (reason) =>
  String(reason).split(",").map((one) => (REASONS[one] ? `${one}: ${REASONS[one]}` : one)).join("; ");

/** Where a node of the trie can be resumed, in words; empty where the model has no states, or none are stored there. */
export function landingsOf(node) {
  const places = (node.landings ?? []).map(({ end_token: token, tiers }) => {
    const stored = ["cpu", "redis"].filter((tier) => tiers[tier]).map((tier) => `${NAMES[tier]} ${bytes(tiers[tier])}`);
    return `${count(token)} tokens (${stored.join(", ")})`;
  });
  return places.length ? `can be resumed at ${places.join(" and ")}` : "";
}

/** A bar of tokens by source; `blended` are some of those that were loaded, and have a line of their own below. */
export function sourcesBar(kv) {
  const total = SOURCES.reduce((sum, source) => sum + (kv[source] ?? 0), 0);
  const said = SOURCES.filter((source) => kv[source]).map((source) => `${count(kv[source])} ${NAMES[source]}`);
  if (kv.blended) said.push(`of these ${count(kv.blended)} blended`);
  const bar = make("div", { className: "sources", role: "img", "aria-label": `Prompt of ${count(total)} tokens: ${said.join(", ")}` });
  for (const source of SOURCES.filter((one) => kv[one])) bar.append(part(source, kv[source], total));
  if (!kv.blended) return bar;
  const rest = total - kv.blended - (kv.recomputed ?? 0);
  const line = make("div", { className: "blended-row", "aria-hidden": "true" }, part("", rest, total), part("blended", kv.blended, total));
  return make("div", {}, bar, line);
}

function part(source, tokens, total) {
  const span = make("span", { className: source });
  span.dataset.tokens = tokens;
  span.style.width = `${(100 * tokens) / Math.max(total, 1)}%`;
  return span;
}

function legend(kv) {
  const items = [...SOURCES, "blended"]
    .filter((source) => kv[source] !== undefined)
    .map((source) => {
      const item = make("li", {}, make("i", { className: source, "aria-hidden": "true" }), `${NAMES[source]} ${count(kv[source])}`);
      item.dataset.source = source;
      return item;
    });
  return make("ul", { className: "legend", "aria-label": "The prompt's tokens by source" }, ...items);
}

/** How much of a prompt was not computed: tokens, of how many, and percent. */
export function reused(kv) {
  const total = SOURCES.reduce((sum, source) => sum + (kv[source] ?? 0), 0);
  const tokens = total - (kv.recomputed ?? 0);
  return { tokens, total, percent: total ? Math.floor((100 * tokens) / total) : 0 };
}

function reusedInWords(kv) {
  const { tokens, total, percent } = reused(kv);
  return `${count(tokens)} of ${count(total)} prompt tokens (${percent}%)`;
}

/** Below an answer. `turn`: with those of `usage`, `ttftMs`, `tokensPerS` that are known. */
export function figures(turn) {
  const kv = turn.usage?.kv_cache;
  const rows = [
    ["reused", kv ? reusedInWords(kv) : ""],
    ["first token", turn.ttftMs === undefined ? "" : `${Math.round(turn.ttftMs)} ms`],
    ["speed", turn.tokensPerS === undefined ? "" : `${turn.tokensPerS.toFixed(1)} tokens/s`],
    ["replica", kv?.replica ?? ""],
    ["why", kv?.reason ? why(kv.reason) : ""],
    ["fidelity", kv?.fidelity ?? ""],
    ["prompt", turn.usage && !kv ? `${count(turn.usage.prompt_tokens)} tokens` : ""],
    ["answer", turn.usage ? `${count(turn.usage.completion_tokens)} tokens` : ""],
  ];
  const list = make("dl");
  for (const [name, value] of rows.filter(([, value]) => value !== "")) {
    list.append(make("div", {}, make("dt", { text: name }), make("dd", { text: value })));
  }
  const box = make("div", { className: "figures" });
  if (kv) box.append(sourcesBar(kv), legend(kv));
  box.append(list);
  return box;
}
