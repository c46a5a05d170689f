"""ATIF, Harbor's Agent Trajectory Interchange Format: an episode as one JSON object, its turns as steps.

Written is version 1.4, which later readers take, too: each reply with its token ids and log-probabilities, but without
the prompt's, which would repeat the whole conversation in every step. Read are versions 1.0 to 1.8. What ATIF has no
field for (the task, rewards, errors of tools) is in its `extra` objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, cast

from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, Message, ToolCall, ToolErrorKind
from agent_rl.core.trajectory import Source, Span, Trajectory
from agent_rl.core.turns import turns
from agent_rl.formats.chat import text_of
from agent_rl.rendering.chat_format import as_unicode
from agent_rl.rollout.sub_agents import SubAgent, sub_agents
from agent_rl.version import __version__

VERSION = "ATIF-v1.4"
_Row = Mapping[str, JSON]


def atif_rows(episodes: Iterable[Episode]) -> Iterator[dict[str, JSON]]:
    """Yield episodes as ATIF's trajectories."""
    for episode in episodes:
        model = episode.usage[0].model if episode.usage else None
        agent: dict[str, JSON] = {"name": "agent_rl", "version": episode.versions.get("agent_rl", __version__)}
        steps = list(_steps(episode))
        sampled = sum(t.sampled for t in episode.trajectories)
        yield {
            "schema_version": VERSION,
            "session_id": episode.id,
            "agent": agent | ({"model_name": model} if model else {}),
            "steps": [{"step_id": at, **step} for at, step in enumerate(steps, start=1)],
            "final_metrics": {"total_steps": len(steps)} | ({"total_completion_tokens": sampled} if sampled else {}),
            "extra": {
                "env": episode.env,
                "task": episode.task,
                "group": episode.group_id,
                "reward": episode.reward,
                "rewards": {r.name: r.value for r in episode.rewards if r.turn is None},
                "success": episode.success,
                "stop_reason": episode.stop_reason.value,
            },
        }


def _steps(episode: Episode) -> Iterator[dict[str, JSON]]:
    messages, pieces = list(episode.messages), _pieces(episode)
    turn = -sum(message.role == "assistant" for message in next(turns(episode)).messages)  # examples are no turns
    while messages:
        message = messages.pop(0)
        if message.role != "assistant":
            source = "system" if message.role == "system" else "user"
            yield {"source": source, "message": as_unicode(message.content)}
            continue
        results = []
        while messages and messages[0].role == "tool":
            results.append(messages.pop(0))
        sampled = _said_to_env(pieces, turn, message, turn == episode.turns - 1)
        yield _agent_step(message, results, episode, turn, sampled)
        turn += 1


def _agent_step(
    said: Message, results: Sequence[Message], episode: Episode, turn: int, sampled: _Piece | None
) -> dict[str, JSON]:
    ids = {call.id for call in said.tool_calls}
    errors = {str(m.tool_call_id): m.tool_error.value for m in results if m.tool_error}
    broken = {call.id: call.error for call in said.tool_calls if call.error}
    reward = episode.steps[turn].reward if 0 <= turn < len(episode.steps) else None
    extra: dict[str, JSON] = {"reward": reward or None, "tool_errors": errors, "malformed_calls": broken}
    answered: list[JSON] = [
        {"source_call_id": m.tool_call_id if m.tool_call_id in ids else None, "content": as_unicode(m.content)}
        for m in results
    ]
    optional: dict[str, JSON] = {
        "reasoning_content": said.reasoning and as_unicode(said.reasoning),
        "tool_calls": [
            {"tool_call_id": c.id, "function_name": as_unicode(c.name), "arguments": dict(c.arguments)}
            for c in said.tool_calls
        ],
        "observation": {"results": answered} if answered else None,
        "metrics": _metrics(sampled),
        "extra": {name: value for name, value in extra.items() if value},
    }
    step: dict[str, JSON] = {"source": "agent", "message": as_unicode(said.content)}
    return step | {name: value for name, value in optional.items() if value}


def _metrics(piece: _Piece | None) -> dict[str, JSON]:
    """Return the tokens that were sampled of what a turn said to the environment."""
    if piece is None:
        return {}
    trajectory, spans = piece.trajectory, piece.spans
    ids, logprobs = trajectory.token_ids, trajectory.logprobs
    return {
        "prompt_tokens": spans[0].start,
        "completion_tokens": sum(s.stop - s.start for s in spans),
        "completion_token_ids": [id for s in spans for id in ids[s.start : s.stop].tolist()],
        "logprobs": [x for s in spans for x in logprobs[s.start : s.stop].tolist()],
    }


class _Piece(NamedTuple):
    """What was sampled at once."""

    agent: SubAgent | None
    """Whose it is; None of the caller's own."""
    trajectory: Trajectory
    spans: list[Span]


