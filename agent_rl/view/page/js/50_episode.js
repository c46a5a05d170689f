// One episode: #/episode/ID, its turns at /turn/N, its tokens at /tokens or /token/N.

views.episode = {
  async open(root, route) {
    const id = route.parts[0], [episode, heads] = await Promise.all([source.episode(id), source.heads()]);
    Object.assign(this, { root, episode, heads, id });
    const [isTokens, hasTokens] = [/^tokens?$/.test(route.parts[1] || ""), episode.trajectories.some((each) => each.count)];
    root.append(episodeHead(episode, heads));
    root.append(el("nav", { class: "tabs", "aria-label": "parts of the episode" },
      el("a", { href: link("episode", id), "aria-current": isTokens ? null : "page" }, "Conversation"),
      hasTokens ? el("a", { href: link("episode", id, "tokens"), "aria-current": isTokens ? "page" : null }, "Tokens")
        : el("span", { class: "dim", title: "its policy gave no token ids" }, "Tokens"),
      groupLink(episode, heads), taskLink(episode, heads)));
    const body = el("div", { class: "episode-body" });
    root.append(body);
    if (isTokens && hasTokens) openTokens(body, episode, route);
    else drawConversation(body, episode, heads);
  },
  shown(route) { this.move(route); },
  move(route) {
    const [, part, at] = route.parts, isTokens = /^tokens?$/.test(part || "");
    if (isTokens !== Boolean(this.root.querySelector(".tokens"))) return false;
    if (isTokens) return moveTokens(route);
    if (part === "turn") jumpTo(this.root.querySelector(`[id="turn-${Number(at)}"]`));
    if (part === "message") jumpTo(this.root.querySelector(`[id="message-${Number(at)}"]`));
    return true;
  },
  close() { closeTokens(); },
  keys: {
    "]": ["next episode", () => nextEpisode(1)], "[": ["previous episode", () => nextEpisode(-1)],
    j: ["next turn", () => nextTurn(1)], k: ["previous turn", () => nextTurn(-1)],
    e: ["unfold all", () => foldAll(views.episode.root, true)], f: ["fold all", () => foldAll(views.episode.root, false)],
    o: ["tokens or conversation", () => {
      const isTokens = views.episode.root.querySelector(".tokens");
      go(isTokens ? link("episode", views.episode.id) : link("episode", views.episode.id, "tokens"));
    }],
    s: ["its task over training", () => go(link("task", views.episode.heads.task[views.episode.heads.id.indexOf(views.episode.id)]))],
    u: ["samples of its group side by side", () => go(link("group", views.episode.episode.group))],
    l: ["the list", toList], Escape: ["the list", toList],
  },
};

/** The ids around an episode, in the list's order. */
function neighbour(id, heads, by) {
  const ids = list.heads ? list.found.map((one) => list.heads.id[one]) : heads.id, at = ids.indexOf(id);
  return at < 0 ? undefined : ids[at + by];
}

/** Go to the list as it was left. */
function toList() { go(list.heads ? listLink(list.state) : "#/list"); }

function nextEpisode(by) {
  const next = neighbour(views.episode.id, views.episode.heads, by);
  if (next !== undefined) go(link("episode", next, ...(views.episode.root.querySelector(".tokens") ? ["tokens"] : [])));
}

function nextTurn(by) {
  const turns = [...views.episode.root.querySelectorAll(".turn[id]")], top = 110;
  const place = (turn) => turn.getBoundingClientRect().top - top;
  const next = by > 0 ? turns.find((turn) => place(turn) > 4) : turns.findLast((turn) => place(turn) < -4);
  if (next) go(link("episode", views.episode.id, "turn", next.id.slice(5)), true);
}

function jumpTo(element) {
  if (!element) return;
  element.scrollIntoView({ block: "start" });
  element.classList.remove("hit");
  requestAnimationFrame(() => element.classList.add("hit"));
  element.setAttribute("tabindex", "-1");
  element.focus({ preventScroll: true });
}

function episodeHead(episode, heads) {
  const at = heads.id.indexOf(episode.id);
  const step = (by, sign, name) => {
    const id = neighbour(episode.id, heads, by);
    return id === undefined ? el("span", { class: "arrow dim", "aria-hidden": "true" }, sign)
      : el("a", { class: "arrow", href: link("episode", id), title: `${name} episode`, "aria-label": `${name} episode` }, sign);
  };
  return el("div", { class: "episode-head" },
    el("div", { class: "path small dim" }, step(-1, "←", "previous"), step(1, "→", "next"),
      el("span", null, episode.env), el("code", null, episode.id), at >= 0 && `${number(at + 1)} of ${number(heads.id.length)}`),
    el("h1", null, heads.question[at] || episode.id),
    el("div", { class: "tiles" }, [...episodeTiles(episode)]));
}

