// What can be ordered of a node, each by its name.

import { call, getJson } from "./api.js";
import { make } from "./elements.js";

const PIN_S = 3600;
const [POLL_MS, MOST_POLLS] = [300, 100];
const EVICT = "Evict this node and all that follows on it from the CPU tier and Redis?";

/** Gives buttons for a node. `ranks()` are the replicas that there are, `say` takes a sentence. */
export function nodeActions(ranks, say) {
  const order = (name, what) => async (event) => {
    const button = event.currentTarget;
    button.disabled = true;
    try {
      say(`${name}: ${await ordered(name, what)}`);
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
    const named = { node: node.id };
    const evict = button("Evict", "evict", { ...named, tiers: ["cpu", "redis"] });
    const confirmed = evict.onclick;
    evict.onclick = (event) => confirm(EVICT) && confirmed(event);
    return [
      node.pinned ? button("Unpin", "unpin", named) : button("Pin for an hour", "pin", { ...named, ttl_s: PIN_S }),
      evict,
      ...lacking.map((replica) => button(`Bring to replica ${replica}`, "prefetch", { ...named, replica })),
      ...(there.length ? lacking.map((target) => button(`Move to replica ${target}`, "move", { ...named, source: there[0], target })) : []),
    ];
  };
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
