"""A recorded episode beside its replay: the opening, turn by turn, the rewards, the ending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from agent_rl.core.episode import Episode, Outcome, Reward, StepRecord, StopReason
from agent_rl.core.messages import Message, ToolErrorKind
from agent_rl.errors import CheckpointError, ConfigError, InfrastructureError, RegistryError
from agent_rl.replay.result import SAME, Result, Status, VerifiedEpisode, compare, differs, first, unverified
from agent_rl.replay.run import Replayed

_FIELDS = ("role", "content", "tool_call_id", "name", "tool_error", "reasoning", "tool_calls", "parts")
_MISSING = (InfrastructureError, ConfigError, RegistryError, CheckpointError, ImportError, TimeoutError)
"""What fails because of this machine, not because of the episode."""
_BEFORE = ("make", "reset", "replay")
"""The stages after which nothing is known, if one of them fails."""
_SOURCES = ("env", "step", "group", "judge")


def compare_episode(replayed: Replayed, group: dict[str, Reward] | Result) -> VerifiedEpisode:
    """Return what is the same in an episode and its replay.

    Args:
        replayed: which has been played.
        group: the episode's `@group_reward`s, computed again, by name; or why they are not known.
    """
    record = replayed.record
    recorded = record.episode
    opening = _opening(replayed)
    is_open = _broken(replayed, *_BEFORE).status is Status.SAME
    turns = tuple(_turns(replayed)) if is_open else tuple(unverified("the replay did not open") for _ in recorded.steps)
    found = VerifiedEpisode(
        recorded.id, recorded.env, opening, turns, _rewards(replayed, group), _ending(replayed, turns)
    )
    if not replayed.spec.nondeterministic:
        return found
    return replace(
        found,
        opening=_excused(found.opening),
        turns=tuple(map(_excused, found.turns)),
        rewards=_excused(found.rewards),
        ending=_excused(found.ending),
    )


def _excused(result: Result) -> Result:
    if result.status is not Status.DIFFERS:
        return result
    return unverified(f"registered with nondeterministic=True, and {result.field} differs")


def _broken(replayed: Replayed, *stages: str) -> Result:
    """Return what broke the replay in one of some stages."""
    if replayed.problem is None or replayed.problem[0] not in stages:
        return SAME
    stage, error = replayed.problem
    said = f"{stage} raises {type(error).__name__}: {error}"
    if isinstance(error, _MISSING):
        return unverified(said)
    return Result(Status.DIFFERS, stage, None, "an answer", " ".join(said.split())[:500])


def _opening(replayed: Replayed) -> Result:
    recorded = replayed.record.opening
    if not recorded and replayed.record.failure:
        return unverified(replayed.record.failure)
    broken = _broken(replayed, *_BEFORE)
    if broken.status is not Status.SAME:
        return broken
    again = replayed.episode
    assert again is not None
    return compare_messages("opening", recorded, again.messages[: len(again.messages) - _after_opening(again)])


def _after_opening(episode: Episode) -> int:
    return sum(1 + step.messages for step in episode.steps)


def compare_messages(name: str, recorded: Sequence[Message], replayed: Sequence[Message]) -> Result:
    """Return whether messages are the same, or the first difference of the first that is not.

    Those whose images are no longer beside the episodes are unverified where all else is the same.
    """
    missing = SAME
    for at, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
        if one != other:
            what = next(f for f in _FIELDS if getattr(one, f) != getattr(other, f))
            if what != "parts" or one.parts:
                return differs(f"{name}[{at}].{what}", getattr(one, what), getattr(other, what))
            missing = unverified("images of its messages are not beside the episodes")
    return first([compare(f"the number of messages of {name}", len(recorded), len(replayed)), missing])


def _turns(replayed: Replayed) -> Iterator[Result]:
    """Yield a result for each recorded turn."""
    record, again = replayed.record, replayed.episode
    assert again is not None
    is_stuck = replayed.problem is not None and replayed.problem[0] == "step"
    played = len(again.steps) - (is_stuck or again.stop_reason is StopReason.LENGTH)
    at, clock = len(again.messages) - _after_opening(again), ""
    for turn, (_, observation) in enumerate(record.turns):
        step = record.episode.steps[turn]
        if turn >= record.answered:
            result = unverified(record.cut) if record.cut else SAME
            if turn < len(again.steps):
                result = first([_state(step, again.steps[turn]), result])
        elif turn >= played:
            broken = _broken(replayed, "step", "state_hash", "policy")
            result = broken if turn == played and broken.status is not Status.SAME else unverified("the replay ended")
        else:
            new = again.steps[turn]
            heard = again.messages[at + 1 : at + 1 + new.messages]
            result = compare_answer(step, new, observation, heard)
            at += 1 + new.messages
            if result.status is Status.DIFFERS and _is_late((*observation, *heard)):
                clock = f"a call timed out in turn {turn}"
        yield unverified(f"{clock}, which depends on the clock") if clock else result


def _is_late(messages: Sequence[Message]) -> bool:
    return any(message.tool_error is ToolErrorKind.TIMEOUT for message in messages)


def _state(recorded: StepRecord, replayed: StepRecord) -> Result:
    return SAME if recorded.state is None else compare("state", recorded.state, replayed.state)


def compare_answer(old: StepRecord, new: StepRecord, said: Sequence[Message], heard: Sequence[Message]) -> Result:
    """Return whether the environment answered the same in a turn, in the same state.

    Args:
        old: the recorded step.
        new: that of the replay.
        said: the recorded observation.
        heard: that of the replay.
    """
    results = (
        _state(old, new),
        compare_messages("observation", said, heard),
        compare("reward", old.reward, new.reward),
        compare("terminated", old.terminated, new.terminated),
        compare("truncated", old.truncated, new.truncated),
    )
    return first(results)


def _ending(replayed: Replayed, turns: Sequence[Result]) -> Result:
    """Compare how the episode ended: by the environment, or by a limit, which the record doesn't hold."""
    record, again = replayed.record, replayed.episode
    recorded = record.episode
    if why := record.failure or record.cut:
        return unverified(why)
    if replayed.problem is not None or again is None or not turns:
        return unverified("the replay did not get there") if replayed.problem else SAME
    last = again.steps[-1]
    stop = StopReason.DONE if last.terminated else StopReason.ENV_TRUNCATED if last.truncated else None
    if again.stop_reason is StopReason.LENGTH:
        stop = None
    own = recorded.stop_reason if recorded.stop_reason in (StopReason.DONE, StopReason.ENV_TRUNCATED) else None
    if own is not stop:
        return differs("stop_reason", recorded.stop_reason.value, stop.value if stop else "not over")
    is_done = recorded.stop_reason is StopReason.DONE
    return compare("outcome", recorded.outcome.value, (Outcome.TERMINATED if is_done else Outcome.TRUNCATED).value)


