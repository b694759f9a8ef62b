// Example prompts that lead through what the cache does, each with a button that does it.

import { byId, make } from "./elements.js";
import { reused } from "./figures.js";

const PEOPLE = ["Anna Oslo dentist violin", "Oscar Tokyo guard trumpet", "Jack Bristol porter guitar", "Maria Edinburgh manager harp",
  "Tara Marseille composer cello", "Charlie Caracas writer bagpipes", "Adam Tunis clerk tuba", "Berta Toulouse farmer guitar",
  "Olga Warsaw translator clarinet", "Priya Perth director clarinet", "Gustav Milan poet lute", "Jonas Zagreb mason trumpet",
  "Yusuf Jakarta plumber cello", "Umar Brisbane designer saxophone", "Peter Lima potter cello", "Simon Cologne judge cello",
  "Nora Dhaka banker tuba", "Leo Bangkok florist piano", "Amir Toronto teacher flute", "Viktor Dublin sailor clarinet"];

/** Facts about people that the demo model answers questions about, some 300 tokens. */
export const DOCUMENT = PEOPLE.map((row) => {
  const [name, city, job, instrument] = row.split(" ");
  return `${name} lives in ${city}. ${name} is a ${job}. ${name} plays the ${instrument}.`;
}).join(" ");

const QUESTION = "Where does Anna live?";

/** What a step has shown, in words; of what was no question, or has failed, nothing. */
function came(turn) {
  const kv = turn?.usage?.kv_cache;
  if (!kv) return "";
  const first = turn.ttftMs === undefined ? "" : `first token after ${Math.round(turn.ttftMs)} ms, `;
  return `: ${first}${reused(kv).percent}% reused`;
}

/** `chat`: the Chat; `settings.replica(rank)` chooses one; `clear(tiers)` empties tiers; `others()` names replicas' ranks. */
export function tour(chat, settings, clear, others) {
  const again = async () => {
    chat.switch(() => chat.chats.begin());
    if (!chat.chats.current.documents.length) chat.documents.add("people", DOCUMENT);
    await chat.send(QUESTION);
    return chat.turns.at(-1);
  };
  const elsewhere = async () => {
    const last = chat.chats.all.flatMap((one) => one.turns).find((turn) => turn.usage?.kv_cache)?.usage.kv_cache.replica;
    const other = others().find((rank) => rank !== last);
    if (other === undefined) {
      chat.say("There is no other replica to ask.");
      return false;
    }
    settings.replica(other);
    const turn = await again();
    settings.replica("");
    return turn;
  };
  const steps = [
    ["Ask about a document", "all of it is computed", again],
    ["Ask again", "the replica's device has it", again],
    ["Ask the other replica", "the CPU tier gives what the first one computed", elsewhere],
    ["Clear the devices", "the shared tiers still have it", () => clear(["device"])],
    ["Ask again", "loaded, not computed", again],
  ];
  const list = steps.map(([name, what, act]) => {
    const button = make("button", { type: "button", text: name });
    const result = make("span", { className: "result" });
    const item = make("li", {}, button, ` ${what}`, result);
    button.onclick = async () => {
      if (chat.running) return;
      const done = await act();
      result.textContent = came(done);
      if (done !== false) item.classList.add("done");
    };
    return item;
  });
  list.push(make("li", { text: "Restart the server (Ctrl-C, make serve), then ask again: Redis has it." }));
  byId("tour-steps").replaceChildren(...list);
}
