// Puts the page together.

import { call, getJson, key } from "./api.js";
import { Chat } from "./chat.js";
import { byId, make } from "./elements.js";
import { Live } from "./live.js";
import { nodeActions } from "./node_actions.js";
import { themes } from "./theme.js";
import { tour } from "./tour.js";

const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));

const settings = {
  read: () => ({
    model: byId("model").value,
    temperature: number("temperature"),
    maxTokens: number("max-tokens"),
    fidelity: byId("fidelity").value,
    replica: byId("replica").value,
  }),
  replica: (rank) => {
    if (rank !== "" && ![...byId("replica").options].some((option) => option.value === rank)) settings.replicas([rank]);
    byId("replica").value = rank;
  },
  /** Offers these replicas, and keeps the choice. */
  replicas: (ranks) => {
    const select = byId("replica");
    const offered = [...select.options].slice(1).map((option) => option.value);
    if (ranks.join() === offered.join()) return;
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...ranks.map((rank) => make("option", { value: rank, text: rank })));
    select.value = ranks.includes(chosen) ? chosen : "";
  },
};

async function showModels() {
  const state = byId("server-state");
  try {
    const { data } = await getJson("v1/models");
    byId("model").replaceChildren(...data.map((one) => make("option", { value: one.id, text: one.id })));
    state.className = "";
    state.textContent = `serving ${data.map((one) => one.id).join(", ")}`;
  } catch (error) {
    state.className = "bad";
    state.textContent = error.status === 401 ? "The server wants an API key." : error.message;
  }
}

const ranks = () => [...byId("replica").options].slice(1).map((option) => option.value);

async function clear(tiers) {
  const asked = `Clear ${tiers.join(", ")}? What lies there has to be loaded or computed again; an administrator clears it for everybody.`;
  if (!confirm(asked)) return false;
  try {
    await call("api/v1/kv/clear", { body: { tiers } });
    chat.say(`Cleared: ${tiers.join(", ")}.`);
    return true;
  } catch (error) {
    chat.say(error.message);
    return false;
  }
}

const chat = new Chat(settings.read);
const say = (words) => chat.say(words);
const live = new Live({ clear, replicas: settings.replicas, actions: nodeActions(ranks, say) });
themes(() => live.redraw());
tour(chat, settings, clear, ranks);
byId("tour").open = !chat.turns.length;

byId("api-key").value = key.get();
byId("api-key").onchange = (event) => {
  key.set(event.target.value.trim());
  showModels();
  live.restart();
};
byId("show-live").onclick = (event) => {
  const shown = document.body.classList.toggle("shows-live");
  event.target.setAttribute("aria-pressed", String(shown));
  live.readTrie();
};
showModels();
