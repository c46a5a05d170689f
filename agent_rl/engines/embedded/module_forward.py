"""Forwards through a model's own modules, for every family that has no fused one; and the choice between them all.

`ModuleForward` redirects the attention to the engine's cache, which families allow whose layers attend through
transformers' attention interface. `WholeForward` feeds whole sequences again in every step: slow, and right for
whatever is causal. Which of the two a model gets is found by running it beside the model's own forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from agent_rl.engines.embedded.forward import Forward, FusedForward, StepOutput, is_fusible
from agent_rl.engines.embedded.graphs import GraphedForward, records_steps
from agent_rl.engines.embedded.kv_cache import KVCache
from agent_rl.engines.embedded.layout import Feed, Layout
from agent_rl.engines.embedded.pages import Table
from agent_rl.engines.embedded.parts import head_of, rows_of, states_of
from agent_rl.errors import ConfigError
from agent_rl.moe.routes import Routes, recorded, routed

_log = logging.getLogger(__name__)

PROBE = (5, 1, 3)
"""Tokens of the turns in which a forward is compared with the model's own."""
PROBE_WINDOW = 3
"""What a sliding window is set to for that comparison: all of its own length would take as many tokens."""
WHOLE = 4096
"""Padded tokens that `WholeForward` feeds at a time."""


def make_forward(model: PreTrainedModel, cache: KVCache) -> Forward:
    """Choose the fastest forward that computes what the model's own does.

    Raises:
        ConfigError: if the model can't be sampled from left to right: it isn't causal, or needs more than token ids.
    """
    known = _attends_as_known(model, cache.max_len)
    if is_fusible(model.config) and known:
        return (GraphedForward if records_steps(model, cache.device) else FusedForward)(model, cache)
    require_causal(model)
    if known and _agrees(model, cache) and _slides_alike(model, cache):
        return ModuleForward(model, cache)
    _log.warning(
        "%s attends in a way that the engine's cache doesn't know: every step feeds whole sequences again, which is "
        "exact and slow",
        model.config.model_type,
    )
    return WholeForward(model, cache)


class _OwnModules:
    """What runs a model's own modules: only the head's weights may be a copy."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.refresh()

    def refresh(self) -> None:
        """Take over the head, in float32 at least; all else is the model's own."""
        self.head = head_of(self.model).widened()

    def release(self) -> None:
        """Give back the head if it is a wider copy."""
        self.head = head_of(self.model)


class ModuleForward(_OwnModules):
    """The model's own modules, with only their attention redirected to the engine's cache."""

    @torch.no_grad()
    def __call__(self, layout: Layout) -> StepOutput:
        """Feed `layout` and return the next-token logits."""
        with _evaluated(self.model), recorded(self.model) as routes, _attending(self.model):
            _STEP.append((self.cache, layout))
            try:
                states = states_of(self.model, layout.ids[None], position_ids=layout.positions[None])[0]
            finally:
                _STEP.pop()
        logits = self.head.logits(states if layout.last is None else states[layout.last])
        return StepOutput(logits, torch.stack(routes.own, 1) if routes.own else None)


