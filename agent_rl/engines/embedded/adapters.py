"""Adapters: the low-rank matrices that `peft` puts beside a model's weights, found, read, loaded and merged.

`peft` is injected into the model's own modules (`PreTrainedModel.add_adapter`), not wrapped around the model: body,
head and config stay where they are.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_rl.errors import CheckpointError

if TYPE_CHECKING:
    from peft import PeftConfig

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it; it misses kernels for 4-bit weights
WEIGHTS = "adapter_model.safetensors"
MORE = ("modules_to_save", "target_parameters", "trainable_token_indices")
"""What `peft` calls the parts of an adapter that no linear module's matrices are."""


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether a model has adapters, switched on or off."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@torch.no_grad()
def weight_of(module: nn.Module) -> Tensor:
    """Return what a linear module multiplies with: its weight, and what its adapter makes of it.

    The module stays as it is, to the bit: `merge` and `unmerge` of `peft` would leave rounding errors in it.
    """
    if not _is_adapted(module):
        return module.weight  # type: ignore[return-value]
    base = module.get_base_layer()  # type: ignore[operator]
    own = base.weight.data
    module.merge(safe_merge=True)  # type: ignore[operator]
    merged: Tensor = base.weight.data
    base.weight.data = own
    module.merged_adapters.clear()  # type: ignore[union-attr, operator]
    return merged


def merged_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the model that `merge` would leave, by their names; a tied one once."""
    adapted = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    for name, parameter in model.named_parameters():
        owner = next((found for found in adapted if name.startswith(found + ".")), None)
        if owner is None:
            yield name, parameter
        elif name == f"{owner}.base_layer.weight":
            yield f"{owner}.weight", weight_of(adapted[owner])
        elif name.startswith(f"{owner}.base_layer."):
            yield name.replace(".base_layer", ""), parameter


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Write a model's adapters into its weights, and take them away; return the model, whose weights have gradients.

    An adapter of the embeddings or of the head alone unties them: the other one keeps its weights.
    """
    for name, module in [(name, module) for name, module in model.named_modules() if _is_adapted(module)]:
        base, merged = module.get_base_layer(), weight_of(module)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if module in (embedding, head) and embedding.weight is getattr(head, "weight", None):
            base.weight = nn.Parameter(merged)
            model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
            model.all_tied_weights_keys = {}
        else:
            base.weight.data = merged
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, base)
    if has_adapters(model):
        model._hf_peft_config_loaded = False
        del model.peft_config
        model.requires_grad_(True)  # which `add_adapter` took
    return model


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Switch a model's adapters off, if it has any."""
    if not has_adapters(model):
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def add_adapter(model: PreTrainedModel, config: PeftConfig) -> None:
    """Put an adapter into a model, in float32 whatever the model is in; only it has gradients from then on."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a mixture's experts get none
        model.add_adapter(config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def load_adapter(model: PreTrainedModel, folder: str | Path) -> None:
    """Put the adapter that a folder holds in `peft`'s format into a model.

    Raises:
        CheckpointError: if the folder's adapter is damaged, doesn't fit the model, or holds more than pairs of matrices
            beside linear modules: whole modules, what is added to a mixture's experts or to some tokens.
    """
    from peft import PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    try:
        config = PeftConfig.from_pretrained(str(folder))
        if more := next((f"{name}={kept}" for name in MORE if (kept := getattr(config, name, None))), None):
            raise CheckpointError(
                f"the adapter in '{folder}' is not only of linear modules, {more}: merge it into its model first, with "
                "peft: AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW), and "
                "take that folder"
            )
        config.inference_mode = False
        name = model.name_or_path
        add_adapter(model, config)
        config.base_model_name_or_path = name
        found = set_peft_model_state_dict(model, load_file(Path(folder) / WEIGHTS))
    except CheckpointError:
        raise
    except Exception as error:  # what peft and its readers raise about a file that is missing, cut short or other
        raise CheckpointError(
            f"the adapter in '{folder}' can't be loaded, {type(error).__name__}: {str(error)[:200]}; take another "
            "folder"
        ) from error
    if found.unexpected_keys:
        raise CheckpointError(
            f"the adapter in '{folder}' doesn't fit {model.name_or_path}, which has no {found.unexpected_keys[0]}; "
            "take the model that it was trained on"
        )


def verl_weights(folder: str | Path) -> dict[str, Tensor] | None:
    """Return the weights of a model that verl trained an adapter of, with the adapter added; None for other folders.

    verl 0.9.1 writes the parameters of `peft`'s modules under their own names into the folder's safetensors, where
    transformers knows none of them, and the adapter's scale beside it.
    """
    from safetensors.torch import load_file

    scale = Path(folder).parent / "lora_train_meta.json"
    if not scale.exists():
        return None
    meta = json.loads(scale.read_text(encoding="utf-8"))
    files = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    state = {name.removeprefix("base_model.model."): t for file in files for name, t in file.items()}
    found = {name.replace(".base_layer.", "."): t for name, t in state.items() if ".lora_" not in name}
    for name, a in state.items():
        module, is_a, end = name.partition(".lora_A.")
        if is_a:
            delta = state[f"{module}.lora_B.{end}"].float() @ a.float() * (meta["lora_alpha"] / meta["r"])
            found[f"{module}.weight"] = found[f"{module}.weight"].float() + delta
    return found


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "merged_adapters")
