"""`agent-rl replay verify`: stored episodes played again, and compared."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta

from agent_rl.core.display import plural
from agent_rl.core.messages import JSON
from agent_rl.replay.result import Result, Status, Verification, VerifiedEpisode
from agent_rl.replay.verify import verify as verified
from agent_rl.runs.commands import command
from agent_rl.view.conversation import clean
from agent_rl.view.progress import Progress, Screen
from agent_rl.view.results import dump_results

SHOWN = 20
"""Episodes that differ, and reasons, of which each has a line."""

HELP = """

Each is played in a fresh environment with its recorded replies, and compared turn by turn: what the environment said
and gave, its flags, its state, then the rewards and the ending; and whether the stored token ids follow from the
messages.

exit status: 0 nothing differs, 1 something does, 2 nothing could be verified

examples:
  agent-rl replay verify runs/latest
  agent-rl replay verify runs/latest eval-00100-sampled-0000
  agent-rl replay verify runs/latest --where env=search-v0 --limit 100 --mode cassette
  agent-rl replay verify episodes.jsonl --tokenizer Qwen3-4B --workers 8 --json"""


def verify(arguments: argparse.Namespace) -> int:
    """Verify episodes; return 0 if nothing differs, 1 if something does, 2 if nothing could be verified."""
    a = arguments
    started = time.monotonic()
    with Progress(Screen(stderr=True, quiet=a.json)) as progress:

        def show(found: Verification, total: int) -> None:
            done = found.counts.total()
            rate = done / max(time.monotonic() - started, 1e-9)
            left = timedelta(seconds=round((total - done) / rate))
            state = f"{rate:.3g} episodes/s, {left} left, {found.counts[Status.DIFFERS]} differ"
            progress.phase("verify", done - 1, total, state)

        found = verified(
            a.file,
            a.ids,
            where=a.where,
            mode=a.mode,
            limit=a.limit,
            tokenizer=a.tokenizer,
            renderer=a.renderer,
            workers=len(os.sched_getaffinity(0)) if a.workers is None else a.workers,
            imports=a.imports or (),
            on_progress=show,
        )
    if a.json:
        print(dump_results(_as_json(found)), end="")
    else:
        for line in _lines(found, a.file):
            print(clean(line))
    return found.exit_code


def _lines(found: Verification, file: str) -> Iterator[str]:
    """Yield what people read: what differs, what is unverified and why, and the sums."""
    different = [episode for episode in found.found if episode.status is Status.DIFFERS]
    for episode in different[:SHOWN]:
        where, result = episode.problem
        yield f"{episode.id}  {where}: {result}"
    if len(different) > SHOWN:
        yield f"... and {len(different) - SHOWN:,} more that differ: --json has all"
    for why, n in found.reasons.most_common(SHOWN):
        yield f"unverified ({n:,}): {why}"
    if not found.counts:
        yield "there is no episode to verify: see --where and --limit"
    yield f"episodes, {found.mode}: {_sums(found.counts)}"
    yield f"turns: {_sums(found.turns)}"
    if found.tokens:
        yield f"token ids of episodes: {_sums(found.tokens)}"
    if found.sampled:
        share = found.drifted / found.sampled
        where = f", in {plural(found.drifted_episodes, 'episode')}," if found.drifted else ""
        counts = f"{found.drifted:,} of {found.sampled:,} sampled replies ({share:.2%})"
        yield f"drift: {counts}{where} come out as other ids when their text is encoded"
    if different:
        yield f"One in full: {command('view', file, different[0].id)}"


def _sums(counts: Counter[Status]) -> str:
    words = {Status.SAME: "same", Status.DIFFERS: "differ", Status.UNVERIFIED: "unverified"}
    return ", ".join(f"{counts[status]:,} {word}" for status, word in words.items())


def _as_json(found: Verification) -> dict[str, JSON]:
    sums = {name: {str(s): getattr(found, name)[s] for s in Status} for name in ("counts", "turns", "tokens")}
    drift = {name: getattr(found, name) for name in ("sampled", "drifted", "drifted_episodes")}
    listed = [_episode(episode) for episode in found.found]
    return {"mode": found.mode, **sums, **drift, "reasons": dict(found.reasons), "found": listed}


def _episode(episode: VerifiedEpisode) -> dict[str, JSON]:
    parts: dict[str, Result | None] = {**episode.parts, "tokens": episode.tokens}
    found = {name: asdict(r) for name, r in parts.items() if r is not None and r.status is not Status.SAME}
    return {"id": episode.id, "env": episode.env, "status": str(episode.status), "parts": found}
