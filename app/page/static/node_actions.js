// What can be ordered of a node. Pins and evictions name the node; what goes to a device names a prompt, so the page looks
// for a conversation of this browser that leads through the node, and names its tokens up to there.

import { call, getJson } from "./api.js";
import { messages } from "./chats.js";
import { make } from "./elements.js";

const MOST_CHATS = 12;
const PIN_S = 3600;
const [POLL_MS, MOST_POLLS] = [300, 100];
const EVICT = "Evict this node and all that follows on it from the CPU tier and Redis?";

/** Gives buttons for a node. `ranks()` are the replicas that there are, `say` takes a sentence. */
export function nodeActions(chats, settings, ranks, say) {
  const order = (name, what) => async (event) => {
    const button = event.currentTarget;
    button.disabled = true;
    try {
      const body = await what();
      if (!body) say("No conversation of this browser leads there, and the API takes prompts for devices: nothing was ordered.");
      else say(`${name}: ${await ordered(name, body)}`);
    } catch (error) {
      say(`${name}: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  };
  return (node) => {
    const button = (text, name, what) => make("button", { type: "button", text, onclick: order(name, what) });
    const there = node.tiers.device;
    const lacking = ranks().map(Number).filter((rank) => !there.includes(rank));
    const prompt = (more) => async () => {
      const tokens = await leadingTo(node, chats, settings());
      return tokens && { tokens, ...fidelity(settings()), ...more };
    };
    const evict = button("Evict", "evict", () => ({ node: node.id, tiers: ["cpu", "redis"] }));
    const confirmed = evict.onclick;
    evict.onclick = (event) => confirm(EVICT) && confirmed(event);
    return [
      node.pinned ? button("Unpin", "unpin", () => ({ node: node.id })) : button("Pin for an hour", "pin", () => ({ node: node.id, ttl_s: PIN_S })),
      evict,
      ...lacking.map((replica) => button(`Bring to replica ${replica}`, "prefetch", prompt({ replica }))),
      ...(there.length ? lacking.map((target) => button(`Move to replica ${target}`, "move", prompt({ source: there[0], target }))) : []),
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
