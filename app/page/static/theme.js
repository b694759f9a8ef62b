// Light or dark: the system's choice, or the reader's own, which this browser remembers.

import { byId } from "./elements.js";

const PLACE = "crosskv.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };

/** `changed` is called when the colours have changed. */
export function themes(changed) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = NEXT[read()] ? read() : "system";
  const show = () => {
    document.documentElement.dataset.theme = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
    byId("theme").textContent = `Theme: ${chosen}`;
    changed();
  };
  byId("theme").onclick = () => {
    chosen = NEXT[chosen];
    try {
      localStorage.setItem(PLACE, chosen);
    } catch {
      // It holds for this tab.
    }
    show();
  };
  dark.addEventListener("change", show);
  show();
}

function read() {
  try {
    return localStorage.getItem(PLACE);
  } catch {
    return null;
  }
}
