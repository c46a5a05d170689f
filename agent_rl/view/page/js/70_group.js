// A group: samples of one task side by side, aligned by turn, with where each first departs from another.

views.group = {
  async open(root, route) {
    const id = route.parts[0], heads = await source.heads();
    const ids = heads.id.filter((_, at) => heads.group[at] === id);
    if (!ids.length) throw new Error(`there is no group ${id} in this page`);
    const episodes = await Promise.all(ids.map((each) => source.episode(each)));
    const best = episodes.reduce((a, b) => ((b.reward ?? -Infinity) > (a.reward ?? -Infinity) ? b : a));
    Object.assign(this, { root, id, heads, episodes, against: best.id, sort: route.query.get("sort") || "sample", isDown: false });
    this.draw();
  },
  draw() {
    const { root, id, heads, episodes } = this, read = SORTS[this.sort] || SORTS.sample;
    const order = [...episodes].sort((a, b) => (this.isDown ? -1 : 1) * compareNumbers(read(a), read(b)));
    const against = episodes.find((episode) => episode.id === this.against);
    const columns = order.map((episode) => ({ episode, departure: episode === against ? null : firstDifference(against, episode) }));
    const groups = [...new Set(heads.group)], at = groups.indexOf(id);
    const arrow = (to, sign, name) => (to === undefined ? el("span", { class: "arrow dim", "aria-hidden": "true" }, sign)
      : el("a", { class: "arrow", href: link("group", to), title: `${name} group`, "aria-label": `${name} group` }, sign));
    const rewards = episodes.map((episode) => episode.reward).filter((reward) => reward !== null);
    fill(root,
      el("div", { class: "path small dim" }, arrow(groups[at - 1], "←", "previous"), arrow(groups[at + 1], "→", "next"), el("span", null, "group"), el("code", null, id),
        `${number(at + 1)} of ${number(groups.length)}`),
      el("h1", null, heads.question[heads.group.indexOf(id)] || id),
      el("p", { class: "dim" }, `${plural(episodes.length, "sample")}`,
        rewards.length > 0 && `, mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}`,
        ". The first difference of each from the one it is compared with is marked."),
      el("div", { class: "group-scroll", tabindex: "0", role: "region", "aria-label": "samples side by side" },
        el("table", { class: "side-by-side" }, groupHead(columns, against), el("tbody", null, turnRows(columns)))));
  },
  sortBy(name) { [this.isDown, this.sort] = [this.sort === name ? !this.isDown : name === "reward", name]; this.draw(); },
  keys: {
    "]": ["next group", () => nextGroup(1)], "[": ["previous group", () => nextGroup(-1)],
    e: ["unfold all", () => foldAll(views.group.root, true)], f: ["fold all", () => foldAll(views.group.root, false)],
    r: ["sort by reward", () => views.group.sortBy("reward")], l: ["the list", toList], Escape: ["the list", toList],
  },
};

const SORTS = { sample: (e) => e.sample, reward: (e) => e.reward, turns: (e) => e.turns, calls: (e) => e.calls, tokens: (e) => e.tokens, ended: (e) => e.ending };
const compareNumbers = (a, b) => (a === null) - (b === null) || (a < b ? -1 : a > b ? 1 : 0);

function nextGroup(by) {
  const groups = [...new Set(views.group.heads.group)], next = groups[groups.indexOf(views.group.id) + by];
  if (next !== undefined) go(link("group", next));
}

function groupHead(columns, against) {
  const line = (name, read, kind = "") => el("tr", null,
    el("th", { scope: "row", "aria-sort": views.group.sort === name ? (views.group.isDown ? "descending" : "ascending") : null },
      el("button", { class: "sort", on: { click: () => views.group.sortBy(name) }, title: `sort by ${name}` }, name,
        views.group.sort === name && (views.group.isDown ? " ↓" : " ↑"))),
    columns.map((column) => el("td", { class: kind }, read(column.episode))));
  const compare = el("tr", null, el("th", { scope: "row" }, "departs"), columns.map(({ episode, departure }) =>
    el("td", null, episode === against ? el("span", { class: "tag" }, "compared with") : [departureText(episode, departure),
      el("button", { class: "small against", on: { click: () => { views.group.against = episode.id; views.group.draw(); } } }, "compare with this")])));
  return el("thead", null,
    line("sample", (e) => el("div", { class: "sample" }, el("a", { href: link("episode", e.id) }, e.greedy ? "greedy" : `sample ${e.sample}`),
      e.reward === null ? el("b", { class: "bad" }, "not scored") : el("b", { class: e.success === "yes" ? "good big" : "big" }, number(e.reward)),
      el("div", { class: "dim small id" }, e.id)), "stuck"),
    line("reward", (e) => e.rewards.filter((r) => r.turn === null).slice(0, 5).map((r) => `${r.name} ${number(r.value)}`).join(", ") || "–", "small dim"),
    line("ended", (e) => `${e.ending}, ${e.stop}`), line("turns", (e) => [plural(e.turns, "turn"), e.errors > 0 && el("span", { class: "bad" }, `, ${plural(e.errors, "error")}`)]),
    columns.some((column) => column.episode.tokens) && line("tokens", (e) => `${number(e.tokens)}, ${number(e.sampled)} sampled`), compare);
}

