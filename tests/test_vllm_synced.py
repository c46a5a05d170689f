"""Weights that reach vLLM's worker through shared memory; what engine=vllm refuses. The real one: tests/e2e."""

from __future__ import annotations

import gc
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from agent_rl.backends.embedded.check import check_run
from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.settings import training_config
from agent_rl.engines.vllm import synced
from agent_rl.engines.vllm.receiver import WeightReceiver
from agent_rl.errors import ConfigError
from tests.engines import TINY


class Worker(WeightReceiver):
    """A worker whose model is one of transformers', with a head that computes with a packed copy of its weight."""

    def __init__(self, model: nn.Module) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.renewed = 0
        model.lm_head.cpu_linear = None
        model.lm_head.quant_method = SimpleNamespace(process_weights_after_loading=self.renew)
        self.model_runner = SimpleNamespace(reload_weights=self.reload, get_model=lambda: model)

    def reload(self, weights_iterator):
        self.loaded = {name: weight.clone() for name, weight in weights_iterator}

    def renew(self, layer):
        self.renewed += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_as_they_are(dtype: torch.dtype) -> None:
    model = make_model(ModelConfig(**TINY), 432, seed=0).to(dtype)
    places, size = synced._layout(model.named_parameters())
    shared, worker = SharedMemory(create=True, size=size), Worker(model)
    try:
        synced.copy_weights(model, shared, places)
        worker.receive_weights(shared.name, [[*place] for place in places])  # as msgpack brings them
        assert worker.renewed == 1 and [*worker.loaded] == [name for name, _ in model.named_parameters()]
        assert all(torch.equal(worker.loaded[name], weight) for name, weight in model.named_parameters())
    finally:
        gc.collect()
        worker.shared.close()
        shared.close()
        shared.unlink()


def test_arguments_of_the_engine_have_defaults_beside_training() -> None:
    model = make_model(ModelConfig(**TINY), 432, seed=0)
    found = synced._arguments(model, 7, {"enforce_eager": True})
    assert (found["dtype"], found["max_num_seqs"], found["gpu_memory_utilization"]) == ("float32", 7, synced.SHARE)
    with pytest.raises(ConfigError, match=r"engine_args\.load_format is set by engine=vllm itself"):
        synced._arguments(model, 7, {"load_format": "auto"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_args": {"enforce_eager": True}}, "engine_args are vLLM's"),
        ({"engine": "vllm", "rollout": {"weights": "int4"}}, "simulated by engine=torch only"),
        ({"engine": "sglang"}, "'torch' or 'vllm'"),
    ],
)
def test_settings_of_the_engine_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training_config("calculator-v0", **settings)


def test_run_without_vllm_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_rl.backends.embedded.check.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make setup-verl"):
        check_run(training_config("calculator-v0", engine="vllm"))


def test_mixture_of_experts_on_cpu_is_refused() -> None:
    model = make_model(ModelConfig(**TINY | {"architecture": "qwen3_moe", "experts": 4}), 432, seed=0)
    with pytest.raises(ConfigError, match="does not take new weights of a mixture of experts"):
        synced.require_synced(model)
