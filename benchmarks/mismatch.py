"""Effect of low-precision rollouts on the training of a mixture of experts, and its remedies; see BENCHMARKS.md.

    python benchmarks/mismatch.py [key=value ...] [--formats int4 ...] [--treatments none tis r3 ...]
                                  [--presets grpo gspo ...] [--seeds 0 1 2]

One warm start a seed, in float32. From it every treatment trains on calculator-v0, with episodes sampled from weights
that are rounded to the format (a simulation, see agent_rl.engines.embedded.quantization) and gradients in float32.
Treatments are settings on top of grpo; presets train as they are, with what `proximal: auto` decides, and each in
float32, too. Tables: the gap at the start, with and without replayed routes on the very same episodes (`--no-gaps`
leaves it out); what training came to, evaluated with the float32 weights and with the rounded ones; and for presets
the share of what their own float32 run of the same seed reached. A finished run is taken as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from algorithms import train
from transformers.utils import logging as hf_logging

from agent_rl.algorithms import Experience, Rows, ScoredRows
from agent_rl.backends.embedded.actor import Actor, load_actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.scoring import score_rows
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import choices, load_config
from agent_rl.core.episode import group_episodes
from agent_rl.engines.base import WeightFormat
from agent_rl.gym.registry import spec
from agent_rl.moe.balance import RouteLog
from agent_rl.runs.metrics import Row, read_metrics

OUT = Path("runs") / "mismatch"
FORMATS = ["float32", "bfloat16", "float8", "int4"]
ENV = "calculator-v0"
COMMON = [f"env={ENV}", "model=tiny_moe", "threads=1", "eval.n=256", "eval.every=0"]
COMMON += ["rollout.groups=8", "rollout.temperature=1"]
WARM = ["steps=0", "warm_start.demonstrations=3000", "warm_start.clone_steps=200"]
TREATMENTS = {
    "bypass": ["algorithm.proximal=rollout"],
    "bypass+r3": ["algorithm.proximal=rollout", "algorithm.routing.replay=R3"],
    "none": ["algorithm.proximal=recompute"],
    "tis": ["algorithm.proximal=recompute", "algorithm.weight=token-tis"],
    "icepop": ["algorithm.proximal=recompute", "algorithm.weight=icepop"],
    "mis": ["algorithm.proximal=recompute", "algorithm.rejection=sequence"],
    "r3": ["algorithm.proximal=recompute", "algorithm.routing.replay=R3"],
    "r3+tis": ["algorithm.proximal=recompute", "algorithm.weight=token-tis", "algorithm.routing.replay=R3"],
}
"""Settings on top of grpo; bypass takes mu for old, the others recompute old."""
STANDS = 0.8
"""A preset stands in a format where it reaches this share of its float32 run."""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""The 97.5 % quantile of Student's distribution, for the mean of so many values."""


