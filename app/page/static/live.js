// The cache, live: reads the server's events while the page is visible, and the trie when they say that it changed.

import { call, events, getJson } from "./api.js";
import { byId, count, bytes, make } from "./elements.js";
import { NAMES, landingsOf } from "./figures.js";
import { addDirective, addRoute, showReplicas, showSaved, showTiers } from "./panels.js";
import { TriePicture } from "./trie.js";

const TRIE_MS = 3000; // between two reads at the least
const UNTOLD_MS = 30_000; // what no event tells, such as the end of a pin, is seen by then
const SILENCE_MS = 30_000; // longer than the server ever says nothing
const [FIRST_WAIT_MS, LONGEST_WAIT_MS] = [500, 10_000];
const MOST_NODES = 1000;
const RESTARTING = "The server is restarting, or was stopped; asking again.";
const AWAY = "The KV manager is away: answers go on without it. The figures are its last ones.";

export class Live {
  /** `clear(tiers)` empties tiers; `replicas(ranks)` hears who is there; `actions(node)` gives buttons for a node. */
  constructor({ clear, replicas, actions }) {
    this.replicas = replicas;
    this.actions = actions;
    this.clear = (tier) => clear([tier]);
    this.last = {};
    this.root = null;
    this.changed = true;
    this.readAt = 0;
    this.picture = new TriePicture((node) => this.showNode(node), (node) => this.openNode(node));
    showTiers({}, this.clear);
    byId("trie-up").onclick = () => this.openNode(null);
    document.addEventListener("answered", () => setTimeout(() => this.readTrie(), 500));
    document.addEventListener("visibilitychange", () => this.restart());
    this.restart();
    setInterval(() => (this.changed || Date.now() - this.readAt >= UNTOLD_MS) && this.readTrie(), TRIE_MS);
  }

  /** Watches again: a key was given, or the tab is visible again. */
  restart() {
    this.watching?.abort();
    if (document.hidden) return;
    this.watching = new AbortController();
    this.watch(this.watching.signal);
    this.readTrie();
  }

  redraw() {
    this.picture.redraw();
  }

  say(words, bad = false) {
    const state = byId("live-state");
    if (state.textContent !== words) state.textContent = words;
    state.className = bad ? "bad" : "";
  }

  async watch(signal) {
    let wait = FIRST_WAIT_MS;
    while (!signal.aborted) {
      const silence = new AbortController();
      const both = AbortSignal.any([signal, silence.signal]);
      let timer;
      const alive = () => {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_MS);
      };
      try {
        alive();
        for await (const { event, data } of events(await call("api/v1/events", { signal: both }))) {
          alive();
          wait = FIRST_WAIT_MS;
          this.hear(event, JSON.parse(data));
        }
        this.say(this.restarting ? RESTARTING : "The server has ended the live view; asking again.", true);
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401 || error.status === 403 || error.status === 404) {
          this.say(error.status === 404 ? "This server has no live view." : error.message, true);
          return;
        }
        const broken = error.status === undefined ? "The live view broke off; asking again." : `${error.message} Asking again.`;
        this.say(this.restarting ? RESTARTING : broken, true);
      } finally {
        clearTimeout(timer);
      }
      await new Promise((done) => setTimeout(done, wait * (0.75 + Math.random() / 2)));
      wait = Math.min(LONGEST_WAIT_MS, 2 * wait);
    }
  }

  hear(event, said) {
    this.restarting = event === "restarting";
    this.changed ||= event !== "cache";
    if (event === "route") addRoute(said);
    else if (event === "directive") addDirective(said);
    else if (event === "cache") this.showCache(said);
  }

  showCache(cache) {
    const away = cache.manager !== "ok";
    this.say(away ? AWAY : "Live.", away);
    const figures = JSON.stringify([cache.index, Object.values(cache.tiers).map((one) => [one.used_bytes, one.segments])]);
    this.changed ||= figures !== this.figures;
    this.figures = figures;
    const tiers = {};
    for (const [tier, now] of Object.entries(cache.tiers)) {
      tiers[tier] = { ...now };
      if (!away) continue; // what only the manager knows stays as it was
      const before = this.last.tiers?.[tier] ?? {};
      for (const name of ["used_bytes", "budget_bytes"]) tiers[tier][name] = now[name] ?? before[name];
    }
    this.last = { ...cache, tiers };
    showTiers(tiers, this.clear);
    showReplicas(cache.replicas, cache.queue);
    showSaved(cache);
    this.replicas(cache.replicas.map((one) => one.replica));
  }

  async readTrie() {
    if (document.hidden || !this.picture.canvas.clientWidth || this.reading) return;
    this.reading = true;
    this.changed = false;
    this.readAt = Date.now();
    const { root } = this;
    try {
      const asked = new URLSearchParams({ depth: "16", most: String(MOST_NODES), ...(root ? { root } : {}) });
      const { nodes, hidden } = await getJson(`api/v1/kv/trie?${asked}`);
      if (root === this.root) this.picture.show(nodes, hidden ?? 0);
    } catch (error) {
      this.changed = true;
      if (error.status === 404 && root) this.openNode(null); // it has left the index
    } finally {
      this.reading = false;
    }
    if (root !== this.root) this.readTrie(); // another one was opened meanwhile
  }

  openNode(node) {
    this.root = node?.id ?? null;
    byId("trie-up").hidden = !node;
    this.picture.moved = false;
    this.readTrie();
  }

  showNode(node) {
    const box = byId("trie-node");
    if (!node) {
      box.replaceChildren();
      return;
    }
    const places = [
      ...(node.tiers.device.length ? [`${NAMES.device} of replica ${node.tiers.device.join(", ")}`] : []),
      ...["cpu", "redis"].filter((tier) => node.tiers[tier]).map((tier) => `${NAMES[tier]} ${bytes(node.tiers[tier])}`),
    ];
    const words = [
      `${node.kind === "answer" ? "Answer" : "Prompt"}, ${count(node.tokens)} tokens from ${count(node.start_token ?? 0)} on`,
      `${Number(node.uses).toFixed(1)} uses, hotness ${Number(node.hotness).toFixed(2)}`,
      `${bytes(node.bytes)}: ${places.join("; ") || "nowhere, only remembered"}`,
      ...[landingsOf(node)].filter(Boolean),
      ...(node.pinned ? ["pinned"] : []),
      ...(node.children ? [`${count(node.children)} follow, ${count(node.hidden)} of them not shown`] : []),
    ];
    const open = make("button", { type: "button", text: "Open", onclick: () => this.openNode(node) });
    const key = `${words.join()}${node.id}`;
    if (box.dataset.shown === key && box.children.length) return; // the reader may stand on one of its buttons
    box.dataset.shown = key;
    box.replaceChildren(make("p", { className: "hint", text: `${words.join("; ")}.` }), make("div", { className: "act" }, open, ...this.actions(node)));
  }
}
