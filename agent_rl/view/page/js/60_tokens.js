// Trajectories token by token. Given tokens are one node a span; sampled ones get nodes in chunks, as they come into view.

const CHUNK = 256;
/** The open token view: {root, episode, trajectories, number, mode, record, observer, tip}. */
let tokens = null;

/** A trajectory with its arrays unpacked, once. */
function openTrajectory(packed) {
  if (packed.open) return packed.open;
  const made = { ...packed, at: unpack(packed.tokens, `uint${packed.width}`), logprobs: unpack(packed.logprobs, "float16"), joined: new Map() };
  for (const [first, count, text] of packed.joined) for (let n = 0; n < count; n += 1) made.joined.set(first + n, n ? "" : text);
  made.records = packed.records.map((record) => ({
    step: record.step,
    advantages: record.advantages && unpack(record.advantages, "float16"),
    logratios: record.logratios && unpack(record.logratios, "float16"),
  }));
  let before = 0;
  made.spans = packed.spans.map(([start, stop, from, turn, version]) => {
    const span = { start, stop, from, turn, version, before };
    if (from === "policy") before += stop - start;
    return span;
  });
  if (packed.experts?.packed) made.routes = new Int16Array(unpack(packed.experts.packed, "uint16").buffer);
  packed.open = made;
  return made;
}

function tokenText(trajectory, n) {
  if (trajectory.joined.has(n)) return trajectory.joined.get(n);
  return trajectory.texts ? trajectory.texts[trajectory.at[n]] : `${trajectory.ids[trajectory.at[n]]} `;
}

/** As in a text, with line ends that can be seen. */
const lineEnds = (text) => text.replaceAll("\n", "↵\n");

function spanText(trajectory, start, stop) {
  let text = "";
  for (let n = start; n < stop; n += 1) text += tokenText(trajectory, n);
  return text;
}

function openTokens(root, episode, route) {
  closeTokens();
  const box = el("div", { class: "token-text", tabindex: "0", role: "group", "aria-label": "tokens: arrow keys move from one to the next" });
  tokens = { root, episode, box, number: -1, tip: el("div", { class: "tip", id: "tip", role: "tooltip", hidden: true }), bar: el("div", { class: "card modes" }) };
  tokens.sizes = new ResizeObserver(keepTip);  // spans get their size as they come into view
  tokens.sizes.observe(box);
  root.append(el("div", { class: "tokens" }, tokens.bar, box), tokens.tip);
  box.addEventListener("pointerover", (event) => showTip(event.target.closest("i")));
  box.addEventListener("pointerleave", () => showTip(document.activeElement?.closest?.(".token-text i") || null));
  box.addEventListener("focusin", (event) => showTip(event.target.closest("i")));
  box.addEventListener("focusout", () => showTip(null));
  box.addEventListener("keydown", moveFocus);
  box.addEventListener("click", (event) => { const token = event.target.closest("i"); if (token) pinToken(Number(token.dataset.n)); });
  chooseTrajectory(wanted(route));
}

function closeTokens() {
  tokens?.observer?.disconnect();
  tokens?.sizes.disconnect();
  tokens = null;
}

const keepTip = () => { if (tokens?.shown) placeTip(tokens.shown); };
addEventListener("scroll", keepTip, { passive: true });

/** A link to a token of one of an episode's trajectories. */
const tokenLink = (id, trajectory, n) => `${link("episode", id, "token", n)}?trajectory=${trajectory}`;

/** What a hash asks for: a trajectory, a mode, a step; the last trajectory is what the episode ended with. */
function wanted(route) {
  const [last, number] = [tokens.episode.trajectories.length - 1, Number(route.query.get("trajectory") ?? NaN)];
  return { number: number >= 0 && number <= last ? number : holder(route, last), mode: route.query.get("mode"), step: route.query.get("step") };
}

function holder(route, last) {
  const asked = route.parts[1] === "token" ? Number(route.parts[2]) : -1;
  return asked < tokens.episode.trajectories[last].count ? last : tokens.episode.trajectories.findIndex((each) => asked < each.count);
}

function chooseTrajectory({ number, mode, step }) {
  const trajectory = openTrajectory(tokens.episode.trajectories[Math.max(0, number)]);
  const modes = tokenModes(trajectory, step === null || step === undefined ? null : Number(step));
  const first = modes.find((each) => each.name === (mode || tokens.mode?.name) && !each.missing) || modes.find((each) => each.name === "logprob" && !each.missing) || modes[0];
  Object.assign(tokens, { number: Math.max(0, number), trajectory, modes, mode: first });
  drawBar();
  drawTokens();
}

function drawTokens() {
  const { trajectory, box } = tokens;
  tokens.observer?.disconnect();
  tokens.observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) buildChunk(entry.target);
  }, { rootMargin: "1500px 0px" });
  fill(box, trajectory.spans.map((span) => spanBox(trajectory, span)));
  for (const chunk of box.querySelectorAll(".chunk")) tokens.observer.observe(chunk);
}

