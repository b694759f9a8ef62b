// What can be ordered of a node: pin, unpin, bring to a device, move. The API names prompts, not nodes: so the page looks
// for a conversation of this browser that leads through the node, and names its tokens up to there.

import { call, getJson } from "./api.js";
import { messages } from "./chats.js";
import { make } from "./elements.js";

const MOST_CHATS = 12;
const PIN_S = 3600;
const [POLL_MS, MOST_POLLS] = [300, 100];

/** Gives buttons for a node. `say` takes a sentence; `ranks()` are the replicas that there are. */
export function nodeActions(chats, settings, ranks, say) {
  const order = (name, node, body) => async (event) => {
    const button = event.currentTarget;
    button.disabled = true;
    try {
      const tokens = await leadingTo(node, chats, settings());
      if (!tokens) say("No conversation of this browser leads there, and the API takes prompts: nothing was ordered.");
      else say(`${name}: ${await ordered(name, { tokens, ...fidelity(settings()), ...body })}`);
    } catch (error) {
      say(`${name}: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  };
  return (node) => {
    const button = (text, name, body) => make("button", { type: "button", text, onclick: order(name, node, body) });
    const there = node.tiers.device;
    const lacking = ranks().map(Number).filter((rank) => !there.includes(rank));
    return [
      node.pinned ? button("Unpin", "unpin", {}) : button("Pin for an hour", "pin", { ttl_s: PIN_S }),
      ...lacking.map((replica) => button(`Bring to replica ${replica}`, "prefetch", { replica })),
      ...(there.length ? lacking.map((target) => button(`Move to replica ${target}`, "move", { source: there[0], target })) : []),
    ];
  };
}

const fidelity = (settings) => (settings.fidelity ? { kv_cache: { fidelity: settings.fidelity } } : {});

async function leadingTo(node, chats, settings) {
  const others = chats.all.filter((chat) => chat !== chats.current);
  for (const chat of [chats.current, ...others].filter((one) => one.turns.length).slice(0, MOST_CHATS)) {
    try {
      const tokens = await upTo(node, chat, settings);
      if (tokens) return tokens;
    } catch (error) {
      if (error.status !== 400 && error.status !== 414) throw error; // 400: it is longer than the model's context
    }
  }
  return null;
}

async function upTo(node, chat, settings) {
  const asked = { model: settings.model, messages: messages(chat) };
  const { tokens } = await (await call("tokenize", { body: asked })).json();
  const query = new URLSearchParams({ tokens: tokens.join(), ...(settings.fidelity ? { fidelity: settings.fidelity } : {}) });
  const { segments } = await getJson(`api/v1/kv/lookup?${query}`);
  const found = segments.find((segment) => segment.key === node.id);
  return found ? tokens.slice(0, found.end_token) : null;
}

async function ordered(name, body) {
  const answer = await (await call(`api/v1/kv/${name}`, { body })).json();
  if (answer.url === undefined) return name === "pin" ? `${answer.segments} segments` : "done";
  for (let polls = 0; polls < MOST_POLLS; polls += 1) {
    const job = await getJson(answer.url.replace(/^\//, ""));
    if (job.status !== "running") return job.message ?? job.outcome ?? job.status;
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
  return "still under way";
}
