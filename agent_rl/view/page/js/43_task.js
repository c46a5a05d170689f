// One task over training: what the policy did at step 0, 50, 100 ..., side by side; a slider moves over the steps.

const ACROSS = 26;  // em: the least width of a column

const overTime = {};

views.task = {
  keys: {
    ArrowLeft: ["earlier step", () => slideBy(-1)],
    ArrowRight: ["later step", () => slideBy(1)],
    h: ["earlier step", () => slideBy(-1)],
    l: ["later step", () => slideBy(1)],
    Home: ["first step", () => slideTo(0)],
    End: ["last step", () => slideTo(overTime.steps.length - 1)],
    Enter: ["open the episode", () => overTime.shownIds?.length && go(link("episode", overTime.shownIds[0]))],
    Escape: ["back to the list", () => go("#/list")],
  },

  async open(root, route) {
    overTime.key = route.parts[0];
    overTime.title = el("h1", { class: "question" });
    overTime.chart = el("div", { class: "charts" });
    overTime.slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "step of training", on: { input: () => slideTo(Number(overTime.slider.value)) } });
    overTime.said = el("output", { class: "step" });
    overTime.columns = el("div", { class: "steps" });
    root.append(overTime.title, overTime.chart, el("div", { class: "slider" }, overTime.slider, overTime.said), overTime.columns);
    await readTask();
    views.task.move(route);
    overTime.stop = source.onchange(async () => {
      await readTask();
      slideTo(overTime.at);
    });
  },

  move({ query }) {
    const step = query.get("step"), last = overTime.steps.length - 1;
    overTime.at = step === null ? last : Math.max(0, nearest(overTime.steps.map(({ x }) => ({ x })), Number(step)));
    overTime.sample = Number(query.get("sample") ?? 0);
    drawSteps();
    return true;
  },

  close() {
    overTime.stop?.();
  },
};

/** Sort the task's episodes by step: {x: the step, y: the mean reward, heads: their numbers}. */
async function readTask() {
  const heads = overTime.heads = await source.heads(), bySteps = new Map();
  heads.task.forEach((key, at) => {
    if (key !== overTime.key || heads.step[at] === null) return;
    if (!bySteps.has(heads.step[at])) bySteps.set(heads.step[at], []);
    bySteps.get(heads.step[at]).push(at);
  });
  overTime.steps = [...bySteps].map(([x, found]) => ({ x, y: meanReward(found), heads: found })).sort((one, other) => one.x - other.x);
  const { steps } = overTime, some = steps[0]?.heads[0] ?? heads.task.indexOf(overTime.key);
  fill(overTime.title, some >= 0 ? heads.question[some] || heads.id[some] : "no such task");
  overTime.slider.setAttribute("max", Math.max(0, steps.length - 1));
  overTime.slider.disabled = steps.length < 2;
  const points = steps.filter(({ y }) => y !== null);
  fill(overTime.chart);
  if (points.length < 2) return;
  const chart = { name: "reward", title: "reward of this task", lines: [{ label: "mean", points }] };
  const made = drawChart(chart, [points[0].x, points.at(-1).x], {
    pointed: (step) => made.show(step ?? overTime.steps[overTime.at].x),
    picked: (step) => slideTo(overTime.steps.findIndex(({ x }) => x === step)),
  });
  overTime.show = made.show;
  fill(overTime.chart, made.node);
}

/** Return a link to an episode's task over training, where it was tried at other steps, too. */
function taskLink(episode, heads) {
  const at = heads.id.indexOf(episode.id), steps = new Set(heads.step.filter((_, other) => heads.task[other] === heads.task[at]));
  return steps.size < 2 ? null : el("a", { href: `${link("task", heads.task[at])}?step=${episode.step}` }, "Over training", el("span", { class: "count" }, steps.size));
}

function meanReward(found) {
  const known = found.map((at) => overTime.heads.reward[at]).filter((reward) => reward !== null);
  return known.length ? known.reduce((sum, reward) => sum + reward, 0) / known.length : null;
}

function slideBy(by) {
  slideTo(overTime.at + by);
}

function slideTo(at, sample = overTime.sample) {
  const last = overTime.steps.length - 1;
  if (last < 0) return;
  overTime.at = Math.min(last, Math.max(0, at));
  overTime.sample = sample;
  const query = new URLSearchParams({ step: overTime.steps[overTime.at].x, ...(sample ? { sample } : {}) });
  clearTimeout(overTime.keeping);
  overTime.keeping = setTimeout(() => history.replaceState(null, "", `${link("task", overTime.key)}?${query}`), 300);
  drawSteps();
}

/** Draw the chosen step, and as many behind it as there is room for; near the end, those before it. */
async function drawSteps() {
  const { steps } = overTime;
  if (!steps.length) {
    fill(overTime.columns, el("p", { class: "dim" }, "no episode of this task has a step of training"));
    return;
  }
  const em = parseFloat(getComputedStyle(document.body).fontSize);
  const room = Math.max(1, Math.min(4, Math.floor(document.getElementById("view").clientWidth / (ACROSS * em))));
  const first = Math.max(0, Math.min(overTime.at, steps.length - room)), shownSteps = steps.slice(first, first + room);
  overTime.slider.value = overTime.at;
  fill(overTime.said, `step ${steps[overTime.at].x}, ${overTime.at + 1} of ${steps.length}`);
  overTime.show?.(steps[overTime.at].x);
  const chosen = shownSteps.map((step) => step.heads[Math.min(overTime.sample, step.heads.length - 1)]);
  overTime.shownIds = [chosen[overTime.at - first], ...chosen].map((at) => overTime.heads.id[at]);
  const turn = overTime.turn = (overTime.turn ?? 0) + 1;
  const episodes = await Promise.all(chosen.map((at) => source.episode(overTime.heads.id[at])));
  if (turn !== overTime.turn) return;
  fill(overTime.columns, shownSteps.map((step, i) => stepColumn(step, chosen[i], episodes[i], first + i === overTime.at)));
}

function stepColumn(step, chosen, episode, isCurrent) {
  const { heads } = overTime;
  const samples = step.heads.length < 2 ? null : el("div", { class: "samples" }, step.heads.map((at, i) =>
    el("button", { class: "chip", "aria-pressed": String(at === chosen), on: { click: () => slideTo(overTime.at, i) } },
      `${{ yes: "✓ ", no: "✗ " }[heads.success[at]] ?? ""}${number(heads.reward[at])}`)));
  return el("section", { class: `card step-column${isCurrent ? " current" : ""}`, "aria-label": `step ${step.x}` },
    el("h2", null, el("a", { href: link("episode", heads.id[chosen]) }, `step ${step.x}`), " ",
      el("span", { class: "dim small" }, `${heads.purpose[chosen]} · reward ${number(heads.reward[chosen])} · ${heads.stop[chosen]}`)),
    samples, episode.cut.map((turn) => turn.messages.map(briefMessage)));
}

function briefMessage(message) {
  return el("div", { class: `message ${message.role}` }, el("div", { class: "role" }, message.name ? `${message.role} ${message.name}` : message.role),
    message.reasoning ? el("div", { class: "text reasoning" }, message.reasoning) : null,
    message.content ? el("div", { class: "text" }, message.content) : null,
    (message.images ?? []).map(picture),
    (message.tool_calls ?? []).map((call) => el("div", { class: "text call" }, `${call.name}(${JSON.stringify(call.arguments)})`)),
    message.tool_error ? el("div", { class: "bad small" }, message.tool_error) : null);
}
