// Messages: texts folded where they are long, marked where something quotes them, tool calls, reasoning.

const LONG = 3000;

/** A fold: `<details>` that the keys for all of them open and close. */
function fold(title, made, { open = false, kind = "" } = {}) {
  const body = el("div", { class: "fold-body" });
  const build = () => { if (!body.firstChild) fill(body, made()); };
  const details = el("details", { class: `fold ${kind}`, open }, el("summary", null, title), body);
  details.addEventListener("toggle", () => { if (details.open) build(); });
  details.build = build;
  if (open) build();
  return details;
}

/** Open or close all folds of an element. */
function foldAll(root, open) {
  for (const details of root.querySelectorAll("details.fold")) {
    if (open) details.build?.();
    details.open = open;
  }
}

/** A text as it was written; `marks` are [start, stop, {class, of: a name}] in the cleaned text. */
function said(text, marks = [], kind = "said") {
  const whole = clean(text), box = el("div", { class: kind });
  const last = marks.length ? Math.max(...marks.map((mark) => mark[1])) : 0;
  const short = whole.length > LONG && !(last > LONG * 0.7) ? LONG * 0.7 : whole.length;
  const draw = (stop) => fill(box, pieces(whole, stop, marks));
  draw(short);
  if (short === whole.length) return box;
  const more = el("button", { class: "more", on: { click: () => { draw(whole.length); more.remove(); } } },
    `show all ${number(whole.length)} characters`);
  return [box, more];
}

function pieces(text, stop, marks) {
  const cuts = [...new Set([0, stop, ...marks.flatMap(([from, to]) => [from, to])])].filter((cut) => cut <= stop);
  cuts.sort((a, b) => a - b);
  return cuts.slice(1).map((to, at) => {
    const from = cuts[at], of = marks.filter(([start, end]) => start <= from && to <= end);
    const piece = document.createTextNode(text.slice(from, to)), kinds = new Set(of.map((mark) => mark[2].class));
    return of.length ? el("mark", { class: [...kinds].join(" "), data: { of: of.map((mark) => mark[2].of).join(" ") } }, piece) : piece;
  });
}

const QUOTES = " \"'`\u201c\u201d\u2018\u2019\u00ab\u00bb";
const OMISSION = /(?:\[\s*)?(?:\.\.\.|…)(?:\s*\])?/;

/** Where a text has what a quotation quotes, white space aside: [[start, stop], ...]; as judged_html.py does. */
function quoted(text, quotation) {
  const found = [];
  let at = 0;
  for (const part of clean(quotation).replaceAll("\\n", "\n").replaceAll('\\"', '"').split(OMISSION)) {
    let [from, to] = [0, part.length];
    while (from < to && QUOTES.includes(part[from])) from += 1;
    while (to > from && QUOTES.includes(part[to - 1])) to -= 1;
    const words = part.slice(from, to).split(/\s+/).filter(Boolean);
    if (!words.length) continue;
    const pattern = new RegExp(words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("\\s+"), "g");
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match) found.push([match.index, at = match.index + match[0].length]);
  }
  return found;
}

/** A value of JSON, to read: texts as they are, other values as JSON. */
function value(of) {
  if (typeof of === "string") return said(of, [], of.includes("\n") ? "said code" : "said inline");
  return el("code", null, JSON.stringify(of));
}

/** An image of a message; the page's policy loads no other address than data. */
function picture({ text, url }) {
  if (!/^data:image\/(png|jpeg);base64,[A-Za-z0-9+/=]*$/.test(url)) throw new Error("picture: the address is no image");
  const made = el("img", { class: "picture", alt: text, title: text });
  made.src = url;
  return made;
}

/** A call: its name, and its arguments in a fold. */
function callBox(call, isOpen) {
  const given = Object.entries(call.arguments || {});
  const title = [el("b", null, call.name || "no name"), call.error && el("span", { class: "tag bad" }, `✗ ${call.error}`)];
  if (!given.length) return el("div", { class: `call${call.error ? " failed" : ""}` }, title);
  const list = () => el("dl", null, given.map(([name, item]) => [el("dt", null, name), el("dd", null, value(item))]));
  return fold(title, list, { open: isOpen, kind: `call${call.error ? " failed" : ""}` });
}

/**
 * One message. `marks`: those of its text, {text: [...], reasoning: [...]}; `isOpen`: whether its folds are; `id`: the element's.
 */
function bubble(message, { marks = {}, isOpen = false, id = null } = {}) {
  const error = message.tool_error, content = message.content || "", reasoning = message.reasoning || "";
  const { text: ofText = [], reasoning: ofReasoning = [] } = marks || {};
  const isResult = message.role === "tool" && content.length > 600;
  const own = () => said(content, ofText), size = (text) => `${number(text.length)} characters`;
  const folded = message.role === "system" ? `instructions, ${size(content)}` : isResult ? `result, ${size(content)}: ${content.slice(0, 90)}` : null;
  return el("div", { class: `bubble ${message.role}${error ? " failed" : ""}`, id },
    el("div", { class: "who" }, message.role, message.name && ` · ${message.name}`, error && el("b", { class: "tag bad" }, `✗ ${error}`)),
    reasoning && fold(`reasoning, ${size(reasoning)}`, () => said(reasoning, ofReasoning, "said dim"), { open: isOpen || ofReasoning.length > 0, kind: "reasoning" }),
    content && (folded ? fold(folded, own, { open: isOpen || ofText.length > 0, kind: "long" }) : own()),
    (message.images || []).map(picture),
    (message.tool_calls || []).map((call) => callBox(call, JSON.stringify(call.arguments || {}).length < LONG)));
}