def main() -> None:
    """Train the missing runs, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--treatments", nargs="*", choices=TREATMENTS, default=list(TREATMENTS))
    parser.add_argument("--presets", nargs="*", choices=choices("algorithm"), default=[])
    parser.add_argument("--no-gaps", action="store_true")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if len(options.seeds) > max(STUDENT):
        parser.error(
            f"--seeds takes at most {max(STUDENT)}, for which STUDENT has quantiles; these are {len(options.seeds)}"
        )
    hf_logging.disable_progress_bar()
    common = [*COMMON, *options.overrides]
    warm = {seed: train("warm", seed, [*WARM, *common], OUT) for seed in options.seeds}
    if not options.no_gaps:
        print_gaps([f for f in options.formats if f != "float32"], list(warm.values()))
    treatments = {f: options.treatments if f != "float32" else ["bypass"] * bool(options.treatments) for f in FORMATS}
    wanted = [(f, name) for f in options.formats for name in (*treatments[f], *options.presets)]
    runs: dict[tuple[str, str], list[Path]] = {chosen: [] for chosen in wanted}
    for seed in options.seeds:  # a whole comparison first, the next seed afterwards
        for weights, treatment in wanted:
            start = [f"start_from={warm[seed] / 'checkpoint'}", f"steps={options.steps}", f"rollout.weights={weights}"]
            own = TREATMENTS.get(treatment)
            chosen = [f"algorithm={treatment}"] if own is None else ["algorithm=grpo", *own]
            folder = train(f"{weights}-{treatment}", seed, [*chosen, *start, *common], OUT)
            runs[weights, treatment].append(folder)
    print_results(runs)
    print_standing(runs, options.presets)
    if options.figure:
        draw(runs, options.figure)


def print_gaps(formats: Sequence[WeightFormat], warm: Sequence[Path]) -> None:
    """Print the gap between rollout and training at the start, a number a seed."""
    entropies = [probe(load(folder, "float32"))["routing/entropy"] for folder in warm]
    print(f"Router entropy after the warm start, over log(experts): {' / '.join(f'{e:.2f}' for e in entropies)}\n")
    print(
        "| rollout weights | flipped tokens | mean gap | with R3 | at flipped tokens | with R3 | elsewhere | with R3 |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for weights in formats:
        probes = [probe(load(folder, weights)) for folder in warm]
        cells = [" / ".join(f"{p['flipped']:.1%}" for p in probes)]
        for where in ("all", "at_flipped", "elsewhere"):
            cells += [" / ".join(f"{p[f'{kind}_{where}']:.4f}" for p in probes) for kind in ("plain", "replayed")]
        print(f"| {weights} | {' | '.join(cells)} |", flush=True)
    print()


def load(folder: Path, weights: WeightFormat) -> Actor:
    """Load a run's last checkpoint with an engine of the given weights."""
    return load_actor(folder / "checkpoint", context=settings().context(spec(ENV).budget.tokens), weights=weights)


def settings() -> TrainConfig:
    """Return the settings shared by all runs."""
    return load_config("backend/embedded", TrainConfig, COMMON)


def probe(actor: Actor) -> dict[str, float]:
    """Sample 128 episodes and score them twice, with and without their routes replayed."""
    trainer = Trainer(spec(ENV), actor, settings())
    _, episodes = trainer.evaluate(spec(ENV).tasks.distinct("dev", 128), trainer.rollouts.params_of(0), "dev", "probe")
    batch = Experience.of(group_episodes(episodes)).rows
    routes = batch.routed_experts
    if routes is None:
        raise SystemExit("the probe is about a mixture of experts: model=tiny_moe")
    plain, log = score(actor, batch, None)
    replayed, _ = score(actor, batch, routes)
    mask, agreement = batch.loss_mask, ScoredRows(batch, plain, old_experts=log.own).agreement
    if agreement is None:
        raise SystemExit("the training forward reported no routes")
    flipped = agreement.tokens[mask] < 1
    found = log.metrics() | {"flipped": float(flipped.double().mean())}
    for kind, scores in (("plain", plain), ("replayed", replayed)):
        gap = (scores - batch.rollout_logprobs)[mask].abs()
        found |= {f"{kind}_all": float(gap.mean())}
        found |= {f"{kind}_at_flipped": float(gap[flipped].mean()), f"{kind}_elsewhere": float(gap[~flipped].mean())}
    return found


def score(actor: Actor, batch: Rows, given: torch.Tensor | None) -> tuple[torch.Tensor, RouteLog]:
    """Return the log-probabilities of a batch in the training forward, `[N]`, and its routes."""
    log = RouteLog(len(batch.token_ids))
    config = settings()
    how = (config.rollout.temperature, config.precision, config.forward_tokens)
    (logprobs,) = score_rows(actor.model, batch, ["logprobs"], *how, torch.arange(len(batch)), given=given, log=log)
    return logprobs, log


def print_results(runs: dict[tuple[str, str], list[Path]]) -> None:
    """Print the results of every treatment, one number per seed.

    Gaps (of theta in the update, with replayed routes where there are any) and flips are means over all steps.
    """
    print(
        "| rollout weights | treatment | success, float32 weights | mean (95 %) | success, rollout weights | gap "
        "| flipped tokens |\n|---|---|---|---|---|---|---|"
    )
    for (weights, treatment), folders in runs.items():
        rows = [[r for r in read_metrics(f / "metrics.jsonl") if r["kind"] == "train"] for f in folders]
        served = [json.loads((f / "summary.json").read_text())["eval"]["after"] for f in folders]
        flips = [mean(run, "routing/flipped_tokens") for run in rows]
        reached = [float32_success(folder) for folder in folders]
        cells = [
            " / ".join(f"{success:.1%}" for success in reached),
            interval(reached),
            " / ".join(f"{success:.1%}" for success in served),
            " / ".join(f"{mean(run, 'train/rollout_gap'):.4f}" for run in rows),
            " / ".join("unknown" if math.isnan(share) else f"{share:.1%}" for share in flips),
        ]
        print(f"| {weights} | {treatment} | {' | '.join(cells)} |", flush=True)


