"""Stalls: what goes wrong over many steps, found in a run's metrics, with the way out.

`diagnosis` names what keeps single steps from learning; this module names what only a course shows. Every rule compares
means over windows of steps, so that one odd batch names nothing. Success also depends on which tasks were drawn:
how much it differs from step to step says how much.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType

from agent_rl.core.sandbox_loss import COUNTS_AS

Steps = Sequence[Mapping[str, float]]
"""The metrics of steps, the oldest first."""

WINDOW, PARTS = 10, 20
"""A run stalls if a window is no better than the one before it: of so many steps, or of such a part of a long run's."""
MEMORY = 5
"""Windows that are looked back on: what was lost, or how much was said, before them is no part of what goes on now."""
SHORT = 3
"""Steps of a short window, for what should not wait."""
PROGRESS = 0.02
"""What success has to gain from window to window. Of ten steps of 128 episodes, the gain's standard error is 0.02, and
0.04 if they are of 16 tasks that are solved always or never: where nothing else speaks for a stall, windows are longer
then, up to half of the memory."""
SOLVED = 0.95
"""Above it, no progress is no stall."""
FALL = 0.25
"""A fall of success by this, and by half, is a collapse."""
LUCK = 5.0
"""Standard errors of a fall that luck may bring about: of many short windows, the best is compared with the last."""
FEW_ROWS = 0.25
"""With a smaller share of rows that have a gradient, a batch is mostly wasted."""
MANY_ALIKE = 0.5
"""A share of repeated episodes, or of one answer, from which on the policy no longer explores."""
MOST_MIXED = 0.5
"""A share of groups whose rewards differ from which on exploration is not what lacks, whatever repeats: of two ways
that are taken by chance, eight episodes hold each four times. Measured: 0.8 for 400 steps, and then nearly all solved
within fifty (hops, in benchmarks/unlike.py)."""
CLIPPED = 0.3
"""A share of clipped tokens from which on an update is cut off rather than bounded: papers report up to 0.2."""
GAP = 0.2
"""Nats a token between the policy that sampled and the one that is trained. Measured: 0.02 with int4 weights, 10 of
calls that were written again as text."""
FEW_DECIDE = 0.3
"""An effective sample size of the weights, as a share of the tokens, below which few tokens make the update."""
PAST_SHORT_CUTS: Mapping[str, object] = MappingProxyType(
    {
        "algorithm": "maxrl",
        "rollout.temperature": 1.3,
        "rollout.retry_temperature": 2,
        "eval.temperature": 1,
        "optimizer.weight_decay": 0.1,
    }
)
"""What got all runs of five environments past their short cuts; benchmarks/unlike.py measures it."""


def patience(has: Mapping[str, object] = MappingProxyType({}), refused: Collection[str] = ()) -> str:
    """Return what comes past short cuts, but for the settings that a run has, or can't have."""
    wanted = {name: value for name, value in PAST_SHORT_CUTS.items() if name not in refused}
    lacks = [f"{name}={value}" for name, value in wanted.items() if has.get(name) != value]
    return f"hundreds of steps{' with ' if lacks else ''}{', '.join(lacks)}"


PATIENT = patience()
DRIFTED = '"algorithm.negative_mask={name: opsm, delta: 0.01}"'
"""The setting that leaves out what the policy has moved away from since it was sampled; see benchmarks/staleness.py."""
LOST = 0.02
"""A share of episodes that lose their sandbox from which on it is worth a look."""


