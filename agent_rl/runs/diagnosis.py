"""Diagnosis: why a run learns nothing, named with the way out: within three steps, or where it stalls later on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.core.display import plural
from agent_rl.core.episode import Episode, StopReason
from agent_rl.errors import InfrastructureError
from agent_rl.gym.env import Env, ToolEnv
from agent_rl.runs.folder import METRICS, warn
from agent_rl.runs.metrics import read_metrics
from agent_rl.runs.stalls import MEMORY, SOLVED, find_stalls, window_of

STEPS = 3
"""A cause is named once it held in so many steps in a row."""
JUDGE_COST, GROUP_REWARD = "judge cost", "group reward"
"""Causes that are named in their first step: what is spent stays spent, and a method that fails for every group is
broken, not unlucky."""
FAILURES = "failures"
"""The cause that is named last, as a run can learn beside it: of some episodes' failures."""
FEW = 0.05
"""The share of a step's episodes above which their failures are worth a look: what is left is no fair sample."""
MOST = 0.9
"""The share of a step's episodes that makes a cut the run's problem."""
CUTS = {
    StopReason.LENGTH: ("hit the limit of one reply", "raise rollout.max_tokens"),
    StopReason.TOKENS: ("filled the context", "raise budget.tokens and rollout.context"),
    StopReason.SECONDS: ("ran out of the environment's time", "raise budget.seconds, or make reset and step faster"),
    StopReason.TURNS: ("ran out of turns", "raise budget.turns"),
    StopReason.TOOL_CALLS: ("ran out of tool calls", "raise budget.tool_calls"),
    StopReason.ENV_TRUNCATED: ("were truncated by the environment", "raise its own limit, or reward what was reached"),
}
"""Of each way to be cut: what happened, and the way out."""
LIMITS = (StopReason.LENGTH, StopReason.TOKENS, StopReason.SECONDS)
"""Cuts that are warned about even if rewards differ: no episode is meant to end so."""

NO_OTHERS: Mapping[str, str] = MappingProxyType({})


class Diagnosis:
    """Reads each step's episodes and metrics, of either backend, and warns once of each cause."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        samples: int,
        env: type[Env],
        folder: Path,
        say: Callable[[str], object],
        *,
        steps: int = 0,
        names: Mapping[str, str] = NO_OTHERS,
    ) -> None:
        """Begin or resume a run of `samples` episodes a task in a folder, which stores warnings; `say` prints one.

        Its planned steps decide after how many without progress it stalls. `names` replaces parts of warnings, in which
        settings have the embedded backend's names.
        """
        self._run, self._folder, self._say, self._names = (algorithm, samples, env), folder, say, names
        self.episodes: Sequence[Episode] = ()
        """All that were sampled for the step to observe; none if it is of stored ones."""
        rows = (row for row in read_metrics(folder / METRICS) if row["kind"] == "train")
        known = [{name: value for name, value in row.items() if isinstance(value, int | float)} for row in rows]
        self._window = window_of(steps)
        self._steps = known[-MEMORY * self._window :]
        self._named = set[str]()
        self._cause = ""
        self._lost, self._patience = 0, 1  # what never had a score is broken; what had one may get over an outage

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Read a step's metrics and `episodes`; warn once of the first cause that the last steps share.

        If there is none it is a stall, or else the failures of some episodes.

        Returns `diagnosis/CAUSE` = 1 for each cause of this step, and for the stall, to be stored with its metrics.
        """
        causes, last = dict(find_causes(self.episodes, metrics, *self._run)), self._steps[-STEPS + 1 :]
        self._cause = next(iter(causes.values()), "")
        in_a_row = {
            name: f"{STEPS} steps in a row, {text}"
            for name, text in causes.items()
            if len(last) == STEPS - 1 and all(_metric(name) in step for step in last)
        }
        self._steps = [*self._steps, {**metrics, **dict.fromkeys(map(_metric, causes), 1.0)}][-MEMORY * self._window :]
        named = {name: causes[name] for name in (JUDGE_COST, GROUP_REWARD) if name in causes}
        named = named or dict([*in_a_row.items()][:1])
        is_match = len({episode.seat for episode in self.episodes}) > 1  # one player's success is another's failure
        if named.keys() <= {FAILURES} and not is_match:
            named = dict([*find_stalls(self._steps, self._window)][:1]) or named
        for name, text in named.items():
            if name not in self._named:
                self._named.add(name)
                for ours, theirs in self._names.items():
                    text = text.replace(ours, theirs)
                warn(self._folder, text, self._say)
        return dict.fromkeys(map(_metric, [*causes, *named]), 1.0)

    def require_scores(self, hint: str) -> None:
        """Let the step that was observed end a run in which no episode has a score.

        Raises:
            InfrastructureError: naming the cause, and the hint: if none had one in the first step, or in `STEPS` in a
                row since.
        """
        if not self.episodes or any(episode.reward is not None for episode in self.episodes):
            self._lost, self._patience = 0, STEPS
            return
        self._lost += 1
        if self._lost == self._patience:
            raise InfrastructureError(f"{self._cause}; once that is mended, {hint}")


def _metric(cause: str) -> str:
    return f"diagnosis/{cause.replace(' ', '_')}"