function departureText(episode, departure) {
  const where = departure.turn === null ? "the opening" : `turn ${departure.turn}`;
  const text = departure.field === null ? el("span", { class: "dim" }, "same messages")
    : el("a", { href: link("episode", episode.id, "message", departure.message) }, `${where}, ${departure.field}`);
  return [text, departure.token !== null && [" · ", el("a", { href: tokenLink(episode.id, 0, departure.token) }, `token ${number(departure.token)}`)], " "];
}

function turnRows(columns) {
  const most = Math.max(...columns.map((column) => column.episode.cut.length));
  return Array.from({ length: most }, (_, at) => el("tr", null,
    el("th", { scope: "row", class: "dim" }, at ? `turn ${at - 1}` : "opening"),
    columns.map(({ episode, departure }) => {
      const turn = episode.cut[at];
      if (!turn) return el("td", { class: "none" });
      return el("td", null, turn.reward ? el("div", { class: "small" }, el("b", { class: turn.reward > 0 ? "good" : "bad" }, `reward ${number(turn.reward)}`)) : null,
        turn.messages.map((message, own) => cell(message, turn.first + own, departure)),
        at === episode.cut.length - 1 && episode.error && errorBox(episode.error));
    })));
}

function cell(message, number, departure) {
  const isFirst = departure && departure.message === number && departure.field !== null;
  const mark = isFirst && departure.text && [departure.at, Math.min(departure.text.length, departure.at + 60), { class: "differs", of: "" }];
  const box = bubble(message, { marks: mark && { [departure.field]: [mark] } });
  if (!isFirst) return box;
  return el("div", { class: "departs" }, el("div", { class: "small flag" }, `first difference: ${departure.field}`), box);
}

const COMPARED = [["role", (m) => m.role], ["reasoning", (m) => m.reasoning || ""], ["text", (m) => m.content || ""],
  ["call", (m) => (m.tool_calls || []).map((call) => call.name).join(", ")],
  ["arguments", (m) => JSON.stringify((m.tool_calls || []).map((call) => [call.arguments, call.error]))], ["error", (m) => m.tool_error || ""]];

/** Where an episode first departs from another: {turn, message, field, text, at, token}; `field` null if it doesn't. */
function firstDifference(one, other) {
  const token = firstToken(one.trajectories[0], other.trajectories[0]), flat = (episode) => episode.cut.flatMap((turn) => turn.messages.map((message) => [turn.index, message]));
  const [a, b] = [flat(one), flat(other)];
  for (let at = 0; at < b.length; at += 1) {
    const [turn, message] = b[at];
    if (!a[at]) return { turn, message: at, field: "one more message", text: null, at: 0, token };
    for (const [field, read] of COMPARED) {
      const [left, right] = [clean(read(a[at][1])), clean(read(message))];
      if (left === right) continue;
      let from = 0;
      while (from < left.length && left[from] === right[from]) from += 1;
      return { turn, message: at, field, text: right, at: Math.min(from, Math.max(0, right.length - 1)), token };
    }
  }
  const isShorter = a.length > b.length, last = b.length - 1;
  return { turn: b[last]?.[0] ?? null, message: last, field: isShorter ? "ends here" : null, text: null, at: 0, token };
}

function firstToken(one, other) {
  if (!one?.count || !other?.count) return null;
  const [a, b] = [openTrajectory(one), openTrajectory(other)], shorter = Math.min(a.count, b.count);
  for (let n = 0; n < shorter; n += 1) if (a.ids[a.at[n]] !== b.ids[b.at[n]]) return n;
  return a.count === b.count ? null : Math.min(shorter, b.count - 1);
}