function tile(big, label, kind = "") {
  return el("div", { class: "tile" }, el("b", { class: kind }, big), el("span", { class: "dim" }, label));
}

function* episodeTiles(episode) {
  const kind = episode.reward === null ? "bad" : episode.success === "yes" ? "good" : "";
  yield tile(episode.reward === null ? "none" : number(episode.reward), episode.reward === null ? "not scored" : "reward", kind);
  yield tile(episode.ending, `${episode.outcome}, ${episode.stop}`, episode.outcome === "failed" ? "bad" : "");
  yield tile(number(episode.turns), episode.turns === 1 ? "turn" : "turns");
  yield tile(number(episode.calls), episode.errors ? el("span", { class: "bad" }, `calls, ${plural(episode.errors, "error")}`) : episode.calls === 1 ? "call" : "calls");
  if (episode.tokens) yield tile(number(episode.tokens), `tokens, ${number(episode.sampled)} sampled`);
  yield tile(`${number(episode.seconds)} s`, "time");
  if (episode.step !== null) yield tile(number(episode.step), `step, ${episode.purpose}`);
}

function groupLink(episode, heads) {
  const size = heads.group.filter((group) => group === episode.group).length;
  if (size < 2) return el("span", { class: "dim", title: "no other episode of its group is here" }, "Group");
  return el("a", { href: link("group", episode.group) }, "Group", el("span", { class: "count" }, size));
}

function drawConversation(root, episode, heads) {
  const marks = evidenceMarks(episode);
  const turns = el("div", { class: "turns" });
  const inherited = episode.parent ? episode.parent[1] : 0;
  for (const turn of episode.cut) {
    if (!turn.messages.length && turn.index === null) continue;
    turns.append(turnBox(turn, episode, marks, turn.index !== null && turn.index < inherited));
  }
  if (episode.error) turns.append(errorBox(episode.error));
  const buttons = el("div", { class: "fold-buttons" },
    el("button", { on: { click: () => foldAll(turns, true) }, title: "unfold all (e)" }, "unfold all"),
    el("button", { on: { click: () => foldAll(turns, false) }, title: "fold all (f)" }, "fold all"));
  root.append(el("div", { class: "with-facts" }, el("div", { class: "talk" }, buttons, turns),
    el("aside", { "aria-label": "rewards, verdicts and facts" },
      rewardCard(episode), episode.judgements.map((judgement, of) => judgementCard(judgement, of, root)),
      turnCard(episode), factCard(episode, heads))));
}

function turnBox(turn, episode, marks, isInherited) {
  const facts = [];
  if (turn.reward) facts.push(el("b", { class: turn.reward > 0 ? "good" : "bad" }, `reward ${number(turn.reward)}`));
  const [trajectory, first, sampled] = turn.sampled || [];
  if (turn.sampled) facts.push(`${plural(sampled, "sampled token")}`);
  if (turn.seconds) facts.push(`${number(turn.seconds)} s`);
  if (turn.ended) facts.push(turn.ended);
  if (isInherited) facts.push("played by its parent");
  const name = turn.index === null ? "opening" : `turn ${turn.index}`;
  return el("section", { class: `turn${isInherited ? " inherited" : ""}`, id: turn.index === null ? null : `turn-${turn.index}`, "aria-label": name },
    el("div", { class: "turn-line" },
      turn.index === null ? name : el("a", { href: link("episode", episode.id, "turn", turn.index), title: "a link to this turn" }, name),
      facts.map((fact) => el("span", null, fact)),
      turn.sampled && el("a", { class: "to-tokens", href: tokenLink(episode.id, trajectory, first), title: "its first sampled token" }, "tokens")),
    turn.messages.map((message, at) => bubble(message, { marks: marks.get(turn.first + at), id: `message-${turn.first + at}` })));
}

function errorBox(error) {
  return el("div", { class: "card error", role: "alert" },
    el("b", { class: "bad" }, `failed in ${error.where}: ${error.type}`), el("div", { class: "said" }, error.message),
    error.traceback && fold("traceback", () => el("pre", null, error.traceback)));
}

function table(head, rows, kind = "") {
  return el("table", { class: kind }, el("thead", null, el("tr", null, head.map(([name, type]) => el("th", { class: type, scope: "col" }, name)))),
    el("tbody", null, rows));
}

