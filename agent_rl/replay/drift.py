"""Token ids beside messages: stored ids that follow from the messages, and sampled ids that text would not bring back.

What the environment said is rendered again, as it was when the episode ran, and has to give the ids that are stored, in
the spans that are stored. Sampled ids are only ever read: what they say has to be the reply that is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from agent_rl.core.episode import StopReason
from agent_rl.core.messages import Message
from agent_rl.core.sequences import shared_start
from agent_rl.core.trajectory import Source, Span, Trajectory
from agent_rl.errors import CheckpointError, ConfigError, in_brief
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.delegation import DELEGATE
from agent_rl.rendering import load_renderer
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.config import RendererConfig
from agent_rl.replay.compare import compare_messages
from agent_rl.replay.record import Record
from agent_rl.replay.result import SAME, Result, Status, VerifiedEpisode, differs, unverified

_SHOWN = 8
"""Token ids that are shown of a difference."""


@dataclass(frozen=True)
class TokenReader:
    """A tokenizer, and the renderer that a run had."""

    renderer: Renderer
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]

    def drifts(self, ids: Sequence[int]) -> bool:
        """Return whether sampled ids come out as others when their text is encoded."""
        return [*self.encode(self.decode(ids))] != [*ids]


def load_reader(folder: str | Path, renderer: RendererConfig | None = None) -> TokenReader:
    """Return the reader of a tokenizer's folder.

    Raises:
        ConfigError: if transformers is not installed, or there is no such renderer.
        CheckpointError: if there is no tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("token ids are verified with transformers: pip install 'agent-rl[train]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no tokenizer: {in_brief(error)}") from error
    return TokenReader(
        load_renderer(tokenizer, renderer),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False),
    )


def with_tokens(
    found: VerifiedEpisode, record: Record, reader: TokenReader | Result, tools: Sequence[ToolSpec] | None
) -> VerifiedEpisode:
    """Return a verified episode with what its token ids say.

    Args:
        found: the episode.
        record: the same.
        reader: the run's; or why there is none.
        tools: what the policy was shown; None if that is not known.
    """
    trajectories = record.episode.trajectories
    if not any(map(len, trajectories)):
        return found
    if isinstance(reader, Result):
        return replace(found, tokens=reader)
    pieces = [piece for trajectory in trajectories for piece in sampled_replies(trajectory)]
    try:
        drifted = sorted({turn for turn, ids in pieces if reader.drifts(ids)})
        tokens = (
            _derived(record, reader, tools) if tools is not None else unverified("its prompt's tools are not known")
        )
    except Exception as error:  # of a template, or of a tokenizer that is another one's
        return replace(found, tokens=unverified(f"the renderer raises {type(error).__name__}: {error}"))
    return replace(found, tokens=tokens, sampled=len({turn for turn, _ in pieces}), drifted=tuple(drifted))


def sampled_replies(trajectory: Trajectory) -> Iterator[tuple[int, list[int]]]:
    """Yield each reply that was sampled: its turn and its ids."""
    ids = trajectory.token_ids.tolist()
    for (source, turn), run in groupby(trajectory.spans, lambda span: (span.source, span.turn)):
        if source is Source.POLICY:
            spans = list(run)
            yield turn, ids[spans[0].start : spans[-1].stop]


class _MismatchError(Exception):
    """What was derived is not what is stored."""

    def __init__(self, result: Result) -> None:
        super().__init__(str(result))
        self.result = result


def _derived(record: Record, reader: TokenReader, tools: Sequence[ToolSpec]) -> Result:
    """Derive all trajectories of an episode again; return the first difference."""
    trajectories, seen = record.episode.trajectories, list[int]()
    parent = record.episode.parent
    if any(trajectory.is_delegated for trajectory in trajectories):
        return unverified("a sub-agent had a context of its own, and what it was told is no message of the episode")
    tools = _shown(record, reader.renderer, tools)
    if DELEGATE in tools and any(map(_has_refused, trajectories)):
        return unverified("a call of delegate was refused, which is no message of the episode")
    for number, trajectory in enumerate(trajectories):
        derivation = _Derivation(record, reader.renderer, tools, trajectory)
        try:
            derivation.run(trajectory.spans[0].turn if number else parent[1] if parent else 0)
        except _MismatchError as mismatch:
            if number == 0 and parent is not None and derivation.at == 0:
                return unverified("its prompt is the ids of its parent, which are not rendered again")
            later = trajectories[number + 1 : number + 2]
            is_rewritten = any(span.turn == mismatch.result.turn for t in later for span in t.spans)
            if number or is_rewritten or _is_left_over(record, mismatch.result):
                return unverified("its context was rewritten on the way, which the record does not explain")
            return mismatch.result
        seen += derivation.read
        if (fork := trajectory.forked_from) is not None:
            old, own = trajectories[fork.parent].token_ids, trajectory.token_ids
            if not np.array_equal(old[: fork.position], own[: fork.position]):
                return differs("fork", f"{fork.position} tokens shared", "fewer")
    wanted = [*range(parent[1] if parent else 0, len(record.replies))]
    if seen == wanted:
        return SAME
    return differs("the turns that were sampled", wanted, seen)