function spanBox(trajectory, span) {
  const count = span.stop - span.start, isSampled = span.from === "policy";
  const version = span.version === null ? "" : ` · version ${span.version}`;
  const head = el("div", { class: "span-line" }, el("span", { class: `source ${span.from}` }, span.from),
    ` turn ${span.turn} · ${plural(count, "token")} from ${number(span.start)}${version}`);
  const body = el("div", { class: `span-text ${span.from}` });
  if (isSampled) {
    for (let from = span.start; from < span.stop; from += CHUNK) {
      const to = Math.min(span.stop, from + CHUNK);
      body.append(el("span", { class: "chunk", data: { from, to, sampled: span.before + from - span.start } }, lineEnds(spanText(trajectory, from, to))));
    }
  } else fill(body, lineEnds(spanText(trajectory, span.start, span.stop)));
  const box = el("section", { class: "span", data: { start: span.start, stop: span.stop } }, head, body);
  box.style.setProperty("contain-intrinsic-size", `auto ${40 + 24 * Math.ceil(body.textContent.length / 100)}px`);
  return box;
}

/** Put a node for each sampled token in the place of a chunk's text. */
function buildChunk(chunk) {
  if (chunk.dataset.built) return;
  chunk.dataset.built = "yes";
  tokens.observer.unobserve(chunk);
  const { trajectory, mode } = tokens, [from, to, sampled] = ["from", "to", "sampled"].map((name) => Number(chunk.dataset[name]));
  const made = document.createDocumentFragment();
  for (let n = from; n < to; n += 1) {
    const token = document.createElement("i");
    token.className = mode.shade(sampled + n - from);
    token.dataset.n = n;
    token.dataset.s = sampled + n - from;
    token.tabIndex = -1;
    token.textContent = lineEnds(clean(tokenText(trajectory, n)));
    made.append(token);
  }
  chunk.replaceChildren(made);
}

function recolour() {
  for (const token of tokens.box.querySelectorAll(".chunk i")) token.className = tokens.mode.shade(Number(token.dataset.s));
}

/** The node of a token, built if need be. */
function tokenNode(n) {
  const section = [...tokens.box.children].find((each) => Number(each.dataset.start) <= n && n < Number(each.dataset.stop));
  const chunk = [...(section?.querySelectorAll(".chunk") || [])].find((each) => Number(each.dataset.from) <= n && n < Number(each.dataset.to));
  if (!chunk) return section && givenNode(section, n);
  buildChunk(chunk);
  return chunk.children[n - Number(chunk.dataset.from)];
}

/** A node for the one given token that a link names, within its span's text. */
function givenNode(section, n) {
  const { trajectory } = tokens, [start, stop] = [Number(section.dataset.start), Number(section.dataset.stop)];
  const node = el("i", { data: { n }, tabindex: "-1" }, lineEnds(tokenText(trajectory, n)));
  fill(section.querySelector(".span-text"), lineEnds(spanText(trajectory, start, n)), node, lineEnds(spanText(trajectory, n + 1, stop)));
  return node;
}

function moveTokens(route) {
  const asked = wanted(route);
  if (asked.number !== tokens.number) chooseTrajectory(asked);
  else if (asked.mode && asked.mode !== tokens.mode.name) chooseMode(asked.mode);
  if (route.parts[1] !== "token") return true;
  const node = tokenNode(Number(route.parts[2]));
  if (!node) return true;
  for (const old of tokens.box.querySelectorAll(".pinned")) old.classList.remove("pinned");
  node.classList.add("pinned");
  node.scrollIntoView({ block: "center" });
  requestAnimationFrame(() => node.scrollIntoView({ block: "center" }));
  node.focus({ preventScroll: true });
  return true;
}

function tokenHash(n) {
  const query = new URLSearchParams({ trajectory: tokens.number, mode: tokens.mode.name });
  return `${n === null ? link("episode", tokens.episode.id, "tokens") : link("episode", tokens.episode.id, "token", n)}?${query}`;
}

function pinToken(n) {
  history.replaceState(null, "", tokenHash(n));
  for (const old of tokens.box.querySelectorAll(".pinned")) old.classList.remove("pinned");
  tokenNode(n).classList.add("pinned");
}

/** Arrow keys go to the next sampled token, page keys to the next reply. */
function moveFocus(event) {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const current = document.activeElement?.closest(".token-text i"), spans = tokens.trajectory.spans.filter((span) => span.from === "policy");
  if (!by || !spans.length) { if (event.key === "Enter" && current) pinToken(Number(current.dataset.n)); return; }
  event.preventDefault();
  let n = current ? Number(current.dataset.n) + by : spans[0].start;
  if (!spans.some((span) => span.start <= n && n < span.stop)) {
    n = by > 0 ? spans.find((span) => span.start >= n)?.start : (spans.findLast((span) => span.stop <= n + 1)?.stop ?? NaN) - 1;
  }
  if (n >= 0) tokenNode(n).focus();
}

function showTip(token) {
  if (!tokens) return;
  const { tip, trajectory } = tokens;
  tip.hidden = !token;
  tokens.shown = token;
  if (!token) return;
  const [n, at] = [Number(token.dataset.n), token.dataset.s === undefined ? null : Number(token.dataset.s)];
  fill(tip, el("dl", null, tokenFacts(trajectory, n, at).map(([name, fact]) => [el("dt", null, name), el("dd", null, fact)])));
  token.setAttribute("aria-describedby", "tip");
  placeTip(token);
}

/** Put the tooltip below a token, or above where there is no room. */
function placeTip(token) {
  const { tip } = tokens, place = token.getClientRects()[0] || token.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left, innerWidth - size.width - 8));
  const top = place.bottom + size.height + 12 < innerHeight ? place.bottom + 6 : place.top - size.height - 6;
  tip.style.setProperty("left", `${left}px`);
  tip.style.setProperty("top", `${Math.max(8, top)}px`);
}
