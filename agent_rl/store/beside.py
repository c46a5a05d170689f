"""What lies beside an episode file: the settings of its run or rollout, and the tokenizer that they lead to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent_rl.policy.by_name import model_folder
from agent_rl.rendering.config import RendererConfig
from agent_rl.store.shards import FILE_NAME, episode_file

TOKENIZER = "tokenizer.json"


def renderer_settings(path: str | os.PathLike[str]) -> RendererConfig | None:
    """Return the renderer that the settings of a rollout's policy, or of a run, ask for, if they do."""
    file = episode_file(path)
    asked = [_policy(settings).get("renderer") for settings in _of_rollout(file)]
    for found in (*asked, _settings(file.with_name("config.yaml")).get("renderer")):
        if found:
            return RendererConfig.model_validate({"name": found} if isinstance(found, str) else found)
    return None


def imported_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files that a run or rollout was started with, to register its environments; those that are there."""
    file = episode_file(path)
    found: dict[Path, None] = {}
    for settings in (*_of_rollout(file), _settings(file.with_name("config.yaml"))):
        names = settings.get("imports")
        found |= dict.fromkeys(Path(str(name)) for name in (names if isinstance(names, list) else []))
    return [name for name in found if name.is_file()]


def tokenizer_files(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the tokenizers' files that an episode file's folder and settings lead to, the likeliest first."""
    for folder in _models(episode_file(path)):
        for place in (folder / TOKENIZER, model_folder(str(folder)) / TOKENIZER):
            if place.exists():
                yield place


def _models(file: Path) -> Iterator[Path]:
    run = file.parent
    yield from (run / name for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
    yield from sorted(run.glob("checkpoints/global_step_*/actor/huggingface"), key=_step, reverse=True)
    for settings in _of_rollout(file):
        named = _policy(settings)
        yield from map(_folder, (named.get(key) for key in ("tokenizer", "folder", "model", "name")))
    yield _folder(_settings(run / "config.yaml").get("start_from"))


def _of_rollout(file: Path) -> Iterator[Mapping[str, object]]:
    return map(_settings, (file.with_suffix(".yaml"), file.with_name(FILE_NAME.replace(".jsonl", ".yaml"))))


def _policy(settings: Mapping[str, object]) -> Mapping[str, object]:
    policy = settings.get("policy")
    return policy if isinstance(policy, dict) else {}


def _step(folder: Path) -> int:
    number = folder.parents[1].name.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


def _settings(file: Path) -> Mapping[str, object]:
    from omegaconf import OmegaConf

    try:
        found = OmegaConf.to_container(OmegaConf.load(file))
    except Exception:  # of the file, YAML, OmegaConf and the encoding: it is another file, or none
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def _folder(model: object) -> Path:
    """Return a model's folder: its own, or its place in Hugging Face's cache."""
    if not isinstance(model, str) or not model or Path(model).is_dir():
        return Path(str(model or os.devnull))
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, TOKENIZER)
    except (ImportError, ValueError):  # it is no name there
        cached = None
    return Path(cached).parent if isinstance(cached, str) else Path(model)
