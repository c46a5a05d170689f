"""Checkpoints of a run on verl: their size on disk, and the kept ones: the latest, and the best in evaluation."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from agent_rl.engines.model_files import share_weights
from agent_rl.rendering.by_name import remember_in_files
from agent_rl.rendering.config import RendererConfig

EVALUATION = "evaluation.json"
"""Beside verl's files in a checkpoint: the evaluation of its weights."""

COPIES = {"model": 1, "optimizer": 2, "hf_model": 1, "extra": 0}
"""How many numbers a parameter each part of a checkpoint has: the optimizer is Adam."""


def parameters_of(model: Path) -> int | None:
    """Return how many parameters a folder in Hugging Face's format holds; None if no safetensors are there."""
    found = 0
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        found += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return found or None


def bytes_of_parts(verl: DictConfig) -> dict[str, int]:
    """Return how many bytes a parameter each part of a checkpoint takes, by verl's full config.

    What is kept of LoRA's adapters alone counts as nothing: they are about a hundredth of the model.
    """
    actor, found = "actor_rollout_ref.actor", dict[str, int]()
    workers = {actor: ("actor_rollout_ref.model", f"{actor}.fsdp_config")}
    if verl.critic.enable:
        workers["critic"] = ("critic.model", "critic.fsdp")
    for worker, (model, engine) in workers.items():
        width = 4 if "32" in str(OmegaConf.select(verl, f"{engine}.model_dtype") or "fp32") else 2
        saves_adapters = OmegaConf.select(verl, f"{worker}.checkpoint.save_lora_only")
        of_adapters = {"optimizer", "model"} if saves_adapters else {"optimizer"}
        if not OmegaConf.select(verl, f"{model}.lora_rank"):
            of_adapters = set()
        for part in OmegaConf.select(verl, f"{worker}.checkpoint.save_contents"):
            copies = 0 if part in of_adapters else COPIES.get(part, 0)
            found[part if worker == actor else f"critic's {part}"] = copies * width
    return {part: n for part, n in found.items() if n}


def describe_checkpoint(verl: DictConfig) -> str:
    """Return in a sentence what a checkpoint takes on disk, and how many are kept."""
    parts, model, keep = bytes_of_parts(verl), verl.actor_rollout_ref.model.path, verl.data.agent_rl.keep_checkpoints
    each = f"{sum(parts.values())} bytes a parameter ({', '.join(f'{part} {n}' for part, n in parts.items())})"
    kept = f"kept are the last {keep} and the best in evaluation"
    if (parameters := parameters_of(Path(model))) is None:
        return f"a checkpoint takes {each}; how many is not known: {model} is no folder with safetensors; {kept}"
    size = parameters * sum(parts.values()) / 1e9
    return f"a checkpoint takes {size:.3g} GB: {parameters:,} parameters, {each}; {kept}: {size * (keep + 1):.3g} GB"


def record_evaluation(checkpoint: Path, success: float) -> None:
    """Write the success rate of a checkpoint's weights into it; nothing if there is no such checkpoint."""
    if checkpoint.is_dir():
        (checkpoint / EVALUATION).write_text(json.dumps({"success": success}))


def finish_model(checkpoint: Path, renderer: str) -> None:
    """Leave a run's renderer, its settings as JSON, where `load_renderer` looks; let others read the weights, too."""
    folder = checkpoint / "actor" / "huggingface"
    remember_in_files(folder, RendererConfig.model_validate_json(renderer))
    share_weights(folder)


def best_step(checkpoints: Path) -> int | None:
    """Return the step of the checkpoint with the highest success in evaluation, the latest of equals; None without."""
    success = {step: found for step, folder in _by_step(checkpoints) if (found := _success(folder)) is not None}
    return max(success, key=lambda step: (success[step], step), default=None)


def remove_old(checkpoints: Path, keep: int) -> list[int]:
    """Delete all checkpoints but the `keep` latest and the best; return the steps of the deleted ones."""
    best = best_step(checkpoints)
    old = [(step, folder) for step, folder in _by_step(checkpoints)[:-keep] if step != best]
    for _, folder in old:
        shutil.rmtree(folder)
    return [step for step, _ in old]


def _by_step(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in their order."""
    return sorted((int(path.name.removeprefix("global_step_")), path) for path in checkpoints.glob("global_step_*"))


def _success(checkpoint: Path) -> float | None:
    file = checkpoint / EVALUATION
    return float(json.loads(file.read_text())["success"]) if file.exists() else None