def _has_refused(trajectory: Trajectory) -> bool:
    """Whether a reply was answered within its turn, as a call of delegate is that begins no sub-agent."""
    last = -1
    for span in trajectory.spans:
        if span.source is Source.POLICY:
            last = span.turn
        elif span.source is Source.ENV and span.turn == last:
            return True
    return False


def _is_left_over(record: Record, result: Result) -> bool:
    """Whether it is about a turn of which only a summary was sampled, as that left no room for a reply."""
    return record.episode.stop_reason is StopReason.TOKENS and result.turn == len(record.replies)


def _shown(record: Record, renderer: Renderer, tools: Sequence[ToolSpec]) -> Sequence[ToolSpec]:
    """Return the environment's tools, and the one of sub-agents if the prompt begins with both."""
    ids, all_tools = record.episode.trajectories[0].token_ids.tolist(), [*tools, DELEGATE]
    if record.episode.parent is not None or ids[: len(own := renderer.prompt(record.opening, tools))] == own:
        return tools
    return all_tools if ids[: len(own := renderer.prompt(record.opening, all_tools))] == own else tools


class _Derivation:
    """One trajectory, derived from the messages and from what was sampled."""

    def __init__(self, record: Record, renderer: Renderer, tools: Sequence[ToolSpec], stored: Trajectory) -> None:
        self.record, self.renderer, self.tools = record, renderer, tools
        self.ids: list[int] = stored.token_ids.tolist()
        self.spans = stored.spans
        self.at = self.span = 0
        """How many tokens, and spans, have been derived."""
        self.reply = 0
        """Where the last reply begins."""
        self.read: list[int] = []
        """The turns whose replies have been read."""

    def run(self, turn: int) -> None:
        """Derive it, turn by turn, from the turn of its prompt on.

        Raises:
            _MismatchError: if something else is stored.
        """
        while self.span < len(self.spans):
            if turn >= len(self.record.replies):
                raise _MismatchError(replace(differs("spans", "a further turn", "none"), turn=turn))
            if self.at:
                messages = self.record.turns[turn - 1][1]
                bridge = self.renderer.bridge(
                    self.ids[: self.reply], self.ids[self.reply : self.at], messages, self.tools
                )
                if bridge is None:
                    raise _MismatchError(replace(differs("ids", "an append", "a fork"), turn=turn))
                self.expect(bridge.closing, Source.TEMPLATE, turn - 1, turn)
                self.expect(bridge.ids, Source.ENV, turn, turn)
            else:
                self.expect(self.renderer.prompt(self.history(turn), self.tools), Source.PROMPT, turn, turn)
            self.take(turn)
            turn += 1

    def history(self, turn: int) -> list[Message]:
        """Return all messages before a reply."""
        before = islice(self.record.turns, turn)
        return [*self.record.opening, *(m for reply, observation in before for m in (reply, *observation))]

    def expect(self, ids: Sequence[int], source: Source, turn: int, reply: int) -> None:
        """Derive a span of tokens that were not sampled."""
        if not ids:
            return
        stored = self.ids[self.at : self.at + len(ids)]
        if (offset := shared_start(stored, ids)) < len(stored):
            shown = slice(offset, offset + _SHOWN)
            found = Result(Status.DIFFERS, "ids", self.at + offset, str(stored[shown]), str([*ids[shown]]), turn=reply)
            raise _MismatchError(found)
        wanted = Span(self.at, self.at + len(ids), source, turn)
        own = self.spans[self.span] if self.span < len(self.spans) else None
        if own != wanted:
            raise _MismatchError(Result(Status.DIFFERS, "span", self.at, str(own), str(wanted), turn=reply))
        self.at, self.span = wanted.stop, self.span + 1

    def take(self, turn: int) -> None:
        """Read a reply: sampled ids, with what was given between them."""
        last = max((i for i, s in enumerate(self.spans) if s.turn == turn and s.source is Source.POLICY), default=-1)
        spans = self.spans[self.span : last + 1]
        if not spans or any(s.turn != turn or s.source not in (Source.POLICY, Source.TEMPLATE) for s in spans):
            own = str(self.spans[self.span]) if self.span < len(self.spans) else "none"
            wanted = f"sampled tokens of turn {turn}"
            raise _MismatchError(Result(Status.DIFFERS, "span", self.at, own, wanted, turn=turn))
        self.reply, self.span, self.at = self.at, last + 1, spans[-1].stop
        said = self.renderer.parse(self.ids[self.reply : self.at], self.ids[: self.reply], self.tools)
        calls = tuple(replace(call, id=f"call_{turn}_{i}") for i, call in enumerate(said.tool_calls))
        result = compare_messages("reply", [self.record.replies[turn]], [replace(said, tool_calls=calls)])
        if result.status is not Status.SAME:
            raise _MismatchError(replace(result, turn=turn))
        self.read.append(turn)
