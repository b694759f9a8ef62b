// The turns of a conversation as they are seen: words, figures, and what can be done with each.

import { make } from "./elements.js";
import { figures } from "./figures.js";
import { markdown } from "./markdown.js";

const REDRAW_MS = 80;

/** One turn. `act`: `retry(turn)`, `edit(turn, text)` and `copy(turn)`; absent while an answer is being written. */
export function turnElement(turn, act) {
  const words = make("div", { className: "words" });
  const box = make("article", { className: `turn ${turn.role}` }, make("h3", { text: turn.role === "user" ? "You" : "Answer" }), words);
  if (turn.role === "user") words.textContent = turn.text;
  else words.append(markdown(turn.text));
  if (turn.error) box.append(make("p", { className: "bad", role: "alert", text: turn.error }));
  if (turn.stopped) box.append(make("p", { className: "hint", text: "Stopped." }));
  if (turn.role === "assistant" && (turn.usage || turn.ttftMs !== undefined)) box.append(figures(turn));
  if (act) box.append(make("div", { className: "act" }, ...buttons(turn, act, box, words)));
  return box;
}

function buttons(turn, act, box, words) {
  const button = (text, onclick) => make("button", { type: "button", text, onclick });
  if (turn.role === "assistant") return [button("Retry", () => act.retry(turn)), button("Copy", () => act.copy(turn))];
  return [button("Edit", () => edit(turn, act, box, words))];
}

function edit(turn, act, box, words) {
  const area = make("textarea", { value: turn.text, rows: Math.min(12, turn.text.split("\n").length + 1), "aria-label": "Edit the message" });
  const form = make(
    "form",
    {},
    area,
    make("div", { className: "act" },
      make("button", { type: "submit", text: "Send again" }),
      make("button", { type: "button", text: "Cancel", onclick: () => box.replaceWith(turnElement(turn, act)) }),
    ),
  );
  form.onsubmit = (event) => {
    event.preventDefault();
    if (area.value.trim()) act.edit(turn, area.value);
  };
  form.onkeydown = (event) => {
    if (event.key === "Escape") box.replaceWith(turnElement(turn, act));
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) form.onsubmit(event);
  };
  words.replaceWith(form);
  box.lastElementChild.remove();
  area.focus();
}

/** Writes an answer as it grows, a few times a second however fast it comes. */
export class GrowingAnswer {
  constructor(list) {
    this.list = list;
    this.words = make("div", { className: "words" });
    this.box = make("article", { className: "turn assistant", "aria-busy": "true" }, make("h3", { text: "Answer" }), this.words);
    this.words.append(make("p", { className: "hint", text: "…" }));
    list.append(this.box);
    this.timer = null;
    this.follow();
  }

  write(text) {
    this.text = text;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.words.replaceChildren(markdown(this.text));
      this.follow();
    }, REDRAW_MS);
  }

  end(turn, act) {
    clearTimeout(this.timer);
    this.box.replaceWith(turnElement(turn, act));
    this.follow();
  }

  /** Scrolls with the text, unless the reader has scrolled up. */
  follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    const near = this.height === undefined || this.height - scrollTop - clientHeight < 60;
    this.height = scrollHeight;
    if (near) this.list.scrollTop = scrollHeight;
  }
}