def _rewards(replayed: Replayed, group: dict[str, Reward] | Result) -> Result:
    """Compare the components of the reward; those of judges that are models with what is stored of the judgement."""
    record, again = replayed.record, replayed.episode
    recorded = record.episode
    if replaced := next((r for r in recorded.rewards if r.source not in _SOURCES), None):
        return unverified(f"the rewards were replaced: {replaced.name} is from {replaced.source!r}")
    if why := record.failure or record.cut:
        return compare("rewards", recorded.rewards, ()) if record.failure and recorded.rewards else unverified(why)
    broken = _broken(replayed, "score")
    if broken.status is not Status.SAME:
        return broken
    cls = replayed.spec.cls
    of_group = {c.name for c in cls.group_reward_components}
    own = {c.name for c in cls.reward_components}
    apart = [r for r in recorded.rewards if r.source == "judge" and (r.name not in own or r.name in replayed.reread)]
    left = [r for r in recorded.rewards if r not in apart and r.name not in of_group | {*replayed.reread}]
    if again is None or not replayed.is_scored:
        return unverified("the rewards can't be computed again without the replay's end, or without its judge")
    return first([_same_rewards(left, again.rewards), _judged(recorded), _of_group(recorded, of_group, group)])


def _same_rewards(recorded: Sequence[Reward], replayed: Sequence[Reward]) -> Result:
    for one, other in zip(recorded, replayed, strict=False):
        for name in ("name", "turn", "value", "weight", "source"):
            if getattr(one, name) != getattr(other, name):
                return differs(f"rewards.{one.name}.{name}", getattr(one, name), getattr(other, name))
        if (one.error is None) != (other.error is None):
            return differs(f"rewards.{one.name}.error", one.error, other.error)
    return compare("rewards", [r.name for r in recorded], [r.name for r in replayed])


def _judged(recorded: Episode) -> Result:
    """Compare the scores that judges gave with their judgements, which are stored beside them."""
    judged = [r for r in recorded.rewards if r.source == "judge"]
    if len(judged) != len(recorded.judgements):
        return unverified(f"{len(judged)} rewards are a judge's, and {len(recorded.judgements)} judgements are stored")
    pairs = zip(judged, recorded.judgements, strict=True)
    return first([compare(f"rewards.{r.name}.value", r.value, judgement.score) for r, judgement in pairs])


def _of_group(recorded: Episode, names: set[str], group: dict[str, Reward] | Result) -> Result:
    own = [r for r in recorded.rewards if r.name in names and r.source != "judge"]
    if not own or isinstance(group, Result):
        return SAME if not own or not isinstance(group, Result) else group
    return _same_rewards(own, [group[r.name] for r in own if r.name in group])
