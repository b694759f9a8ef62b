// Documents of a conversation: chosen, dropped, or pasted where the paste is long.

import { byId, count, make } from "./elements.js";

const LONG_PASTE = 1000; // characters
const LARGEST = 2 * 1024 * 1024; // bytes of one file; the server has its own limit

export class Documents {
  /** `chats`: the store. `changed` is called when the list has changed, `say` with a sentence for the reader. */
  constructor(chats, changed, say) {
    this.chats = chats;
    this.changed = changed;
    this.say = say;
    const file = byId("document-file");
    byId("add-document").onclick = () => file.click();
    file.onchange = () => this.read([...file.files]).then(() => (file.value = ""));
    const compose = byId("compose");
    for (const kind of ["dragenter", "dragover"]) {
      document.addEventListener(kind, (event) => {
        event.preventDefault();
        compose.classList.add("dropping");
      });
    }
    document.addEventListener("dragleave", (event) => event.relatedTarget ?? compose.classList.remove("dropping"));
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      compose.classList.remove("dropping");
      if (event.dataTransfer.files.length) this.read([...event.dataTransfer.files]);
      else this.add("dropped text", event.dataTransfer.getData("text/plain"));
    });
    byId("prompt").addEventListener("paste", (event) => {
      const text = event.clipboardData.getData("text/plain");
      const files = [...event.clipboardData.files];
      if (!files.length && text.length < LONG_PASTE) return;
      event.preventDefault();
      if (files.length) this.read(files);
      else this.add("pasted text", text);
    });
  }

  async read(files) {
    for (const file of files) {
      if (file.size > LARGEST) this.say(`${file.name} is larger than 2 MiB and was left out.`);
      else {
        const text = await file.text();
        if (text.includes("\0")) this.say(`${file.name} is no text and was left out.`);
        else this.add(file.name, text);
      }
    }
  }

  add(name, text) {
    if (!text.trim()) return;
    this.chats.current.documents.push({ name, text });
    this.say(`Document ${name} was added.`);
    this.changed();
  }

  show() {
    const chat = this.chats.current;
    byId("documents").replaceChildren(
      ...chat.documents.map((one, at) => {
        const remove = make("button", { type: "button", text: "×", "aria-label": `Remove ${one.name}` });
        remove.onclick = () => {
          chat.documents.splice(at, 1);
          this.changed();
          byId("add-document").focus();
        };
        return make("li", {}, make("span", { text: `${one.name}, ${count(one.text.length)} characters` }), remove);
      }),
    );
    byId("documents").hidden = !chat.documents.length;
  }
}
