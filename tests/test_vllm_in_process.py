"""agent_rl.engines.vllm.in_process, against a stand-in for the package."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_rl.core.trajectory import Completion, FinishReason
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import ConfigError, PolicyError
from agent_rl.policy import TokenPolicy
from agent_rl.policy.vllm import vllm_policy
from agent_rl.rendering import train_tokenizer

STOP = frozenset({2})


@dataclass
class EngineArgs:
    """vLLM's AsyncEngineArgs."""

    model: str
    max_model_len: int | None = None
    logprobs_mode: str = "raw_logprobs"
    dtype: str = "auto"
    enable_chunked_prefill: bool | None = None


@dataclass
class Params:
    """vLLM's SamplingParams."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    seed: int
    logprobs: int
    detokenize: bool
    output_kind: str
    routed_experts_prompt_start: int = 0


@dataclass
class FakeEngine:
    """vLLM's AsyncLLM; answers with [5, 2]."""

    arguments: EngineArgs
    asked: list[tuple[list[int], Params, str]] = field(default_factory=list)
    closed: int = 0
    aborted: int = 0
    trouble: str = ""

    @property
    def model_config(self) -> SimpleNamespace:
        return SimpleNamespace(max_model_len=self.arguments.max_model_len or 40)

    async def generate(self, prompt: dict[str, list[int]], params: Params, request: str) -> AsyncIterator[Any]:
        self.asked.append((prompt["prompt_token_ids"], params, request))
        if self.trouble == "dies":
            raise ValueError("EngineCore died")
        if self.trouble == "empty":
            return
        if self.trouble == "hangs":
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted += 1
        logprobs = [
            {5: SimpleNamespace(logprob=-0.5)},
            {2: SimpleNamespace(logprob=-0.25), 7: SimpleNamespace(logprob=0)},
        ]
        start, stop = params.routed_experts_prompt_start, len(prompt["prompt_token_ids"]) + 1
        routes = np.arange(start * 2, stop * 2, dtype=np.uint8).reshape(stop - start, 2, 1)
        reason = "abort" if self.trouble == "abort" else "stop"
        one = SimpleNamespace(token_ids=[5, 2], logprobs=logprobs, finish_reason=reason, routed_experts=routes)
        yield SimpleNamespace(outputs=[one])

    def shutdown(self) -> None:
        self.closed += 1


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The engines of a fake package vllm."""
    made: list[FakeEngine] = []

    def from_engine_args(arguments: EngineArgs) -> FakeEngine:
        if arguments.dtype == "float7":
            raise ValueError("no float7")
        made.append(FakeEngine(arguments))
        return made[-1]

    contents = {
        "vllm": {"__version__": "0.30.0", "SamplingParams": Params},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": EngineArgs},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=from_engine_args)},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    train_tokenizer(["compute 3*4"], 432).save_pretrained(path)
    return str(path)


def ask(policy: TokenPolicy, seconds: float | None = None, times: int = 1) -> Completion:
    """Sample in one sequence; return the first completion."""

    async def work() -> Completion:
        session = policy.engine.open(7)
        async with asyncio.timeout(seconds):
            found = [await session.sample([1, 3], SamplingParams(max_tokens=8), STOP) for _ in range(times)]
        return found[0]

    return asyncio.run(work())


def test_local_engine_translates_requests_and_answers(engines: list[FakeEngine], folder: str) -> None:
    with vllm_policy(folder, engine={"dtype": "float32"}) as policy:
        found = ask(policy, times=2)
        assert policy.engine.context_limit == 40
    (engine,) = engines
    assert engine.arguments == EngineArgs(folder, None, "processed_logprobs", "float32", enable_chunked_prefill=False)
    assert (found.token_ids, found.logprobs, found.finish_reason) == ((5, 2), (-0.5, -0.25), FinishReason.STOP)
    assert found.routed_experts is not None and found.routed_experts.ravel().tolist() == list(range(6))
    (ids, params, request), (_, later, another) = engine.asked
    assert (params.routed_experts_prompt_start, later.routed_experts_prompt_start) == (
        0,
        3,
    )
    assert ids == [1, 3] and request != another  # of the same sequence
    assert (params.logprobs, params.stop_token_ids, params.max_tokens, params.seed) == (0, [2], 8, 7)
    assert engine.closed == 1


def test_local_engine_keeps_user_settings(engines: list[FakeEngine], folder: str) -> None:
    with vllm_policy(folder, context=24, engine={"enable_chunked_prefill": True}) as policy:
        assert policy.engine.context_limit == 24
    assert engines[0].arguments.enable_chunked_prefill is True and engines[0].arguments.max_model_len == 24


@pytest.mark.parametrize("trouble", ["abort", "empty"])
def test_local_engine_reports_an_abort(engines: list[FakeEngine], folder: str, trouble: str) -> None:
    with vllm_policy(folder) as policy:
        engines[0].trouble = trouble
        assert ask(policy).finish_reason is FinishReason.ABORT


def test_local_engine_closes_at_a_dead_process(engines: list[FakeEngine], folder: str) -> None:
    with vllm_policy(folder) as policy:
        engines[0].trouble = "dies"
        with pytest.raises(PolicyError, match="vLLM failed: ValueError: EngineCore died"):
            ask(policy)
    assert engines[0].closed == 1


def test_local_engine_aborts_a_cancelled_request(engines: list[FakeEngine], folder: str) -> None:
    with vllm_policy(folder) as policy:
        engines[0].trouble = "hangs"
        with pytest.raises(TimeoutError):
            ask(policy, seconds=0.05)
    assert engines[0].aborted == 1


def test_local_engine_explains_impossible_settings(
    engines: list[FakeEngine], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [({"dtpye": "float32"}, r"vLLM 0.30.0 has no engine argument 'dtpye'. Did you mean 'dtype'")]
    wrong += [({"dtype": "float7"}, "vLLM can't run .*: no float7")]
    wrong += [({"logprobs_mode": "raw_logprobs"}, "duplicates another setting: it is processed_logprobs always")]
    for engine, message in wrong:
        with pytest.raises(ConfigError, match=message), vllm_policy(folder, engine=engine):
            pass
    monkeypatch.setitem(sys.modules, "vllm", None)
    with (
        pytest.raises(ConfigError, match=r"lacks vllm: pip install -e '.\[verl\]'.*policy.url"),
        vllm_policy(folder),
    ):
        pass
    assert engines == []


def test_vllm_policy_refuses_missing_tokenizers_first(engines: list[FakeEngine], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer in .*policy.tokenizer"), vllm_policy(str(tmp_path)):
        pass
    assert engines == []
