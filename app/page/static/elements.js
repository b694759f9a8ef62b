// Elements are made by createElement and text alone; nothing on this page parses markup.

export const byId = (id) => document.getElementById(id);

/** An element. `properties`: its own (`className`, `onclick`), or attributes where they have a dash (`aria-label`) or are
 * `role` or `for`; `text` is its text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") element.textContent = value;
    else if (name.includes("-") || name === "role" || name === "for" || name === "scope") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

const WHOLE = new Intl.NumberFormat("en-US");
export const count = (number) => WHOLE.format(number);

/** Bytes as people read them, such as "1.5 MiB". */
export function bytes(number) {
  let value = Number(number) || 0;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}
