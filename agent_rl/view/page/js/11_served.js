// Data of a server, which follows a run: what is new is asked for, and appended to what is known.

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}

const live = { heads: null, metrics: null, version: null, begun: null, callbacks: new Set(), isLost: false };

/** Append columns to columns; a component that one of them lacks is null there. */
function appendColumns(columns, more) {
  const [before, added] = [columns.id.length, more.id.length];
  for (const [name, values] of Object.entries(more)) {
    if (name !== "rewards") for (const value of values) columns[name].push(value);
  }
  for (const name of new Set([...Object.keys(columns.rewards), ...Object.keys(more.rewards)])) {
    const column = columns.rewards[name] ??= Array(before).fill(null);
    for (const value of more.rewards[name] ?? Array(added).fill(null)) column.push(value);
  }
}

/** Ask for what is new, and tell the views; one event at a time. */
async function takeEvent(counts) {
  const old = (await live.heads)?.id.length, { version, begun } = live;
  Object.assign(live, { version: counts.metrics, begun: counts.begun });
  let isNew = false;
  if (live.heads && begun !== null && counts.begun !== begun) {  // a resumed run cut episodes off
    served.episode.forget();
    live.heads = ask("/api/heads?from=0");
    isNew = true;
  } else if (live.heads && counts.heads > old) {
    appendColumns(await live.heads, await ask(`/api/heads?from=${old}`));
    isNew = true;
  }
  if (live.metrics && version !== counts.metrics) {
    live.metrics = ask("/api/metrics");
    isNew = true;
  }
  if (isNew) for (const callback of live.callbacks) await callback();
}

/** Listen once; a connection that ends is made again, by the browser or after a refusal by us. */
function listen() {
  if (live.events) return;
  let last = Promise.resolve();
  live.events = new EventSource("/api/changes");
  live.events.addEventListener("message", ({ data }) => {
    last = last.then(() => takeEvent(JSON.parse(data))).catch((error) => console.warn(String(error)));
  });
  for (const [name, isLost] of [["open", false], ["error", true]]) {
    live.events.addEventListener(name, () => {
      live.isLost = isLost;
      drawTop();
      if (live.events.readyState !== EventSource.CLOSED) return;
      live.events = null;
      setTimeout(listen, 2000);
    });
  }
}

const served = {
  run: remembered(() => ask("/api/run")),
  heads: () => (live.heads ??= ask("/api/heads?from=0")),
  metrics: () => (live.metrics ??= ask("/api/metrics")),
  episode: remembered((id) => ask(`/api/episode/${encodeURIComponent(id)}`)),
  /** The ids of all episodes that fit, by what was said in them, too. */
  select: (query) => ask(`/api/select?${query}`),
  /** Call back when heads or metrics are more; return how to stop it. */
  onchange(callback) {
    live.callbacks.add(callback);
    listen();
    return () => live.callbacks.delete(callback);
  },
};

/** Say in the top row whether a server is there; null for a file. */
function liveState() {
  if (source !== served) return null;
  return el("span", { class: live.isLost ? "live lost" : "live", role: "status" }, live.isLost ? "the server is gone" : "live");
}

/** `run()`, `heads()` (columns of equal length, by name), `episode(id)`, `metrics()` (rows), `onchange(callback)`. */
const source = document.documentElement.dataset.source === "served" ? served : embedded;
