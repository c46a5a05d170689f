"""The cost of training on text: GRPO on the sampled ids, and on the ids of re-rendered tool calls.

    python benchmarks/retokenisation.py [--seeds 0 1 2] [--steps 40] [--workers 2] [--figure FILE.svg] [key=value ...]

Both arms sample alike, token ids in and out; only what is learned from differs. *Sampled* trains on the engine's own
ids. *Re-rendered* trains on what is left after a round trip through an OpenAI-style server: each complete reply is
parsed, its calls are written with `json.dumps`, and the text is encoded again: `{"name": "f", ...}` where the policy
sampled `{"name":"f",...}`. A reply that can't be parsed stays as it was sampled, as does all that the environment said.

Nothing else differs: the warm start (that of `benchmarks/algorithms.py`), seeds and settings are the same, `old` is
recomputed on the ids that are trained on, as text-based pipelines do, so that ratios and clipping look healthy in both
arms. mu has no number for a token that was not sampled: the total of a changed reply is spread evenly over its new
tokens. Training doesn't use it, and the gap to it says how far the data is from the policy. Finished runs are taken as
they are; for other settings, remove their folders in runs/retokenisation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree

import torch
from algorithms import train
from transformers.utils import logging as hf_logging

from agent_rl.algorithms import Algorithm, Experience
from agent_rl.backends.embedded.actor import Actor, load_actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import load_config
from agent_rl.core.episode import Episode, EpisodeGroup
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.gym.registry import spec
from agent_rl.rendering.hermes import CLOSE, OPEN
from agent_rl.runs.metrics import MetricsFile, Row, read_metrics

OUT = Path("runs") / "retokenisation"
ARMS = {"sampled": "the sampled ids", "re-rendered": "calls through json.dumps"}
GAP, CALLS, CHANGED = "mismatch/gap_mean", "rollout/tool_calls", "retokenisation/changed_turns"
LOST = 0.3
"""How far the re-rendered arm must end below the other one for the effect to be called shown."""


def rerendered(reply: Sequence[int], actor: Actor) -> list[int]:
    """Return a reply's ids after a round trip through parsed calls and text; as they are if it can't be parsed."""
    message = actor.renderer.parse(reply)
    if not reply or reply[-1] not in actor.renderer.stop_ids or any(c.error for c in message.tool_calls):
        return list(reply)
    calls = [json.dumps({"name": c.name, "arguments": dict(c.arguments)}) for c in message.tool_calls]
    text = message.content + "".join(f"{OPEN}{call}{CLOSE}" for call in calls)
    return [*actor.tokenizer.encode(text, add_special_tokens=False), reply[-1]]


def retold(trajectory: Trajectory, actor: Actor) -> Trajectory:
    """Return the trajectory with re-rendered replies; the spans between them stay."""
    result = Trajectory(trajectory.forked_from)
    for span in trajectory.spans:
        ids = trajectory.token_ids[span.start : span.stop].tolist()
        if span.source is not Source.POLICY or span.policy_version is None:
            result.append(ids, span.source, span.turn)
            continue
        new, mu = rerendered(ids, actor), trajectory.logprobs[span.start : span.stop].tolist()
        if new != ids:
            mu = [sum(mu) / len(new)] * len(new)
        versions = (span.policy_version,) * len(new)
        result.append_completion(Completion(tuple(new), tuple(mu), FinishReason.STOP, versions), span.turn)
    return result


@dataclass(frozen=True)
class TextAlgorithm(Algorithm):
    """An algorithm that learns from re-rendered episodes."""

    actor: Actor

    def experience(self, groups: Sequence[EpisodeGroup]) -> Experience:
        """Re-render what was sampled, then continue as `Algorithm` does."""
        return Algorithm.experience(self, [replace(g, episodes=tuple(map(self._retold, g.episodes))) for g in groups])

    def _retold(self, episode: Episode) -> Episode:
        return replace(episode, trajectories=tuple(retold(t, self.actor) for t in episode.trajectories))


def changed_turns(episodes: Sequence[Episode], actor: Actor) -> float:
    """Return the share of replies whose ids a round trip changes."""
    trajectories = [t for e in episodes for t in e.trajectories]
    replies = [
        t.token_ids[s.start : s.stop].tolist() for t in trajectories for s in t.spans if s.source is Source.POLICY
    ]
    return statistics.fmean(reply != rerendered(reply, actor) for reply in replies)


def run(arm: str, seed: int, start: Path, overrides: list[str]) -> list[Row]:
    """Train one arm and return its metrics; a finished run's are read."""
    folder = OUT / f"{arm}-{seed}"
    rows = read_metrics(folder / "metrics.jsonl")
    if any(row["kind"] == "eval" and row["sampling"] == "greedy" for row in rows):
        return rows
    rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chosen = ["algorithm=grpo", "algorithm.proximal=recompute", f"start_from={start / 'checkpoint'}", f"seed={seed}"]
    config = load_config("backend/embedded", TrainConfig, [*chosen, *overrides])
    torch.set_num_threads(config.threads or 1)
    hf_logging.disable_progress_bar()
    env = spec(config.env)
    actor = load_actor(start / "checkpoint", slots=config.rollout.slots, context=config.context(env.budget.tokens))
    trainer = Trainer(env, actor, config)
    if arm == "re-rendered":
        trainer.algorithm = TextAlgorithm(config.algorithm, actor)
    with MetricsFile(folder) as log:
        while trainer.step < config.steps:
            result = trainer.train_step()
            log.write("train", trainer.step, result.metrics | {CHANGED: changed_turns(result.episodes, actor)})
        tasks = env.tasks.distinct(config.eval.split, config.eval.n)
        for name, temperature in {"sampled": config.rollout.temperature, "greedy": 0.0}.items():
            params = actor.params(temperature, config.rollout.max_tokens)
            evaluation, _ = trainer.evaluate(tasks, params, config.eval.split, name)
            log.write("eval", trainer.step, evaluation.row(config.eval.split, name))
    print(f"finished {arm}, seed {seed}", file=sys.stderr, flush=True)
    return read_metrics(folder / "metrics.jsonl")


