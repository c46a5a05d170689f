"""Trajectories token by token: who wrote each, and its number in a mode of `shading`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from agent_rl.core.display import plural
from agent_rl.core.trajectory import Source, Span, Trajectory
from agent_rl.view.conversation import clean
from agent_rl.view.decoding import Decode, Piece, pieces
from agent_rl.view.shading import BY_SPAN, Shading

FOLD_TOKENS = 1000
"""The tokens of a span that are shown before it is folded."""


def print_tokens(
    trajectory: Trajectory, shades: Shading, console: Console, *, decode: Decode | None = None, full: bool = False
) -> None:
    """Print a trajectory span by span, of long ones the beginning unless `full`.

    Sampled tokens are underlined and in the colour of their number; where the console has no colours (a file, a pipe),
    they are between ⟦ and ⟧, with their numbers. Without `decode`, from ids to text, the ids themselves are printed.
    """
    ids, marks = trajectory.token_ids.tolist(), _is_plain(console)
    for span in trajectory.spans:
        console.print(Text(_label(span), style="dim"))
        left = 0 if full else max(0, span.stop - span.start - FOLD_TOKENS)
        body = Text("  ")
        for text, style in _parts(ids, replace(span, stop=span.stop - left), shades, decode, marks=marks):
            body.append(clean(text).replace("\n", "↵\n  "), style=style)
        if left:
            body.append(f"\n  [... folded: {plural(left, 'token')} more; agent-rl view --full shows them ...]")
        console.print(body, soft_wrap=marks)


def legend(shades: Shading, console: Console) -> Text:
    """Return what the marks and colours of `print_tokens` mean."""
    note = f", of {shades.note}" if shades.note else ""
    if _is_plain(console):
        numbers = f", followed by their {shades.mode} in ⟨ and ⟩{note}; ? where it is not known"
        return Text(f"sampled tokens are between ⟦ and ⟧{'' if shades.mode in BY_SPAN else numbers}")
    line = Text(f"sampled tokens are underlined; {shades.mode}{note}: ", style="dim")
    for shade in shades.shades:
        line.append(shade.meaning, style=f"{shade.style} underline").append("  ")
    return line


def _is_plain(console: Console) -> bool:
    return not console.is_terminal or console.color_system is None


def _label(span: Span) -> str:
    version = "" if span.policy_version is None else f" · version {span.policy_version}"
    return f"[{span.start}:{span.stop}] turn {span.turn} · {span.source}{version}"


def _parts(
    ids: Sequence[int], span: Span, shades: Shading, decode: Decode | None, *, marks: bool
) -> Iterator[tuple[str, str]]:
    """Yield a span's text in parts of one style each; with marks and numbers where there are no colours."""
    marks = marks and span.source is Source.POLICY
    yield "⟦" if marks else "", ""
    before = ""
    for piece in _pieces(ids, span, decode):
        number = shades.number(piece.start)
        if marks and before not in ("", number):
            yield f"⟨{before}⟩", ""
        yield piece.text, shades.style(piece.start, span.source)
        before = number
    yield f"⟨{before}⟩" if marks and before else "", ""
    yield "⟧" if marks else "", ""


def _pieces(ids: Sequence[int], span: Span, decode: Decode | None) -> Iterator[Piece]:
    own = ids[span.start : span.stop]
    if decode is None:
        for n, token in enumerate(own, start=span.start):
            yield Piece(f"{' ' if n > span.start else ''}{token}", n, n + 1)
    elif span.source is Source.POLICY:
        yield from pieces(own, decode, span.start)
    else:
        yield Piece(decode(own), span.start, span.stop)
