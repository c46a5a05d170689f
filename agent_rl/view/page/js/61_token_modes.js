// What sampled tokens are coloured by: {name, title, missing, shade(at) -> class, legend: [[class, text], ...], note}.
//
// Scales are of one hue (probability, version) or of two that every eye tells apart, blue and orange (advantage, ratio).

const PROBABILITIES = [0.99, 0.9, 0.7, 0.4, 0.1, 0.01];
const RATIOS = [0.02, 0.1, 0.2, 0.5];

/** The modes of a trajectory; `step` chooses among the updates that learned from it, the last one if null. */
function tokenModes(trajectory, step) {
  const record = trajectory.records.find((each) => each.step === step) || trajectory.records.at(-1);
  tokens.record = record;
  const sampled = trajectory.logprobs.length;
  const none = sampled ? null : "no token was sampled: the policy gave all of them";
  const unlearned = none || (record ? null : "no update's records of this episode are here");
  return [sourceMode(), logprobMode(trajectory, none),
    advantageMode(record, unlearned || (record.advantages ? null : "the algorithm has no advantages")),
    ratioMode(record, unlearned || (record.logratios ? null : "the update's log-probabilities are not here")),
    versionMode(trajectory, none)];
}

function sourceMode() {
  return { name: "source", title: "source", shade: () => "own",
    legend: [["own", "sampled by the policy"], ["prompt", "prompt"], ["env", "environment"], ["template", "template"]] };
}

function logprobMode(trajectory, missing) {
  const bounds = PROBABILITIES.map(Math.log);
  return { name: "logprob", title: "log-probability", missing,
    shade: (at) => { const own = trajectory.logprobs[at], level = bounds.findIndex((bound) => own >= bound); return `heat${level < 0 ? bounds.length : level}`; },
    legend: [...PROBABILITIES.map((p, at) => [`heat${at}`, at ? `p ≥ ${p}` : `p ≥ ${p}`]), [`heat${bounds.length}`, "below"]],
    note: "sampled probability p; log-probabilities are rounded to three digits in this page" };
}

function advantageMode(record, missing) {
  if (missing) return { name: "advantage", title: "advantage", missing };
  let largest = 0;
  for (const own of record.advantages) if (Math.abs(own) > largest) largest = Math.abs(own);
  const level = (own) => (!own || Number.isNaN(own) ? 0 : Math.max(1, Math.ceil(4 * Math.abs(own) / largest)));
  return { name: "advantage", title: "advantage",
    shade: (at) => { const own = record.advantages[at]; return Number.isNaN(own) ? "left-out" : diverging(own, level(own)); },
    legend: [["below4", number(-largest)], ["below2", number(-largest / 2)], ["even", "0"], ["above2", `+${number(largest / 2)}`],
      ["above4", `+${number(largest)}`], ["left-out", "not trained on"]],
    note: `advantage in step ${record.step}: blue pushes towards a token, orange away from it` };
}

function ratioMode(record, missing) {
  if (missing) return { name: "ratio", title: "ratio", missing };
  const level = (own) => { const far = RATIOS.findIndex((bound) => Math.abs(Math.expm1(Math.abs(own))) < bound); return far < 0 ? RATIOS.length : far; };
  return { name: "ratio", title: "ratio",
    shade: (at) => { const own = record.logratios[at]; return Number.isNaN(own) ? "left-out" : diverging(own, level(own)); },
    legend: [["below4", "below 1/1.5"], ["below3", "1/1.5 to 1/1.2"], ["below1", "1/1.1 to 1/1.02"], ["even", "1"],
      ["above1", "1.02 to 1.1"], ["above3", "1.2 to 1.5"], ["above4", "above 1.5"]],
    note: `probability before the update of step ${record.step} by that when sampled: blue rose, orange fell` };
}

function versionMode(trajectory, missing) {
  const versions = [...new Set(trajectory.spans.filter((span) => span.from === "policy" && span.version !== null).map((span) => span.version))].sort((a, b) => a - b);
  const level = (version) => (versions.length < 2 ? 2 : 1 + Math.round(5 * versions.indexOf(version) / (versions.length - 1)));
  const shown = versions.length > 6 ? [versions[0], versions[Math.floor(versions.length / 2)], versions.at(-1)] : versions;
  return { name: "version", title: "version", missing: missing || (versions.length ? null : "no versions of the weights are stored"),
    shade: (at) => { const version = spanOf(trajectory, at)?.version; return version === null ? "own" : `age${level(version)}`; },
    legend: shown.map((version) => [`age${level(version)}`, `version ${version}`]), note: "version of the weights that sampled a token" };
}

const diverging = (own, level) => (level === 0 ? "even" : `${own > 0 ? "above" : "below"}${level}`);

