"""agent_rl.backends.verl.driver.canary: servers that serve other weights than the trainer's stop the run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from agent_rl.backends.verl.driver import canary as module
from agent_rl.backends.verl.driver.canary import TOKENS, Canary, canary_ids, canary_rows, check_rollout_gap
from agent_rl.errors import InfrastructureError
from agent_rl.rendering.tokenizer import train_tokenizer

IDS = [*range(3, 4 + TOKENS)]


class Trainer:
    """verl's actor workers: four data-parallel ranks that score token `t` with `-t / 10`."""

    def __init__(self) -> None:
        self._dispatch_info: dict[str, list[int]] = {}
        self.scored: list[TensorDict] = []

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        return {"actor": [0, 0, 1, 1, 2, 2, 3, 3]}[mesh]

    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        self.scored.append(data)
        rows = [-ids.roll(-1) / 10 for ids in data["input_ids"].unbind()]  # at the position before each token
        return TensorDict({"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, len(data))


class Server:
    """verl's vLLM server, whose log-probabilities are off by so much after a sync."""

    def __init__(self, off: float = 0.0) -> None:
        self.off = off
        self.generate = SimpleNamespace(remote=self.answer)

    def answer(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Any:
        assert sampling_params == {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
        scores = [[-token / 10 + self.off] for token in prompt_ids[1:]] + [[0.0]]  # verl pads the last
        return SimpleNamespace(extra_fields={"prompt_logprobs": scores}, stop_reason="completed")


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ray, "get", lambda answers, timeout: answers)


def test_canary_passes_servers_within_the_limit() -> None:
    trainer, metrics = Trainer(), dict[str, float]()
    with Canary(IDS, trainer, [Server(0.05), Server(-0.1)], limit=0.2).watch_sync(metrics):
        assert len(trainer.scored) == 1  # before the sync, while servers sleep
    assert metrics == {"canary/gap": pytest.approx(0.1, abs=1e-5)}
    (data,) = trainer.scored
    assert len(data) == 4 and data["temperature"] == 1.0  # a row for each rank
    assert int(data["response_mask"].sum()) == 4 * TOKENS


@pytest.mark.parametrize("off", [0.3, math.nan])
def test_canary_names_the_server_and_both_numbers(off: float) -> None:
    server = Server()
    with (
        pytest.raises(
            InfrastructureError, match=r"server 1 does not serve .* 64 fixed tokens .*max_rollout_gap=0.2"
        ) as said,
        Canary(IDS, Trainer(), [Server(), server], limit=0.2).watch_sync({}),
    ):
        server.off = off  # the sync breaks it
    assert "max_rollout_gap=0.2" in str(said.value)
    if off == 0.3:
        assert "0.300 nats" in str(said.value) and "(mean -3.250 against -3.550)" in str(said.value)


def test_canary_names_a_refusing_server() -> None:
    server = Server()
    server.generate.remote = lambda **asked: SimpleNamespace(extra_fields={}, stop_reason="aborted")
    with (
        pytest.raises(InfrastructureError, match=r"server 0 refused .* ended with 'aborted'"),
        Canary(IDS, Trainer(), [server], limit=0.2).watch_sync({}),
    ):
        pass


def test_canary_ids_fill_tokens_or_short_context() -> None:
    tokenizer = train_tokenizer(["some words for a tokenizer"], 432)
    assert len(canary_ids(tokenizer, 8192)) == TOKENS + 1
    assert canary_ids(tokenizer, 32) == canary_ids(tokenizer, 8192)[:31]
    short = SimpleNamespace(encode=lambda text, add_special_tokens: [5, 6, 7])
    assert canary_ids(short, 12) == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6]


def test_rollout_gap_stops_the_run_at_first_update() -> None:
    check_rollout_gap({"agent_rl/rollout_gap": [0.01, 3.0]}, 0.2, 7)  # later updates may move away
    check_rollout_gap({}, 0.2, 7)  # an objective that reports none
    with pytest.raises(InfrastructureError, match=r"step 7 .* 1.120 nats .*max_rollout_gap=0.2"):
        check_rollout_gap({"agent_rl/rollout_gap": [1.12]}, 0.2, 7)


def test_canary_rows_are_all_alike() -> None:
    data = canary_rows([5, 6, 7], 2)
    assert [row.tolist() for row in data["input_ids"].unbind()] == [[5, 6, 7]] * 2
    assert [row.tolist() for row in data["position_ids"].unbind()] == [[0, 1, 2]] * 2
    assert [row.tolist() for row in data["prompts"].unbind()] == [[5]] * 2