def find_causes(
    episodes: Sequence[Episode], metrics: Mapping[str, float], algorithm: AlgorithmConfig, samples: int, env: type[Env]
) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of all that kept a step from learning, the root causes first."""
    scores = [(e.group_id, e.reward) for e in episodes if e.reward is not None]
    norm, lr = (metrics.get(f"train/{name}", metrics.get(f"actor/{name}")) for name in ("grad_norm", "lr"))
    is_only_of_rewards = algorithm.kl.where == "none" and not algorithm.entropy and algorithm.critic.where == "none"
    differ = len(set(scores)) > len({group for group, _ in scores})
    is_learning = differ or bool(norm and (is_only_of_rewards or len({score for _, score in scores}) > 1))
    alive = [e for e in episodes if e.trainable]
    if unpaid := metrics.get("judge/faults/cost"):
        unmade = f"{unpaid:.0f} verdicts of this step were not made, and episodes that lack one have no score"
        way_out = "stop and resume the run, which may then spend as much again, or more with judge.max_cost=N"
        yield JUDGE_COST, f"judge.max_cost is spent: {unmade}: {way_out}"
    yield from _of_failures(episodes)
    yield from _of_scores(alive, env)
    yield from _of_cuts(alive, is_learning=is_learning)
    if scores and not is_learning:
        yield from _of_equal_rewards(alive, samples, env)
    if differ or not episodes:
        yield from _of_update(metrics.get("train/samples"), lr, None if algorithm.critic.warmup_steps else norm)
    reasons = Counter(filter(None, map(_why_unscored, episodes)))
    if FEW * len(episodes) < reasons.total() <= len(episodes) / 2:
        yield FAILURES, _failed(reasons, len(episodes))


def _of_failures(episodes: Sequence[Episode]) -> Iterator[tuple[str, str]]:
    reasons = Counter(_why_unscored(e) for e in episodes if e.error)
    if reasons and not any(e.turns for e in episodes):
        yield "no turns", f"no episode had a turn: {_failed(reasons, len(episodes))}"
    elif 2 * reasons.total() > len(episodes):
        yield "failed", _failed(reasons, len(episodes))


def _why_unscored(episode: Episode) -> str:
    """Return what an episode failed with, or the first of its rewards that counts; "" if nothing failed."""
    if error := episode.error:
        return f"{error.where}: {error.type}: {error.message}"[:300]
    return next((f"reward {r.name}: {r.error}"[:300] for r in episode.rewards if r.error and r.weight), "")


def _failed(reasons: Counter[str], n: int) -> str:
    ((reason, _),) = reasons.most_common(1)
    what = f"{reasons.total()} of {plural(n, 'episode')} failed and trained nothing"
    return f"{what}, most often with {reason}; read one with agent-rl view FOLDER ID"


def _of_scores(episodes: Sequence[Episode], env: type[Env]) -> Iterator[tuple[str, str]]:
    if episodes and not any(r.source != "step" or r.value for e in episodes for r in e.rewards):
        add = f"add an @reward method to {env.__name__}, or return Step(reward=...)"
        solved = "if its steps pay once a task is solved, none was: start from easier tasks or a better model"
        yield "no reward", f"no episode had a reward: {add}; {solved}"
    elif episodes and all(e.reward is None for e in episodes):
        broken = next((r for e in episodes for r in e.rewards if r.source == "group" and r.weight and r.error), None)
        if broken is not None:
            yield GROUP_REWARD, f"group reward '{broken.name}' failed, so that no episode had a score: {broken.error}"
            return
        why = next((r.error for e in episodes for r in e.rewards if r.error), "a component is None")
        yield "unscored", f"no episode had a score ({why}): mend the @reward methods of {env.__name__}"


def _of_cuts(episodes: Sequence[Episode], *, is_learning: bool) -> Iterator[tuple[str, str]]:
    for reason, n in Counter(e.stop_reason for e in episodes).most_common(1):
        if reason in CUTS and n >= MOST * len(episodes) and (not is_learning or reason in LIMITS):
            what, way_out = CUTS[reason]
            yield str(reason), f"{n} of {plural(len(episodes), 'episode')} {what}: {way_out}"


def _of_equal_rewards(episodes: Sequence[Episode], samples: int, env: type[Env]) -> Iterator[tuple[str, str]]:
    """Yield causes of rewards that differ in no group."""
    if samples == 1:
        alone = "rollout.samples=1 gave each task one episode, and the algorithm compares those of a task"
        yield "one sample", f"{alone}: set rollout.samples=8 or so"
        return
    calls = [call for e in episodes for m in e.messages for call in m.tool_calls]
    if issubclass(env, ToolEnv) and all(call.error for call in calls):
        found = f"none of {len(calls)} tool calls could be read" if calls else "no reply held a tool call"
        look = "read one with agent-rl view FOLDER ID --tokens"
        yield "no tool calls", f"{found}: {look}; the model may need another renderer, or a warm start"
    scores = [e.reward for e in episodes if e.reward is not None]
    same = f"all {scores[0]:g}" if min(scores) == max(scores) else f"from {min(scores):g} to {max(scores):g}"
    successes = [e.success for e in episodes if e.success is not None]
    solved = sum(successes) / len(successes) if successes else 0.0
    way_out = "start from easier tasks or a better model, or reward partial results"
    if solved >= SOLVED:
        way_out = f"{solved:.0%} are successes, and harder tasks have more to teach"
    yield "equal rewards", f"the episodes of each task earned the same ({same}), so that advantages are 0: {way_out}"


def _of_update(kept: float | None, lr: float | None, norm: float | None) -> Iterator[tuple[str, str]]:
    """Yield causes of an update that changes nothing although rewards differ."""
    if kept == 0:
        yield "nothing kept", "filters or rejections left no sample to train on: see algorithm.filters"
    elif lr == 0:
        yield "learning rate", "the learning rate was 0: check optimizer.lr, its warm-up and its decay"
    elif norm == 0:
        yield "no gradient", "the gradient was 0 although rewards differed: check the algorithm's masks and corrections"