def _pieces(episode: Episode) -> dict[int, list[_Piece]]:
    """Return what was sampled by turn, in the order of the trajectories, without what a fork repeats."""
    found: dict[int, list[_Piece]] = {}
    for agent, trajectory in zip(sub_agents(episode), episode.trajectories, strict=True):
        shared = trajectory.forked_from.position if trajectory.forked_from else 0
        for _, run in groupby(trajectory.spans, lambda s: (s.source in (Source.POLICY, Source.TEMPLATE), s.turn)):
            spans = [s for s in run if s.source is Source.POLICY and s.stop > shared]
            if spans:
                found.setdefault(spans[0].turn, []).append(_Piece(agent, trajectory, spans))
    return found


def _said_to_env(pieces: Mapping[int, Sequence[_Piece]], turn: int, said: Message, is_last: bool) -> _Piece | None:
    """Return where a turn's reply was sampled; None if it was not, or that is not known.

    Summaries, calls of `delegate` and the answers of sub-agents are sampled in a turn as well, and stay in it.
    """
    at_work = {piece.agent for piece in pieces.get(turn + 1, ())}
    own = [piece for piece in pieces.get(turn, ()) if piece.agent is None]
    others = [piece for piece in pieces.get(turn, ()) if piece.agent is not None]
    if staying := [piece for piece in others if not own or piece.agent in at_work]:
        return staying[-1]
    began = [piece for piece in others if piece.agent and piece.agent.turn == turn]
    if began and is_last and said.tool_calls:  # the sub-agent's, unless it had answered
        return began[-1] if len(own) == 1 else None
    return own[-1] if own else None


def read_atif(row: JSON) -> tuple[tuple[Message, ...], _Row]:
    """Return the messages of one of ATIF's trajectories, and what is said about it, by our names.

    Raises:
        ValueError: if it is none.
    """
    version = row.get("schema_version") if isinstance(row, Mapping) else None
    if not isinstance(row, Mapping) or not str(version).startswith("ATIF-v1."):
        raise ValueError(f"schema_version={version!r:.40}: ATIF-v1.0 to ATIF-v1.8 are read")
    steps = row.get("steps")
    if not isinstance(steps, Sequence) or isinstance(steps, str) or not steps:
        raise ValueError("steps: give a list of steps")
    messages: list[Message] = []
    for at, step in enumerate(steps):
        if not isinstance(step, Mapping) or step.get("source") not in ("system", "user", "agent"):
            raise ValueError(f"steps[{at}].source: give system, user or agent")
        try:
            messages += _messages(step)
        except ValueError as error:
            raise ValueError(f"steps[{at}].{error}") from error
    extra = row.get("extra")
    facts = dict(extra) if isinstance(extra, Mapping) else {}
    agent = row.get("agent")
    model = agent.get("model_name") if isinstance(agent, Mapping) else None
    return tuple(messages), {**facts, "id": row.get("session_id"), "model": model}


def _messages(step: _Row) -> Iterator[Message]:
    content, extra = text_of(step.get("message")), _object(step.get("extra"))
    errors, broken = _object(extra.get("tool_errors")), _object(extra.get("malformed_calls"))
    results = _objects(_object(step.get("observation")).get("results"), "observation.results")
    if step["source"] != "agent":
        role = "system" if step["source"] == "system" else "user"
        yield Message("system" if role == "system" else "user", content)
        yield from (Message("system" if role == "system" else "user", text_of(r.get("content"))) for r in results)
        return
    calls = []
    for at, call in enumerate(_objects(step.get("tool_calls"), "tool_calls")):
        id, name = str(call.get("tool_call_id") or f"call_{at}"), call.get("function_name")
        error = broken.get(id)
        if error is None and not (name and isinstance(name, str)):  # one that could not be read has an error
            raise ValueError(f"tool_calls[{at}].function_name={name!r:.80}: give the name of the tool that was called")
        arguments = _object(call.get("arguments"))
        calls.append(ToolCall(id, str(name or ""), arguments, None if error is None else str(error)))
    reasoning = step.get("reasoning_content")
    yield Message("assistant", content, None if reasoning is None else str(reasoning), tuple(calls))
    names = {call.id: call.name for call in calls}
    for result in results:
        text, source = text_of(result.get("content")), result.get("source_call_id")
        if not calls:  # an action in the text: what it led to is what the user says next
            yield Message("user", text)
            continue
        kind = errors.get(str(source))
        answered = calls[0].id if source is None and len(calls) == 1 else source
        found = None if kind not in tuple(ToolErrorKind) else ToolErrorKind(str(kind))
        name = names.get(str(answered))
        call_id = None if answered is None else str(answered)
        yield Message("tool", text, tool_call_id=call_id, name=name, tool_error=found)


def _object(value: JSON) -> _Row:
    return value if isinstance(value, Mapping) else {}


def _objects(value: JSON, where: str) -> Sequence[_Row]:
    found = value or ()
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(isinstance(x, Mapping) for x in found):
        raise ValueError(f"{where}={value!r:.80}: give a list of objects")
    return cast("Sequence[_Row]", found)