function rewardCard(episode) {
  if (!episode.rewards.length) return null;
  const largest = Math.max(1, ...episode.rewards.map((reward) => Math.abs(Number(reward.value) || 0)));
  const rows = episode.rewards.map((reward) => {
    const width = Math.min(100, 100 * Math.abs(Number(reward.value) || 0) / largest);
    return el("tr", { class: reward.weight === 0 ? "weightless" : "" },
      el("td", null, reward.name, el("div", { class: "dim small" }, reward.source,
        reward.turn !== null && [", ", el("a", { href: link("episode", episode.id, "turn", reward.turn) }, `turn ${reward.turn}`)])),
      el("td", { class: "num" }, reward.value === null ? el("span", { class: "bad", title: reward.error }, "not scored") : el("b", null, number(reward.value)),
        el("div", { class: `bar${reward.value < 0 ? " below" : ""}`, "aria-hidden": "true", style: { "--width": `${width}%` } })),
      el("td", { class: "num dim" }, `× ${number(reward.weight)}`));
  });
  const errors = episode.rewards.filter((reward) => reward.error).map((reward) => el("div", { class: "bad small said" }, `${reward.name}: ${reward.error}`));
  return el("div", { class: "card" }, el("h2", null, "Rewards"), table([["component"], ["value", "num"], ["weight", "num"]], rows, "rewards"), errors);
}

function turnCard(episode) {
  const rows = episode.cut.filter((turn) => turn.index !== null);
  if (rows.length < 2) return null;
  const hasReward = rows.some((turn) => turn.reward), hasTime = rows.some((turn) => turn.seconds !== null);
  const list = rows.map((turn) => {
    const calls = turn.messages.flatMap((message) => (message.tool_calls || []).map((call) => call.name));
    const errors = turn.messages.filter((message) => message.tool_error).length;
    return el("tr", null, el("td", null, el("a", { href: link("episode", episode.id, "turn", turn.index) }, turn.index)),
      el("td", { class: "what" }, calls.join(", ") || el("span", { class: "dim" }, "answer"), errors > 0 && el("span", { class: "bad", title: plural(errors, "tool error") }, " ✗")),
      episode.tokens > 0 && el("td", { class: "num dim" }, number(turn.sampled?.[2])),
      hasReward && el("td", { class: "num" }, number(turn.reward)), hasTime && el("td", { class: "num dim" }, number(turn.seconds)));
  });
  const head = [["turn"], ["calls"], episode.tokens > 0 && ["sampled", "num"], hasReward && ["reward", "num"], hasTime && ["seconds", "num"]];
  return el("div", { class: "card" }, el("h2", null, "Turns"), el("div", { class: "scroll" }, table(head.filter(Boolean), list)));
}

function factCard(episode, heads) {
  const children = heads.id.filter((_, at) => heads.parent[at]?.[0] === episode.id);
  const to = (id, ...place) => el("a", { href: link("episode", id, ...place) }, id);
  const parent = episode.parent && (heads.id.includes(episode.parent[0]) ? to(episode.parent[0], "turn", episode.parent[1]) : episode.parent[0]);
  const json = (thing) => {
    const text = JSON.stringify(thing, null, 1);
    if (!thing || !Object.keys(thing).length) return null;
    return text.length < 240 ? el("code", null, JSON.stringify(thing)) : fold(`${number(text.length)} characters`, () => el("pre", null, text));
  };
  const sum = (name) => number(episode.usage.reduce((total, each) => total + (each[name] || 0), 0));
  const used = episode.usage.length ? `${episode.usage[0].model}: ${sum("input_tokens")} tokens in, ${sum("output_tokens")} out` : null;
  const facts = [["continued from", parent && [parent, ` at turn ${episode.parent[1]}`]],
    ["continued as", children.length ? children.map((id) => el("div", null, to(id, "turn", heads.parent[heads.id.indexOf(id)][1]))) : null],
    ["task", json(episode.task)], ["arguments", json(episode.env_args)], ["seed", number(episode.seed)], ["group", episode.group],
    ["split", episode.split], ["used", used], ["versions", Object.entries(episode.versions).map(([name, version]) => `${name} ${version}`).join(", ")]];
  return el("div", { class: "card" }, el("h2", null, "Facts"), el("dl", { class: "facts" },
    facts.filter(([, fact]) => fact !== null && fact !== "" && fact !== false).map(([name, fact]) => [el("dt", null, name), el("dd", null, fact)])));
}
