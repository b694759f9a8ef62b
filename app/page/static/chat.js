// The chat: sends a conversation, writes the answer as it comes, and keeps what it cost.

import { answer, ApiError } from "./api.js";
import { Chats, messages } from "./chats.js";
import { Documents } from "./documents.js";
import { byId, make } from "./elements.js";
import { GrowingAnswer, turnElement } from "./turns.js";

export class Chat {
  /** `options()`: what the settings say, `{model, temperature, max_tokens, fidelity, replica}`. */
  constructor(options) {
    this.options = options;
    this.chats = new Chats();
    this.running = null;
    this.documents = new Documents(this.chats, () => this.changed(), (words) => this.say(words));
    const prompt = byId("prompt");
    byId("compose").onsubmit = (event) => {
      event.preventDefault();
      this.send(prompt.value);
    };
    prompt.onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send(prompt.value);
    };
    byId("stop").onclick = () => this.stop();
    byId("retry").onclick = () => this.retry();
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    byId("new-chat").onclick = () => this.switch(() => this.chats.begin());
    byId("delete-chat").onclick = () => this.switch(() => this.chats.remove());
    byId("chats").onchange = (event) => this.switch(() => this.chats.choose(event.target.value));
    this.act = {
      retry: (turn) => this.retry(turn),
      edit: (turn, text) => this.edit(turn, text),
      copy: (turn) => navigator.clipboard?.writeText(turn.text).then(() => this.say("Copied."), () => this.say("Copying was refused.")),
    };
    this.show();
  }

  get turns() {
    return this.chats.current.turns;
  }

  switch(how) {
    this.stop();
    how();
    this.show();
    byId("prompt").focus();
  }

  changed() {
    this.save();
    this.show();
  }

  save() {
    this.chats.save();
    if (this.chats.full) this.say("The browser has no room left: this conversation ends with the tab. Delete some.");
  }

  /** A sentence for every reader. */
  say(words) {
    byId("notice").textContent = words;
  }

  show() {
    const { all, current } = this.chats;
    byId("chats").replaceChildren(...all.map((chat) => make("option", { value: chat.id, text: chat.title, selected: chat === current })));
    byId("turns").replaceChildren(...this.turns.map((turn) => turnElement(turn, this.running ? null : this.act)));
    byId("turns").scrollTop = byId("turns").scrollHeight;
    this.documents.show();
    this.showState();
  }

  showState() {
    byId("send").disabled = this.running !== null;
    byId("stop").hidden = this.running === null;
    byId("retry").disabled = this.running !== null || !this.turns.length;
  }

  /** Sends a text as the next turn; nothing while an answer is under way. */
  async send(text) {
    if (!text.trim() || this.running) return;
    byId("prompt").value = "";
    this.turns.push({ role: "user", text });
    this.chats.name(text);
    await this.ask();
  }

  /** Asks again for this answer, or for the last one. */
  async retry(turn) {
    if (this.running) return;
    const at = turn ? this.turns.indexOf(turn) : this.turns.findLastIndex((one) => one.role === "user") + 1;
    if (at < 1) return;
    this.turns.length = at;
    await this.ask();
  }

  async edit(turn, text) {
    const at = this.turns.indexOf(turn);
    if (this.running || at < 0) return;
    this.turns.length = at;
    this.turns.push({ role: "user", text });
    this.chats.name(text);
    await this.ask();
  }

  stop() {
    this.running?.abort();
  }

  async ask() {
    const chat = this.chats.current;
    const { replica, body } = request(chat, this.options());
    const running = (this.running = new AbortController());
    this.say("");
    this.save();
    this.show();
    const growing = new GrowingAnswer(byId("turns"));
    const turn = { role: "assistant", text: "" };
    const sent = performance.now();
    let first;
    let last;
    try {
      for await (const piece of answer(body, { replica, signal: running.signal })) {
        if (piece.id) turn.id = piece.id;
        if (piece.usage) turn.usage = piece.usage;
        if (!piece.text) continue;
        last = performance.now();
        first ??= last;
        turn.text += piece.text;
        growing.write(turn.text);
      }
    } catch (error) {
      if (error.name === "AbortError") turn.stopped = true;
      else if (error instanceof ApiError) turn.error = error.message;
      else turn.error = "The answer could not be read.";
    }
    if (first !== undefined) turn.ttftMs = first - sent;
    const tokens = turn.usage?.completion_tokens;
    if (tokens > 1 && last > first + 5) turn.tokensPerS = (1000 * (tokens - 1)) / (last - first);
    this.running = null;
    chat.turns.push(turn);
    this.save();
    if (chat === this.chats.current) {
      growing.end(turn, this.act);
      this.show();
      byId("spoken").textContent = turn.error ? "" : turn.stopped ? "Stopped." : `Answer: ${turn.text.slice(0, 500)}`;
    }
    document.dispatchEvent(new CustomEvent("answered", { detail: turn }));
  }
}

/** The body of a conversation's request, and the replica that it is sent to. */
export function request(chat, { model, temperature, maxTokens, fidelity, replica }) {
  const kv = {};
  if (fidelity) kv.fidelity = fidelity;
  if (fidelity === "blended" && chat.documents.length) kv.chunks = chat.documents.slice(0, 256).map((one) => one.text);
  const body = { model, messages: messages(chat), temperature };
  if (maxTokens) body.max_tokens = maxTokens;
  if (Object.keys(kv).length) body.kv_cache = kv;
  return { body, replica };
}