class WholeForward(_OwnModules):
    """The model's own forward over whole sequences, in every step again: nothing but ids is kept between steps."""

    @torch.no_grad()
    def __call__(self, layout: Layout) -> StepOutput:
        """Feed `layout` and return the next-token logits."""
        tokens = [torch.tensor(feed.table.ids, device=layout.ids.device) for feed in layout.feeds]
        logits, experts = list[Tensor](), list[Tensor]()
        size = max(1, WHOLE // max(map(len, tokens)))
        with _evaluated(self.model):
            for begin in range(0, len(tokens), size):
                part, feeds = tokens[begin : begin + size], layout.feeds[begin : begin + size]
                ids = nn.utils.rnn.pad_sequence(part, batch_first=True)
                end = torch.tensor([len(context) for context in part], device=ids.device)
                with recorded(self.model) as routes:
                    states = states_of(self.model, ids)
                logits.append(self.head.logits(states[torch.arange(len(ids)), end - 1]))
                if routes.own:
                    own = torch.stack(routes.own, 1).view(*ids.shape, len(routes.own), -1)
                    first = torch.tensor([feed.start for feed in feeds], device=ids.device)
                    fed = torch.arange(ids.shape[1], device=ids.device)
                    experts.append(own[(fed >= first[:, None]) & (fed < end[:, None])])
        return StepOutput(torch.cat(logits)[list(layout.wanted)], torch.cat(experts) if experts else None)


def _attend_in_cache(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **kwargs: object
) -> tuple[Tensor, None]:
    cache, layout = _STEP[-1]
    if kwargs.get("position_bias") is not None:
        raise ConfigError("the engine's cache can't attend with position_bias")
    softcap, sinks = cast(float | None, kwargs.get("softcap")), cast(Tensor | None, kwargs.get("s_aux"))
    window = cast(int | None, kwargs.get("sliding_window"))
    scale, index = kwargs.get("scaling"), module.layer_idx
    scale = scale if isinstance(scale, (int, float)) else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    assert isinstance(index, int)
    return cache.attend(index, q * scale, k, v, layout, window=window, softcap=softcap, sinks=sinks)[None], None


_INTERFACE = "agent_rl_cache"
AttentionInterface.register(_INTERFACE, _attend_in_cache)
_STEP: list[tuple[KVCache, Layout]] = []
"""The step under way; not every family hands further arguments down to its attention."""


@contextmanager
def _attending(model: PreTrainedModel) -> Iterator[None]:
    """Let every layer attend through the cache."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values()
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = _INTERFACE
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


@contextmanager
def _evaluated(model: PreTrainedModel) -> Iterator[None]:
    """Leave training mode for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _attends_as_known(model: PreTrainedModel, max_len: int) -> bool:
    """Return whether every layer attends to all before it, or to a sliding window of that, in sequences of a length."""
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        return False
    chunk = getattr(config, "attention_chunk_size", None) or max_len
    return chunk >= max_len or (bool(kinds) and "chunked_attention" not in kinds)


@torch.no_grad()
def require_causal(model: PreTrainedModel) -> None:
    """Refuse a model that sees later tokens, or can't be run on token ids alone.

    Raises:
        ConfigError: with the way out.
    """
    kind, ids = model.config.model_type, _probe_ids(model)
    try:
        with _evaluated(model), recorded(model) as routes:
            whole = states_of(model, ids)
        with _evaluated(model):
            logits = model(input_ids=ids).logits
            is_causal = any(_is_part(model, ids, whole, given) for given in _ways(routes))
        problem = ""
        if not is_causal:
            problem = "its states depend on later tokens (is_decoder=false in its config.json?)"
        elif not _close(head_of(model).logits(whole), logits):
            problem = "its logits are no linear map of its states"
    except ConfigError:
        raise
    except Exception as error:  # whatever a family raises that wants more than ids
        problem = f"it can't be run on token ids alone, {type(error).__name__}: {str(error)[:120]}"
    if problem:
        raise ConfigError(f"{kind} can't be sampled and trained: {problem}; start from a causal language model")


def _is_part(model: PreTrainedModel, ids: Tensor, whole: Tensor, given: Tensor | None) -> bool:
    """Return whether the states of all `ids` begin with those of the first ones alone."""
    with routed(model, given):
        return _close(whole[:, : PROBE[0]], states_of(model, ids[:, : PROBE[0]]))


def _ways(routes: Routes) -> list[Tensor | None]:
    """Return how to compare with a forward: as the routers choose, and else as they chose there, `[1, T, layers, k]`.

    In bfloat16 rounding alone changes what they choose, and with it what a mixture computes.
    """
    return [None, torch.stack(routes.own, 1)[None]] if routes.own else [None]


@torch.no_grad()
def _agrees(model: PreTrainedModel, cache: KVCache) -> bool:
    """Return whether `ModuleForward` computes what the model does, over several turns of one sequence."""
    ids = _probe_ids(model)
    try:
        with _evaluated(model), recorded(model) as routes:
            expected = head_of(model).logits(states_of(model, ids))[0]
        return any(_agrees_so(model, cache, ids, expected, given) for given in _ways(routes))
    except Exception as error:  # of the model's code, which is asked for what it may not be made for
        _log.debug("%s doesn't run over the engine's cache", model.config.model_type, exc_info=error)
        return False
    finally:
        cache.clear()


def _agrees_so(model: PreTrainedModel, cache: KVCache, ids: Tensor, expected: Tensor, given: Tensor | None) -> bool:
    """Return whether `ModuleForward` computes the expected logits, with the experts that are given, if any are."""
    cache.clear()
    forward, start, table = ModuleForward(model, cache), 0, Table()
    for count in PROBE:
        fed = ids[0, start : start + count].tolist()
        cache.pages.write(table, fed)
        with routed(model, None if given is None else given[:, start : start + count]):
            logits = forward(cache.layout([Feed(table, fed)])).logits[0]
        start += count
        if not _close(logits, expected[start - 1]):
            return False
        cache.pages.settle()
    return True


def _slides_alike(model: PreTrainedModel, cache: KVCache) -> bool:
    """Return whether no window is shorter than the cache's sequences, or `ModuleForward` keeps to it as the model does.

    A window of which neither shows anything may be known to the model by another name: then they don't.
    """
    config = model.config.get_text_config()
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None) or cache.max_len
    if window >= cache.max_len or (kinds and "sliding_attention" not in kinds):
        return True
    ids = _probe_ids(model)
    with torch.no_grad(), _evaluated(model):
        before = states_of(model, ids)
        with _sliding(model, PROBE_WINDOW):
            return not _close(states_of(model, ids), before) and _agrees(model, cache)


@contextmanager
def _sliding(model: PreTrainedModel, window: int) -> Iterator[None]:
    """Let every layer that slides see `window` positions."""
    owners = {id(m): m for m in (model.config.get_text_config(), *model.modules())}.values()
    before = [(owner, w) for owner in owners if isinstance(w := getattr(owner, "sliding_window", None), int)]
    for owner, _ in before:
        owner.sliding_window = window
    try:
        yield
    finally:
        for owner, own in before:
            owner.sliding_window = own


def _probe_ids(model: PreTrainedModel) -> Tensor:
    """Return ids `[1, sum(PROBE)]` that differ from one another as far as the vocabulary allows."""
    rows = rows_of(model)
    spread = torch.arange(1, sum(PROBE) + 1, device=model.device) * max(1, rows // (sum(PROBE) + 2))
    return spread[None] % rows


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two results agree but for rounding."""
    tolerance = 1e-4 if b.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
