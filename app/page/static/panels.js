// What the cache says of itself, as text, meters and lists.

import { byId, bytes, count, make } from "./elements.js";
import { NAMES, sourcesBar } from "./figures.js";

const MOST_LINES = 30;
const TIERS = ["device", "cpu", "redis"];

const percent = (rate) => (rate === null || rate === undefined ? "–" : `${(100 * rate).toFixed(0)}%`);

/** One big number: the seconds of prefill that were saved, or the tokens while a server that has just begun has no rate. */
export function showSaved({ saved_prefill_s: seconds, saved_is_early: early, hit_tokens: hits }) {
  const known = typeof seconds === "number";
  const tokens = Object.values(hits ?? {}).reduce((sum, one) => sum + one, 0);
  const shown = known ? (seconds < 100 ? seconds.toFixed(2) : count(Math.round(seconds))) : count(tokens);
  byId("saved-number").textContent = shown;
  byId("saved-unit").textContent = known ? (early ? "seconds, by the first measurements" : "seconds") : "tokens; no prefill was measured yet";
}

/** `tiers`: by name `{used_bytes, budget_bytes, hit_rate, recent_hit_rate}`; `clear(tier)` empties one. */
export function showTiers(tiers, clear) {
  const box = byId("tiers");
  if (!box.children.length) box.append(...TIERS.map((tier) => tierRow(tier, clear)));
  for (const tier of TIERS) {
    const { used_bytes: used, budget_bytes: budget, hit_rate: rate, recent_hit_rate: recent } = tiers[tier] ?? {};
    const row = byId(`tier-${tier}`);
    const share = budget ? Math.min(100, (100 * (used ?? 0)) / budget) : 0;
    row.querySelector(".meter span").style.width = `${share}%`;
    const room = used === undefined || used === null ? "" : `${bytes(used)}${budget ? ` of ${bytes(budget)}` : ""}`;
    row.querySelector(".text").textContent = [room, `hits ${percent(rate)}, last minute ${percent(recent)}`].filter(Boolean).join(" · ");
  }
}

function tierRow(tier, clear) {
  const meter = make("div", { className: "meter", "aria-hidden": "true" }, make("span", { className: tier }));
  const button = make("button", { type: "button", text: "Clear", "aria-label": `Clear the ${NAMES[tier]} tier` });
  button.onclick = () => clear(tier);
  return make("div", { className: "tier", id: `tier-${tier}` }, make("span", { className: "name" }, make("i", { className: tier, "aria-hidden": "true" }), NAMES[tier]), meter, button, make("span", { className: "text" }));
}

/** `replicas`: `{replica, ongoing, waiting, waiting_tokens, used_bytes, budget_bytes}` each; empty where one may not know. */
export function showReplicas(replicas, queue) {
  const head = ["replica", "answering", "waiting", "KV"].map((text) => make("th", { text, scope: "col" }));
  const rows = replicas.map((one) => {
    const cells = [
      one.replica,
      count(one.ongoing),
      `${count(one.waiting)} (${count(one.waiting_tokens)} tokens)`,
      one.used_bytes === null ? "–" : `${bytes(one.used_bytes)}${one.budget_bytes ? ` of ${bytes(one.budget_bytes)}` : ""}`,
    ];
    return make("tr", {}, ...cells.map((text) => make("td", { text })));
  });
  const words = queue ? `In all ${count(queue.ongoing ?? 0)} under way, ${count(queue.waiting ?? 0)} in the queue.` : "";
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  byId("replicas").replaceChildren(...(replicas.length ? [table] : []), make("p", { className: "hint", text: words }));
}

/** A decision, newest first. */
export function addRoute({ answer_id: answer, id, replica, reason, tokens, prompt_tokens: prompt }) {
  const words = `replica ${replica ?? "?"}${reason ? `, ${reason}` : ""}, ${count(prompt ?? 0)} tokens`;
  const line = make("li", { title: String(answer || id || "") }, words);
  if (tokens) line.append(sourcesBar(tokens));
  put("routes", line);
}

/** An order of the manager. */
export function addDirective({ kind, source, target, segments, outcome }) {
  const place = ({ tier, holder }) => `${NAMES[tier] ?? tier}${tier === "device" ? ` of ${holder}` : ""}`;
  const where = [source && `from ${place(source)}`, target && `to ${place(target)}`].filter(Boolean).join(" ");
  const what = `${kind} ${where}: ${count(segments ?? 0)} ${segments === 1 ? "segment" : "segments"}`;
  put("directives", make("li", { text: outcome && outcome !== "done" ? `${what}, ${outcome}` : what }));
}

function put(id, line) {
  const list = byId(id);
  list.prepend(line);
  while (list.children.length > MOST_LINES) list.lastElementChild.remove();
}
