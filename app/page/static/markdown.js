// Markdown into elements, by createElement and text nodes alone: whatever a model says, none of it becomes markup.
// Left out on purpose: raw HTML and pictures stay text, and links lead to http, https and mailto only.

import { make } from "./elements.js";

const DEEPEST = 6; // lists and quotes in each other
const LONGEST_RICH = 20000; // characters of a paragraph; what is longer is shown as it is
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/s; // no two repeats that can share spaces: such take cubic time
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** A fragment with the elements of a Markdown text. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const found = fence(lines, at) ?? heading(lines, at) ?? quote(lines, at, depth) ?? list(lines, at, depth) ?? table(lines, at);
    if (found) {
      made.push(found.element);
      at = found.next;
      continue;
    }
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
    made.push(make("p", {}, ...inline(lines.slice(at, end).join("\n"))));
    at = end;
  }
  return made;
}

const begins = (lines, at) =>
  FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at]) || QUOTE.test(lines[at]) || ITEM.test(lines[at]);

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(open[1]) && !lines[end].trim().replaceAll(open[1][0], ""))) end += 1;
  const code = make("code", { text: lines.slice(at + 1, end).join("\n") });
  return { element: make("pre", { tabIndex: 0 }, code), next: end + 1 };
}

function heading(lines, at) {
  if (RULE.test(lines[at])) return { element: make("hr"), next: at + 1 };
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const level = Math.min(found[1].length + 3, 6); // below the page's own, and the turn's
  return { element: make(`h${level}`, {}, ...inline(closed(found[2]))), next: at + 1 };
}

/** A heading's words, without the marks that may close it. */
function closed(words) {
  let end = words.trimEnd().length;
  while (words[end - 1] === "#") end -= 1;
  return words.slice(0, end).trim();
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at]) || depth >= DEEPEST) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { element: make("blockquote", {}, ...blocks(inner, depth + 1)), next: end };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || depth >= DEEPEST) return null;
  const ordered = /\d/.test(first[2]);
  const indent = first[1].length;
  const element = make(ordered ? "ol" : "ul");
  if (ordered) element.start = parseInt(first[2], 10);
  let next = at;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || item[1].length !== indent || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]];
    next += 1;
    while (next < lines.length && (lines[next].trim() ? /^\s*/.exec(lines[next])[0].length > indent : inside(lines, next, indent))) {
      inner.push(lines[next].slice(Math.min(indent + 2, /^\s*/.exec(lines[next])[0].length)));
      next += 1;
    }
    const [start, ...rest] = blocks(inner, depth + 1);
    const words = start?.tagName === "P" ? [...start.childNodes] : start ? [start] : [];
    element.append(make("li", {}, ...words, ...rest));
  }
  return { element, next };
}

/** Whether a list item goes on behind this empty line. */
function inside(lines, at, indent) {
  const next = lines[at + 1];
  return next !== undefined && next.trim() !== "" && /^\s*/.exec(next)[0].length > indent;
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-") || lines[at + 1].length > 1000) return null;
  if (!DIVIDER.test(lines[at + 1])) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line, tag) => make("tr", {}, ...cells(line).map((text) => make(tag, {}, ...inline(text))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const element = make("table", { tabIndex: 0 }, make("thead", {}, row(lines[at], "th")), make("tbody", {}, ...body));
  return { element, next: end };
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((text) => text.trim());

const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Nodes of a line's or a paragraph's text. */
function inline(text, depth = 0) {
  if (text.length > LONGEST_RICH || depth > DEEPEST) return [text];
  const nodes = [];
  let plain = "";
  const put = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  const lacking = new Set(); // marks that have no end in the rest: each is looked for once
  let at = 0;
  while (at < text.length) {
    const found = code(text, at, lacking) ?? link(text, at, depth, lacking) ?? pair(text, at, depth, lacking);
    if (found) {
      put(found.node);
      at = found.next;
    } else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (text[at] === "\n") {
      const breaks = plain.endsWith("  ");
      plain = plain.trimEnd();
      if (breaks) put(make("br"));
      else plain += " ";
      at += 1;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function code(text, at, lacking) {
  if (text[at] !== "`") return null;
  const [ticks] = /^`+/.exec(text.slice(at, at + 20));
  if (lacking.has(ticks)) return null;
  const end = text.indexOf(ticks, at + ticks.length);
  if (end < 0) {
    lacking.add(ticks);
    return null;
  }
  return { node: make("code", { text: text.slice(at + ticks.length, end) }), next: end + ticks.length };
}

function link(text, at, depth, lacking) {
  if (text[at] !== "[" || lacking.has("](")) return null;
  const middle = text.indexOf("](", at);
  if (middle < 0) {
    lacking.add("](");
    return null;
  }
  const end = text.indexOf(")", middle);
  if (end < 0 || text.slice(at + 1, middle).includes("[")) return null;
  const href = safe(text.slice(middle + 2, end).split(/\s/)[0]);
  if (!href) return null;
  const words = inline(text.slice(at + 1, middle), depth + 1);
  return { node: make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...words), next: end + 1 };
}

function safe(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function pair(text, at, depth, lacking) {
  for (const [mark, tag] of PAIRS) {
    if (!text.startsWith(mark, at) || lacking.has(mark)) continue;
    if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) continue; // snake_case
    if (/\s/.test(text[at + mark.length] ?? " ")) continue;
    const end = text.indexOf(mark, at + mark.length + 1);
    if (end < 0) {
      lacking.add(mark);
      continue;
    }
    if (/\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""))) continue;
    return { node: make(tag, {}, ...inline(text.slice(at + mark.length, end), depth + 1)), next: end + mark.length };
  }
  return null;
}