def print_standing(runs: dict[tuple[str, str], list[Path]], presets: Sequence[str]) -> None:
    """Print what share of its float32 run's success each preset reached in each format, a number a seed."""
    shares = {
        (preset, weights): [
            float32_success(one) / float32_success(whole)
            for one, whole in zip(folders, runs["float32", preset], strict=True)
        ]
        for (weights, preset), folders in runs.items()
        if preset in presets and weights != "float32" and ("float32", preset) in runs
    }
    if shares:
        print(
            f"\n| preset | rollout weights | share of its float32 run | mean (95 %) | lowest, at least {STANDS:.0%} |"
        )
        print("|---|---|---|---|---|")
    for (preset, weights), found in shares.items():
        verdict = "stands" if min(found) >= STANDS else "**falls**"
        each = " / ".join(f"{x:.0%}" for x in found)
        print(f"| {preset} | {weights} | {each} | {interval(found)} | {verdict} |", flush=True)


def interval(values: Sequence[float]) -> str:
    """Return the mean over seeds with Student's 95 % interval, of up to eight seeds."""
    middle, n = statistics.fmean(values), len(values)
    if n < 2:
        return f"{middle:.1%}"
    half = STUDENT[n] * statistics.stdev(values) / math.sqrt(n)
    return f"{middle:.1%} ({middle - half:.1%} to {middle + half:.1%})"


def mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a metric over the steps that have it."""
    values = [float(str(row[name])) for row in rows if name in row]
    return statistics.fmean(values) if values else float("nan")


def float32_success(folder: Path) -> float:
    """Evaluate a run's last checkpoint, sampled, with its float32 weights; once."""
    known = folder / "float32.json"
    if not known.exists():
        config = settings()
        trainer = Trainer(spec(ENV), load(folder, "float32"), config)
        tasks = spec(ENV).tasks.distinct(config.eval.split, config.eval.n)
        params = trainer.actor.params(1.0, config.rollout.max_tokens)
        evaluation, _ = trainer.evaluate(tasks, params, settings().eval.split, "float32")
        known.write_text(json.dumps({"success": evaluation.success.value}))
    return float(json.loads(known.read_text())["success"])


def draw(runs: dict[tuple[str, str], list[Path]], figure: Path) -> None:
    """Draw the success of training rollouts, averaged over five steps: a panel a format, thin lines the seeds."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "agent_rl"
    formats = sorted({weights for weights, _ in runs if weights != "float32"}, key=[w for w, _ in runs].index)
    _, axes = plt.subplots(1, len(formats), figsize=(7.5 * len(formats), 4), sharey=True, squeeze=False)
    for panel, weights in zip(axes[0], formats, strict=True):
        shown = [key for key in runs if key[0] in (weights, "float32")]
        for number, key in enumerate(shown):
            curves = [smooth(folder) for folder in runs[key]]
            for curve in curves:
                panel.plot(curve, color=f"C{number}", lw=0.5, alpha=0.5)
            label = f"{key[1]}, {key[0]}" if key[0] == "float32" else key[1]
            panel.plot([statistics.fmean(x) for x in zip(*curves, strict=True)], color=f"C{number}", label=label)
        panel.set_title(f"{ENV}, MoE, {weights} rollout: success of rollouts")
        panel.set_xlabel("GRPO step")
        panel.set_ylim(0, 1.02)
        panel.legend(bbox_to_anchor=(1, 1), loc="upper left", frameon=False)
    plt.tight_layout()
    plt.savefig(figure, metadata={"Date": None})


def smooth(folder: Path, width: int = 5) -> list[float]:
    """Return the success of a run's training rollouts, each the mean of the last five steps."""
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    values = [float(str(r["rollout/success"])) for r in rows]
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main()
