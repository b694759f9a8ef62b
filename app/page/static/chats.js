// Conversations, kept in this browser's localStorage. The API key never comes near it.

const PLACE = "crosskv.chats";

const fresh = () => ({ id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "New conversation", documents: [], turns: [] });

export class Chats {
  constructor() {
    this.all = read();
    if (!this.all.length) this.all.push(fresh());
    this.current = this.all[0];
    this.full = false;
  }

  /** Writes them all; `full` says that the browser has no room, and that the newest words will not outlive the tab. */
  save() {
    try {
      localStorage.setItem(PLACE, JSON.stringify(this.all));
      this.full = false;
    } catch {
      this.full = true;
    }
  }

  begin() {
    if (this.current.turns.length || this.current.documents.length) this.all.unshift((this.current = fresh()));
    this.save();
  }

  choose(id) {
    this.current = this.all.find((chat) => chat.id === id) ?? this.current;
  }

  remove() {
    this.all = this.all.filter((chat) => chat !== this.current);
    if (!this.all.length) this.all.push(fresh());
    this.current = this.all[0];
    this.save();
  }

  /** The current one's first words name it. */
  name(text) {
    if (this.current.turns.length <= 1) this.current.title = text.trim().slice(0, 60) || "New conversation";
  }
}

function read() {
  try {
    const found = JSON.parse(localStorage.getItem(PLACE) ?? "[]");
    return Array.isArray(found) ? found.filter(whole) : [];
  } catch {
    return [];
  }
}

/** Whether it is what `save` writes: entries that an older page or a person has written are left out. */
const whole = (chat) =>
  typeof chat?.id === "string" &&
  typeof chat.title === "string" &&
  Array.isArray(chat.documents) &&
  chat.documents.every((one) => typeof one?.name === "string" && typeof one.text === "string") &&
  Array.isArray(chat.turns) &&
  chat.turns.every((turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.text === "string");

/** The `messages` of a request: documents first, as the system's text, so that every question about them begins alike. */
export function messages(chat) {
  const system = chat.documents.map((one) => one.text).join("\n");
  const turns = chat.turns.filter((turn) => turn.role === "user" || turn.text);
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...turns.map((turn) => ({ role: turn.role, content: turn.text })),
  ];
}