def window_of(planned: int) -> int:
    """Return the steps of a window of a run of so many steps: who plans hundreds is not in a hurry."""
    return max(WINDOW, planned // PARTS)


def find_stalls(steps: Steps, window: int = WINDOW) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of what is wrong with a run in its last steps, the most urgent first."""
    steps = steps[-MEMORY * window :]
    yield from _collapse(steps)
    yield from _lost_sandboxes(steps, window)
    yield from _mismatch(steps)
    yield from _extremes(steps)
    yield from _loophole(steps, window)
    yield from _length(steps, window)
    yield from _plateau(steps, window)


def _collapse(steps: Steps) -> Iterator[tuple[str, str]]:
    """Success that was there and is gone."""
    now = _mean(steps[-SHORT:], "rollout/success")
    if now is None or len(steps) < 2 * SHORT:
        return
    windows = ((_mean(steps[at : at + SHORT], "rollout/success"), at) for at in range(len(steps) - SHORT))
    best, at = max(((mean, at) for mean, at in windows if mean is not None), default=(0.0, 0))
    if best - now < max(FALL, LUCK * _noise(steps) * math.sqrt(2 / SHORT)) or now > best / 2:
        return
    then, norm = (_mean(some, "train/grad_norm") for some in (steps[at : at + SHORT], steps[-SHORT:]))
    grown = (
        f", while the gradient's norm went from {then:.2g} to {norm:.2g}" if then and norm and norm > 2 * then else ""
    )
    back = len(steps) - at - SHORT
    yield (
        "collapse",
        f"success fell from {best:.0%} to {now:.0%} within {back} steps{grown}: continue from the weights that did "
        "best in evaluation (start_from=) with a lower optimizer.lr, or hold the policy with algorithm.kl",
    )


def _mismatch(steps: Steps) -> Iterator[tuple[str, str]]:
    """Training that scores the tokens as another policy's."""
    gap = _mean(steps[-SHORT:], "mismatch/gap_mean", "train/rollout_gap")
    if gap is None or gap <= GAP or len(steps) < SHORT or "perf/read_s" in steps[-1]:  # stored: of any
        return
    fresh = _mean(steps[-SHORT:], "policy_version/staleness_0")
    way_out = (
        "check the engine's weights and formats, the chat template and the temperature; algorithm.proximal=recompute "
        "with algorithm.weight=token-tis bears some"
    )
    if fresh is not None and fresh < 1 / 2:
        way_out = (
            "most tokens are of earlier weights, so lower async.max_staleness or the learning rate; "
            f"{DRIFTED} bears some"
        )
    yield "mismatch", f"training and rollout differ by {gap:.2g} nats a token: {way_out}"


def _lost_sandboxes(steps: Steps, window: int) -> Iterator[tuple[str, str]]:
    """More and more sandboxes that are lost, by the policy or by the infrastructure."""
    if len(steps) < SHORT:
        return
    for counts_as, (name, way_out) in _LOSSES.items():
        causes = [cause for cause, each in COUNTS_AS.items() if each == counts_as]
        rates = [{cause: step.get(f"rollout/sandbox_lost/{cause}", 0.0) for cause in causes} for step in steps]
        totals = [sum(rate.values()) for rate in rates]
        before, now = totals[-SHORT - window : -SHORT], sum(totals[-SHORT:]) / SHORT
        if now > max(LOST, 2 * sum(before) / max(1, len(before))):
            most = max(causes, key=lambda cause: sum(rate[cause] for rate in rates[-SHORT:]))
            yield name, f"{now:.1%} of the episodes lost their sandbox, most often by {most}: {way_out}"


_LOSSES = {
    "failure": (
        "sandboxes ended",
        "the policy's code ends it, which counts as a failure; read such episodes (agent-rl view RUN --where "
        "ending=sandbox_ended), raise the limits if honest code meets them",
    ),
    "infrastructure": (
        "sandboxes lost",
        "the infrastructure's fault, so that these trained nothing; see what the host lacks (agent-rl sandbox doctor)",
    ),
}
"""Of losses that count as each: the warning's name, and the way out."""


def _extremes(steps: Steps) -> Iterator[tuple[str, str]]:
    """Updates that clip most of what they are made of, or that few tokens make."""
    last = steps[-SHORT:]
    clipped = _mean(last, "train/clip_fraction")
    decide = _mean(last, "mismatch/weight_eff_sample_size", "rollout_corr/rollout_is_eff_sample_size")
    if len(steps) >= SHORT and clipped is not None and clipped > CLIPPED:
        way_out = "lower optimizer.lr, take fewer updates a batch, or sample fresher episodes"
        yield "clipped", f"the clip cut off or capped {clipped:.0%} of the tokens: {way_out}"
    if len(steps) >= SHORT and decide is not None and decide < FEW_DECIDE:
        way_out = "lower the cap of algorithm.weight, or mend what makes the policies differ (mismatch/...)"
        yield "weights", f"weights old/mu leave an effective {decide:.0%} of the tokens: {way_out}"


def _loophole(steps: Steps, window: int) -> Iterator[tuple[str, str]]:
    """A reward that rises while success falls."""
    if len(steps) < 2 * window:
        return
    gained, lost = (_gain(steps, window, f"rollout/{name}") for name in ("reward", "success"))
    if gained is not None and lost is not None and gained > 0 and lost < -5 * PROGRESS:
        yield (
            "loophole",
            f"reward rose by {gained:.2g} while success fell by {-lost:.0%} in {window} steps: the policy found what "
            "pays without solving the task; read such episodes (agent-rl episodes RUN --sort reward), mend the reward",
        )


def _length(steps: Steps, window: int) -> Iterator[tuple[str, str]]:
    """Replies that grow and earn nothing by it."""
    if len(steps) < 2 * window:
        return
    first, now = (_mean(some, "rollout/tokens") for some in (steps[:SHORT], steps[-SHORT:]))
    before, after = (_mean(some, "rollout/success") for some in (steps[:window], steps[-window:]))
    if first and now and before is not None and after is not None and now > 2 * first and after < before + PROGRESS:
        way_out = "shape the length (algorithm.shaping=soft-overlong), or lower rollout.max_tokens"
        yield "length", f"episodes grew from {first:.0f} to {now:.0f} sampled tokens and earn no more: {way_out}"


def _plateau(steps: Steps, window: int) -> Iterator[tuple[str, str]]:
    """No progress, with the most likely reason."""
    last = steps[-window:]
    gain, success = _gain(steps, window), _mean(last, "rollout/success")
    if len(steps) < 2 * window or gain is None or success is None or success >= SOLVED:
        return
    reason = _reason(last)
    name, why = reason or ("plateau", f", although {_differ(last)}")
    level = window if reason and gain < PROGRESS else _level(steps, window)
    if level:
        yield name, f"{level} steps without progress at {success:.0%} success{why}"


def _reason(steps: Steps) -> tuple[str, str] | None:
    """Return what there is little to learn from, and what to do about it."""
    same, repeated, mixed = (_mean(steps, f"rollout/{name}") for name in ("same_answer", "repeated", "groups_mixed"))
    with_gradient, entropy = (_mean(steps, name) for name in ("train/with_gradient", "train/entropy"))
    share = with_gradient if with_gradient is not None else mixed
    alike = ""
    if repeated is not None and repeated > MANY_ALIKE and (mixed is None or mixed < MOST_MIXED):
        unsure = "" if entropy is None else f" (entropy {entropy:.2g} nats)"
        more = f"{PATIENT} came past such points, from the start on; or raise algorithm.entropy, or clip_high_eps"
        alike = f"{repeated:.0%} of the episodes repeat another of their task{unsure}; {more}"
    if same is not None and same > MANY_ALIKE:
        floors = "agent-rl check ENV shows what constant answers earn, harder or balanced tasks make them pay less"
        also = f"; and {alike}" if alike else ""
        return "one answer", f": {same:.0%} of the episodes end with the same answer; {floors}{also}"
    if alike:
        return "no exploration", f": {alike}"
    if share is not None and share < FEW_ROWS:
        return "few gradients", f": {share:.0%} of the rows have a gradient; {_of_groups(steps)}"
    return None


def _differ(steps: Steps) -> str:
    """Say what there is to learn from, and what to do where it is not learned."""
    mixed = _mean(steps, "rollout/groups_mixed")
    tune = "try another optimizer.lr, more rollout.groups, and read episodes of both kinds (agent-rl stats RUN)"
    if mixed is None or mixed < MOST_MIXED:
        return f"groups differ and have gradients: {tune}"
    tried = f"{mixed:.0%} of the groups have episodes of different rewards, so that what pays is tried"
    return f"{tried}: {PATIENT} came past such points, often at once; or {tune}"


def _level(steps: Steps, window: int) -> int:
    """Return the steps of a window in which success made no progress, or 0: longer, the more it differs by step."""
    noise = _noise(steps)
    window = max(window, min(MEMORY * window // 2, math.ceil(4 * (noise / PROGRESS) ** 2)))
    gain = _gain(steps, window)
    if len(steps) < 2 * window or gain is None:
        return 0
    beyond_luck = min(PROGRESS, 2 * PROGRESS - noise * math.sqrt(2 / window))  # which may hide progress
    return window if gain < beyond_luck else 0


def _of_groups(steps: Steps) -> str:
    """Say where the groups are that don't differ, and what to do about it."""
    solved, unsolved = (_mean(steps, f"rollout/groups_{name}") or 0.0 for name in ("solved", "unsolved"))
    found = f"{solved:.0%} of the groups are solved and {unsolved:.0%} are not"
    if unsolved > solved:
        return f"{found}: raise rollout.samples, reward partial results, or mix in easier tasks"
    way_out = "choose harder tasks, fill batches with groups that differ (algorithm=dapo), or let tasks count more the"
    return f"{found}: {way_out} fewer solve them, from the start on ({PATIENT})"


def _gain(steps: Steps, window: int, name: str = "rollout/success") -> float | None:
    """Return what the last window has more of a metric than the one before it."""
    now, before = (_mean(some, name) for some in (steps[-window:], steps[-2 * window : -window]))
    return None if now is None or before is None else now - before


def _noise(steps: Steps) -> float:
    """Return the standard deviation of a step's success about its course: by second differences, 0 for a line.

    By their median, as a collapse is no noise.
    """
    values = [x for step in steps if (x := _value(step, "rollout/success")) is not None and math.isfinite(x)]
    moves = [after - before for before, after in pairwise(values)]
    bends = [abs(after - before) for before, after in pairwise(moves)]
    return median(bends) / (0.6745 * math.sqrt(6)) if bends else 0.0


def _mean(steps: Steps, *names: str) -> float | None:
    """Return the mean of the first of these metrics that half of the steps have; verl's names are tried, too."""
    for name in names:
        here = (value for step in steps if (value := _value(step, name)) is not None)
        found = [value for value in here if math.isfinite(value)]
        if found and 2 * len(found) >= len(steps):
            return sum(found) / len(found)
    return None


def _value(step: Mapping[str, float], name: str) -> float | None:
    short = name.removeprefix("train/")
    on_verl = () if short == name else (f"actor/agent_rl/{short}", f"actor/{short}")
    return next((float(value) for each in (name, *on_verl) if (value := step.get(each)) is not None), None)
