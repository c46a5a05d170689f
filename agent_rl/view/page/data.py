"""What the page shows, as JSON: facts of a run, columns of its episodes' heads, one episode, metrics.

Texts stay as models and tools wrote them; the page's script makes them harmless, in one place (`el` of 00_shell.js).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from agent_rl.core.episode import Episode
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import JSON, Message
from agent_rl.core.trajectory import Source
from agent_rl.core.turns import Turn, turns
from agent_rl.gym.tasks import task_key
from agent_rl.store.heads import Head
from agent_rl.store.token_records import TokenRecord
from agent_rl.version import __version__
from agent_rl.view.decoding import Decode
from agent_rl.view.page.tokens import trajectory_json

_OF_HEAD = (
    *("id", "group", "env", "purpose", "split", "step", "sample", "greedy", "seed", "reward", "outcome", "stop"),
    *("ending", "turns", "calls", "errors", "tokens", "sampled", "version", "seconds", "error", "question"),
)
COLUMNS = (*_OF_HEAD, "success", "parent", "task")
"""What the list has of each episode, by name, besides `rewards`; the names of `--where` are among them."""


_LARGEST = 2**53
"""The integers up to which JavaScript's numbers are exact; a seed is above."""


def head_row(episode: Episode) -> dict[str, JSON]:
    """Return what the list has of one episode."""
    head = Head.of(episode)
    return {name: getattr(head, name) for name in _OF_HEAD} | {
        "success": {None: "none", True: "yes", False: "no"}[head.success],
        "parent": None if episode.parent is None else [*episode.parent],
        "task": task_key({"env": episode.env, "task": episode.task}),  # the same at every step of training
        "rewards": dict(head.rewards),
    }


def head_columns(rows: Iterable[Mapping[str, JSON]]) -> dict[str, JSON]:
    """Return rows as columns of equal length; `rewards` has one for each component, null where it is not scored."""
    rows = list(rows)
    columns: dict[str, JSON] = {name: [row[name] for row in rows] for name in COLUMNS}
    components = [cast(Mapping[str, JSON], row["rewards"]) for row in rows]
    names = dict.fromkeys(name for of_row in components for name in of_row)
    columns["rewards"] = {name: [of_row.get(name) for of_row in components] for name in names}
    return columns


def run_json(path: Path, *, shown: int, total: int, where: Sequence[str] = ()) -> dict[str, JSON]:
    """Return the facts of a run, or of an episode file, for the page's head."""
    folder = path if path.is_dir() else path.parent
    name = folder.resolve().name if path.is_dir() or path.name == "episodes.jsonl" else path.name
    return {"title": name, "shown": shown, "total": total, "where": [*where], "version": __version__}


def metrics_json(path: Path) -> list[JSON]:
    """Return the rows of a run's metrics, oldest first; none where it has no metrics or the last line is torn."""
    file = (path if path.is_dir() else path.parent) / "metrics.jsonl"
    rows: list[JSON] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:  # torn by a crash, or still being written
            continue
    return rows


def episode_json(
    episode: Episode, records: Sequence[TokenRecord] = (), decode: Decode | None = None
) -> dict[str, JSON]:
    """Return one episode whole: the conversation by turns, and its tokens packed.

    Args:
        episode: which.
        records: what updates made of its tokens.
        decode: from ids to text; without it, the page shows ids.
    """
    at, cut, sampled = 0, [], _sampled_by_turn(episode)
    for turn in turns(episode):
        cut.append(_turn_json(episode, turn, at) | {"sampled": sampled.get(turn.index)})
        at += len(turn.messages)
    return {
        **{name: value for name, value in head_row(episode).items() if name != "question"},
        "task": episode.task,
        "env_args": episode.env_args,
        "versions": episode.versions,
        "rewards": [asdict(reward) for reward in episode.rewards],
        "judgements": [_judgement_json(judgement) for judgement in episode.judgements],
        "error": None if episode.error is None else asdict(episode.error),
        "usage": [asdict(used) for used in episode.usage],
        "cut": cut,
        "trajectories": [
            trajectory_json(trajectory, [r for r in records if r.trajectory == number], decode)
            for number, trajectory in enumerate(episode.trajectories)
        ],
    }


def _sampled_by_turn(episode: Episode) -> dict[int | None, JSON]:
    """Return of each turn where its first sampled token is, as (trajectory, place), and how many all contexts have."""
    found: dict[int | None, tuple[int, int, int]] = {}
    for number, trajectory in enumerate(episode.trajectories):
        for span in trajectory.spans:
            if span.source is Source.POLICY:
                of, first, count = found.get(span.turn, (number, span.start, 0))
                found[span.turn] = of, first, count + span.stop - span.start
    return {**found}


def _turn_json(episode: Episode, turn: Turn, at: int) -> dict[str, JSON]:
    """Return a turn; `at` is the number of its first message in the episode."""
    step = None if turn.index is None or turn.index >= len(episode.steps) else episode.steps[turn.index]
    inherited = 0 if episode.parent is None else episode.parent[1]  # turns that a fork's own usage does not hold
    own = -1 if turn.index is None else turn.index - inherited
    used = episode.usage[own] if 0 <= own < len(episode.usage) else None
    return {
        "index": turn.index,
        "first": at,
        "reward": turn.reward,
        "ended": None if step is None else "terminated" if step.terminated else "truncated" if step.truncated else None,
        "seconds": None if used is None else used.seconds,
        "messages": [_message_json(message) for message in turn.messages],
    }


def _message_json(message: Message) -> JSON:
    whole = asdict(replace(message, parts=())) if message.parts else asdict(message)
    whole["images"] = [{"text": str(image), "url": image.url} for image in message.images]
    return {name: value for name, value in whole.items() if value not in (None, "", (), [])} | {"role": message.role}


def _judgement_json(judgement: Judgement) -> JSON:
    return asdict(judgement) | {"usage": len(judgement.usage)}


def dump(value: JSON) -> bytes:
    """Return a value as JSON for JavaScript: numbers that it lacks, or would round, become strings."""
    text = json.dumps(_exact(value), ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(json.loads(text), separators=(",", ":")).encode()


def _exact(value: JSON) -> JSON:
    if isinstance(value, Mapping):
        return {str(key): _exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    lacks = isinstance(value, float) and not math.isfinite(value)
    return str(value) if lacks or (isinstance(value, int) and abs(value) > _LARGEST) else value