def main() -> int:
    """Train both arms, print a Markdown table, draw; return 1 unless every seed shows the effect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    common = ["eval.n=256", "eval.every=0", "threads=1", *options.overrides]
    jobs = [(arm, seed) for seed in options.seeds for arm in ARMS]
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        starts = pool.map(train, ["warm"] * len(options.seeds), options.seeds, [["steps=0", *common]] * len(jobs))
        warm = dict(zip(options.seeds, starts, strict=True))
        settings = [f"steps={options.steps}", *common]
        runs = pool.map(run, *zip(*((arm, seed, warm[seed], settings) for arm, seed in jobs), strict=True))
        results = dict(zip(jobs, runs, strict=True))
    print("| trained on | seed | success before | after, sampled | after, greedy | replies changed | gap | calls |")
    print("|---|---|---|---|---|---|---|---|")
    ends = {job: report(*job, rows, warm[job[1]]) for job, rows in results.items()}
    if options.figure:
        draw(results, options.figure)
    return 0 if all(ends["sampled", s] - ends["re-rendered", s] >= LOST for s in options.seeds) else 1


def report(arm: str, seed: int, rows: list[Row], warm: Path) -> float:
    """Print a run as a row of a Markdown table; return its success at the end, sampled."""
    before = json.loads((warm / "summary.json").read_text())["eval"]["before"]
    after = {str(r["sampling"]): float(str(r["success"])) for r in rows if r["kind"] == "eval"}
    changed, gap, calls = (curve(rows, name) for name in (CHANGED, GAP, CALLS))
    print(
        f"| {ARMS[arm]} | {seed} | {before:.1%} | {after['sampled']:.1%} | {after['greedy']:.1%} "
        f"| {changed[0]:.0%}, then {changed[-1]:.0%} | {gap[0]:.1g} nats | {calls[0]:.1f}, then {calls[-1]:.1f} |"
    )
    return after["sampled"]


def curve(rows: list[Row], name: str) -> list[float]:
    return [float(str(row[name])) for row in rows if row["kind"] == "train" and row.get(name) is not None]


def draw(results: dict[tuple[str, int], list[Row]], figure: Path) -> None:
    """Draw success, and the gap between mu and what is trained on, over the steps."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "agent_rl"
    _, (success, gap) = plt.subplots(1, 2, figsize=(11, 3.6))
    for (arm, seed), rows in results.items():
        colour, label = f"C{list(ARMS).index(arm)}", ARMS[arm] if seed == min(s for _, s in results) else None
        for panel, name in ((success, "rollout/success"), (gap, GAP)):
            values = curve(rows, name)
            panel.plot(range(1, len(values) + 1), values, colour, label=label)
    success.set(title="success of training rollouts", xlabel="GRPO step", ylim=(0, 1.02))
    gap.set_yscale("log")
    gap.set(title="mean |log p(trained) - log p(sampled)|, nats per token", xlabel="GRPO step")
    success.legend(title="trained on")
    plt.tight_layout()
    plt.savefig(figure, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
