"""Episodes as a log of inspect_ai, which `inspect view` opens; its own writer writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from agent_rl.core.episode import Episode
from agent_rl.core.images import Image
from agent_rl.core.messages import Message, without_nan
from agent_rl.errors import ConfigError
from agent_rl.gym.tasks import task_key
from agent_rl.rendering.chat_format import as_unicode
from agent_rl.version import __version__


def write_inspect(episodes: Iterable[Episode], path: Path) -> int:
    """Write episodes as the samples of one log, `.eval` or `.json`; those of a group are epochs of one sample.

    Of an evaluation, whose tasks are one group, each task but the first is a sample by the name of its first episode.

    Raises:
        ConfigError: if inspect_ai is missing, or the file's name is of neither kind.
    """
    try:
        from inspect_ai import log as inspect_log
    except ImportError as error:
        raise ConfigError("a log of inspect_ai needs its writer: pip install inspect_ai") from error
    if path.suffix not in (".eval", ".json"):
        raise ConfigError(f"inspect_ai's logs end in .eval or .json, not in {path.suffix!r}")
    samples, envs, models, seen = [], dict[str, None](), dict[str, None](), dict[str, int]()
    names: dict[tuple[str, str], str] = {}
    for episode in episodes:
        group = as_unicode(episode.group_id or episode.id)
        own = as_unicode(episode.id)
        sample = names.setdefault((group, task_key(episode.task)), own if group in seen else group)
        seen[sample] = seen.get(sample, 0) + 1
        envs[episode.env] = None
        models |= dict.fromkeys(used.model for used in episode.usage)
        row = {"id": sample, "epoch": seen[sample], **_sample(episode)}
        samples.append(inspect_log.EvalSample.model_validate(row))
    spec = {
        "created": datetime.now(UTC).isoformat(),
        "task": ", ".join(envs) or "agent_rl",
        "model": next(iter(models), "agent_rl/policy"),
        "dataset": {"samples": len(seen)},
        "config": {"epochs": max(seen.values(), default=1)},
        "packages": {"agent_rl": __version__},
    }
    log = {"status": "success", "eval": spec, "samples": samples}
    inspect_log.write_eval_log(inspect_log.EvalLog.model_validate(log), str(path))
    return len(samples)


def _dumped(episode: Episode) -> str:
    return as_unicode(json.dumps(without_nan(episode.task), ensure_ascii=False, default=str))


def _sample(episode: Episode) -> dict[str, object]:
    """Return an episode as the fields of a sample."""
    opening = next((m.content for m in episode.messages if m.role == "user"), "")
    scores = {r.name: {"value": r.value} for r in episode.rewards if r.value is not None and r.turn is None}
    total = {} if episode.reward is None else {"reward": {"value": episode.reward}}
    broke = episode.error
    return {
        "input": as_unicode(opening),
        "target": "",
        "messages": [_message(m) for m in episode.messages],
        "scores": scores | total,
        "metadata": {"episode": episode.id, "task": json.loads(_dumped(episode)), "ending": episode.ending},
        "total_time": episode.seconds,
        "error": {"message": broke.message, "traceback": broke.traceback, "traceback_ansi": ""} if broke else None,
    }


def _message(message: Message) -> dict[str, object]:
    content: object = as_unicode(message.content)
    if message.reasoning:
        text = {"type": "text", "text": content}
        content = [{"type": "reasoning", "reasoning": as_unicode(message.reasoning)}, text]
    if message.parts:
        content = [
            {"type": "image", "image": part.url}
            if isinstance(part, Image)
            else {"type": "text", "text": as_unicode(part)}
            for part in message.parts
        ]
    row: dict[str, object] = {"role": message.role, "content": content}
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": c.id, "function": as_unicode(c.name), "arguments": dict(c.arguments), "parse_error": c.error}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        row |= {"tool_call_id": message.tool_call_id, "function": message.name}
        if message.tool_error:
            kind = "timeout" if message.tool_error == "timeout" else "unknown"
            row["error"] = {"type": kind, "message": as_unicode(message.content)}
    return row
