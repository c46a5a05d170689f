"""Fine-tuning: which of a model's parameters are trained, and in which format the model is held."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agent_rl.config import Section
from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

ModelFormat = Literal["float32", "bfloat16"]
"""What a model's weights are held and computed in."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685), by `peft`: the model's own weights stay as they are.

    There is no dropout: it would make the policy that is trained another one than the policy that was sampled. An
    adapter takes about ten times the learning rate of the weights themselves (Schulman et al. 2025, "LoRA Without
    Regret"); `optimizer.lr` is what it is set to.
    """

    rank: int = Field(16, ge=1)
    """The inner size of an adapter's two matrices."""
    alpha: float = Field(32.0, gt=0)
    """What the product of the two matrices is scaled by, over `rank`."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The modules that get an adapter, by the ends of their names, such as `[q_proj,v_proj]`; `all-linear` for every
    linear one but the head. The experts of a mixture are none, nor what is called as they are (its shared experts): the
    attention gets adapters."""
    dora: bool = False
    """Whether magnitude and direction are trained apart (DoRA, Liu et al. 2024, arXiv 2402.09353)."""


class FreezeConfig(Section):
    """Which parameters keep their values: they take no gradient and have no optimizer state."""

    embeddings: bool = False
    """The input embeddings, and a head that is tied to them."""
    layers: int = Field(0, ge=0)
    """The first ones. Gradients end above them, so that embeddings, those of positions among them, learn nothing from
    below; a head that is tied to them still trains them."""


_MORE_THAN_LINEAR = re.compile("Router|Grouped")
"""Classes that inherit a linear module's weight and return something else."""


def new_adapter(model: PreTrainedModel, lora: LoraConfig, freeze: FreezeConfig, seed: int) -> None:
    """Put a fresh adapter into a model; the model computes what it did.

    Raises:
        ConfigError: if the model lacks a module that should get one, or `peft` is missing.
    """
    require_peft()
    import peft

    from agent_rl.engines.embedded.adapters import add_adapter

    count = model.config.get_text_config(decoder=True).num_hidden_layers
    layers, linear = range(freeze.layers, count), linear_names(model)
    targets = linear if lora.targets == "all-linear" else lora.targets
    names = [f".{name}" for name, _ in model.named_modules()]
    said = f"lora.targets={lora.targets}: the model's linear modules are {', '.join(linear)}"
    if missing := [target for target in targets if not any(name.endswith(f".{target}") for name in names)]:
        raise ConfigError(f"{said}; none is called {', '.join(missing)}")  # peft passes over them if it finds others
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # a whole number is asked for, and any serves
        target_modules=list(targets),
        layers_to_transform=list(layers) if freeze.layers else None,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            add_adapter(model, config)
    except ValueError as error:
        raise ConfigError(f"{said}; peft says: {str(error).splitlines()[0][:300]}") from error
    # the engine and the losses read the weights of these, not what an adapter adds
    parts = [("embeddings", model.get_input_embeddings()), ("head", model.get_output_embeddings())]
    parts += [("experts", module) for module in model.modules() if hasattr(module, "parameter_name")]
    for part, module in parts:
        if hasattr(module, "base_layer"):
            raise ConfigError(f"lora.targets={lora.targets} names the model's {part}, which can have no adapter here")


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the ends of the names of a model's linear modules, of `ffn.0` both parts, but for its head.

    Nor what is called as the weights of a mixture's experts are or were, such as its shared experts: `peft` takes such
    a name for all of them.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = (name for name, m in model.named_modules() if isinstance(m, (torch.nn.Linear, Conv1D)) and m is not head)
    plain = (name for name in linear if not _MORE_THAN_LINEAR.search(type(model.get_submodule(name)).__name__))
    names = {(re.search(r"[^.]+(\.\d+)*$", name) or [name])[0] for name in plain}
    experts = {name.rpartition(".")[2] for name, weight in model.named_parameters() if weight.ndim == 3}
    fused = {"gate", "gate_proj", "up_proj"} if "gate_up_proj" in experts else set[str]()
    return sorted(names - experts - fused)


def require_peft() -> None:
    """Refuse an adapter where `peft` is missing.

    Raises:
        ConfigError: with the command that installs it.
    """
    import importlib.util

    if importlib.util.find_spec("peft") is None:
        raise ConfigError("lora needs peft: pip install -e '.[train]'")


def freeze_parameters(model: PreTrainedModel, freeze: FreezeConfig) -> None:
    """Take the frozen parameters out of training.

    Raises:
        ConfigError: if the model has not so many layers, or nothing is left to train.
    """
    from agent_rl.engines.embedded.parts import head_of, layers_of

    embeddings = model.get_input_embeddings()
    if freeze.layers:
        layers = layers_of(model)
        if freeze.layers > len(layers):
            raise ConfigError(f"freeze.layers={freeze.layers}: the model has {len(layers)}")
        layers[: freeze.layers].requires_grad_(False)
        layers[freeze.layers - 1].register_forward_hook(_cut)  # what is added to the embeddings: GPT-2's positions
    tied = head_of(model).weight is embeddings.weight
    if freeze.embeddings or (freeze.layers and not tied):
        embeddings.weight.requires_grad_(False)
    if freeze.layers:
        embeddings.register_forward_hook(_cut)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        what = f"freeze.layers={freeze.layers}, freeze.embeddings={str(freeze.embeddings).lower()}"
        raise ConfigError(f"{what}: nothing is left to train, as adapters are in layers alone; freeze fewer")


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Prepare a model for `checkpointed`. It shares no prompts from then on (`prompts.is_exact`): do it before any use.

    Raises:
        ConfigError: if transformers can't do it for this model.
    """
    from agent_rl.engines.embedded.parts import body_of

    if getattr(body_of(model), "gradient_checkpointing", False):
        return
    try:
        # transformers 5.23's name, and 5.17's
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"gradient_checkpointing: {error}") from error
    model.disable_input_require_grads()  # the backward would run through frozen layers


@contextmanager
def checkpointed(model: PreTrainedModel) -> Iterator[None]:
    """Keep no activations of layers in the forward passes inside: their backward computes them again.

    transformers does so for a layer in training mode. Only the layers themselves are put into it, and they leave it
    before they compute, here and again in the backward, so that no dropout begins.

    Raises:
        ConfigError: if transformers can't do it for this model.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    enable_checkpointing(model)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    checkpoints = [layer._gradient_checkpointing_func for layer in layers]
    for layer, checkpoint in zip(layers, checkpoints, strict=True):
        layer.training, layer._gradient_checkpointing_func = True, partial(_spared, layer, checkpoint)
    try:
        yield
    finally:
        for layer, checkpoint in zip(layers, checkpoints, strict=True):
            layer.training, layer._gradient_checkpointing_func = False, checkpoint


def _spared(
    layer: nn.Module, checkpoint: Callable[..., object], compute: Callable[..., object], *inputs: object
) -> object:
    """Checkpoint a layer that leaves training mode while it computes."""

    def evaluated(*inputs: object) -> object:
        before, layer.training = layer.training, False
        try:
            return compute(*inputs)
        finally:
            layer.training = before

    return checkpoint(evaluated, *inputs)


def _cut(
    module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[object, ...]
) -> Tensor | tuple[object, ...]:
    """Let no gradient through; some families' layers return more than states."""
    if isinstance(output, tuple):
        return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in output)
    return output.detach()
