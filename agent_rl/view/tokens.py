"""Trajectories token by token: the source of each, and the log-probability of sampled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from rich.console import Console
from rich.text import Text

from agent_rl.core.trajectory import Source, Span, Trajectory
from agent_rl.view.conversation import clean

Decode: TypeAlias = Callable[[Sequence[int]], str]

FOLD_TOKENS = 1000
"""The tokens of a span that are shown before it is folded."""
_SHADES = ((-0.1, "green"), (-1.0, "yellow"), (-float("inf"), "red"))  # down to p = 0.90, p = 0.37, anything
_PARTIAL = "\ufffd"  # what a decoder gives for the first bytes of a character


def print_tokens(trajectory: Trajectory, console: Console, *, decode: Decode | None = None, full: bool = False) -> None:
    """Print a trajectory span by span, of long ones the beginning unless `full`.

    Sampled tokens are underlined and shaded by their log-probability; where the console has no colours (a file, a
    pipe), they are between ⟦ and ⟧ instead. Without `decode`, from ids to text, the ids themselves are printed.
    """
    ids, logprobs = trajectory.token_ids.tolist(), trajectory.logprobs.tolist()
    marks = not console.is_terminal or console.color_system is None
    for span in trajectory.spans:
        console.print(Text(_label(span), style="dim"))
        left = 0 if full else max(0, span.stop - span.start - FOLD_TOKENS)
        shown = replace(span, stop=span.stop - left)
        marked = marks and span.source is Source.POLICY
        body = Text("  ⟦" if marked else "  ")
        for piece, at in _pieces(ids, shown, decode):
            body.append(clean(piece).replace("\n", "↵\n  "), style=_style(span, logprobs[at]))
        body.append("⟧" if marked else "")
        body.append(f"\n  [... folded: {left:,} tokens more; agent-rl view --full shows them ...]" if left else "")
        console.print(body, soft_wrap=marks)


def legend(console: Console) -> None:
    """Print what the marks and colours of `print_tokens` mean."""
    if not console.is_terminal or console.color_system is None:
        console.print(Text("sampled tokens stand between ⟦ and ⟧"))
        return
    line = Text("sampled tokens are underlined; probability: ", style="dim")
    for (_, colour), meaning in zip(_SHADES, ("above 0.90", "above 0.37", "below"), strict=True):
        line.append(meaning, style=f"{colour} underline").append("  ")
    console.print(line)


def _label(span: Span) -> str:
    version = "" if span.policy_version is None else f" · version {span.policy_version}"
    return f"[{span.start}:{span.stop}] turn {span.turn} · {span.source}{version}"


def _style(span: Span, logprob: float) -> str:
    if span.source is not Source.POLICY:
        return "dim"
    return next((f"{colour} underline" for floor, colour in _SHADES if logprob > floor), "red underline")


def _pieces(ids: Sequence[int], span: Span, decode: Decode | None) -> Iterator[tuple[str, int]]:
    """Yield the text of a span in pieces, each with the position of its first token."""
    own = ids[span.start : span.stop]
    if decode is None:
        yield from ((f"{' ' if n else ''}{token}", span.start + n) for n, token in enumerate(own))
        return
    whole = decode(own)
    pieces = list(_decoded(own, span.start, decode)) if span.source is Source.POLICY else []
    # Some tokenizers decode a token alone differently from one inside a text; then the span is shown in one piece.
    yield from pieces if "".join(piece for piece, _ in pieces) == whole else [(whole, span.start)]


def _decoded(own: Sequence[int], start: int, decode: Decode) -> Iterator[tuple[str, int]]:
    """Decode token by token, keeping together those that share a character."""
    first = 0
    for stop in range(1, len(own) + 1):
        piece = decode(own[first:stop])
        if not piece.endswith(_PARTIAL) or stop == len(own):
            yield piece, start + first
            first = stop