/** The span of a sampled token, by its number among the sampled ones. */
function spanOf(trajectory, at) {
  return trajectory.spans.find((span) => span.from === "policy" && span.before <= at && at < span.before + span.stop - span.start);
}

function chooseMode(name) {
  const mode = tokens.modes.find((each) => each.name === name);
  if (!mode) return;
  if (mode.missing) { fill(tokens.bar.querySelector(".note"), `${mode.title}: ${mode.missing}`); return; }
  tokens.mode = mode;
  recolour();
  drawBar();
}

function drawBar() {
  const { episode, mode, modes, number: own, trajectory, record } = tokens;
  const pick = (name) => { chooseMode(name); if (tokens.mode.name === name) history.replaceState(null, "", tokenHash(null)); };
  const buttons = modes.map((each) => el("button", { "aria-pressed": String(each === mode), "aria-disabled": each.missing ? "true" : null, title: each.missing,
    on: { click: () => pick(each.name) } }, each.title));
  const forks = episode.trajectories.map((each, at) => el("option", { value: at, selected: at === own },
    `trajectory ${at}: ${plural(each.count, "token")}${each.fork ? `, ${beganSubAgent(each) ? `a sub-agent of ${each.fork[0]}` : `forked from ${each.fork[0]} at ${number(each.fork[1])}`}` : ""}`));
  const steps = trajectory.records.map((each) => el("option", { value: each.step, selected: each === record }, `update of step ${each.step}`));
  fill(tokens.bar,
    el("div", { class: "segmented", role: "group", "aria-label": "colour by" }, buttons),
    forks.length > 1 && el("select", { "aria-label": "trajectory", on: { change: (event) => chooseTrajectory({ number: Number(event.target.value) }) } }, forks),
    steps.length > 1 && el("select", { "aria-label": "update", on: { change: (event) => chooseTrajectory({ number: own, step: event.target.value }) } }, steps),
    el("div", { class: "legend" }, mode.legend.map(([kind, text]) => el("span", null, el("i", { class: `swatch ${kind}` }), text))),
    el("div", { class: "note small dim" }, mode.note || `${plural(trajectory.count, "token")}, ${number(trajectory.sampled)} sampled`, forkNote(trajectory)));
}

/** A sub-agent's first trajectory shares nothing with its caller's. */
const beganSubAgent = ({ fork: [, position, isDelegated] }) => isDelegated && !position;

function forkNote(trajectory) {
  if (!trajectory.fork) return null;
  return beganSubAgent(trajectory) ? ` · a sub-agent of trajectory ${trajectory.fork[0]}` : ` · its first ${number(trajectory.fork[1])} tokens are those of trajectory ${trajectory.fork[0]}`;
}

/** What the tooltip says of a token: `n` is its place, `at` its number among the sampled ones, null for a given one. */
function tokenFacts(trajectory, n, at) {
  const span = trajectory.spans.find((each) => each.start <= n && n < each.stop), text = trajectory.texts && JSON.stringify(tokenText(trajectory, n));
  const given = [["text", text], ["token", `${n}, id ${trajectory.ids[trajectory.at[n]]}`], ["source", span.from], ["turn", span.turn]];
  return at === null ? given.filter(([, fact]) => fact !== null) : sampledFacts(trajectory, n, at, text, span);
}

function sampledFacts(trajectory, n, at, text, span) {
  const record = tokens.record, logprob = trajectory.logprobs[at];
  const known = (array, read = (own) => own) => (array && !Number.isNaN(array[at]) ? number(read(array[at])) : null);
  const facts = [["text", text], ["token", `${n}, id ${trajectory.ids[trajectory.at[n]]}`],
    ["log-probability", number(logprob)], ["probability", number(Math.exp(logprob))], ["ratio", known(record?.logratios, Math.exp)],
    ["advantage", known(record?.advantages)], ["turn", span.turn], ["version", span.version], ["experts", expertText(trajectory, at)]];
  return facts.filter(([, fact]) => fact !== null && fact !== undefined);
}

function expertText(trajectory, at) {
  if (!trajectory.experts) return null;
  if (!trajectory.routes) return `left out of this page: ${number(trajectory.experts.bytes / 1e6)} MB`;
  const { layers, top_k } = trajectory.experts, rows = [];
  for (let layer = 0; layer < Math.min(layers, 12); layer += 1) {
    const from = (at * layers + layer) * top_k, own = [...trajectory.routes.slice(from, from + top_k)];
    rows.push(own.every((expert) => expert < 0) ? "–" : own.join(" "));
  }
  return rows.join(" | ") + (layers > 12 ? " | …" : "");
}
