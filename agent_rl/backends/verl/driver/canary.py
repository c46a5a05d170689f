"""Canary: after each weight sync, every inference server must score fixed tokens as the trainer does.

A server that loaded its weights wrongly answers every request, and training continues on nonsense: the trainer's own
metrics don't show it. The trainer scores the tokens before the sync, while the servers leave it its memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from agent_rl.backends.verl.worker.routes import RECORD, REPLAY
from agent_rl.errors import InfrastructureError

TOKENS = 64
"""How many tokens are scored."""
TEXT = (
    "The quick brown fox jumps over the lazy dog. 12 + 34 = 46, and 7 * 8 = 56.\n"
    "def area(width, height):\n    return width * height\n\n"
    '{"name": "search", "arguments": {"query": "rivers of Asia"}}\n'
    "Paris is the capital of France; water boils at 100 degrees. Why did the ship turn north? The captain kept quiet."
)
"""Prose, numbers, code and a tool call: likely and unlikely tokens. It is repeated if it has too few."""
ROLLOUT_GAP = "actor/agent_rl/rollout_gap"
"""The mean distance of log-probabilities between training and rollout, over the tokens with a gradient."""
PATIENCE_S = 60.0
"""How long a server may take to answer; the answer itself is one short prefill."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Fixed tokens, and who scores them.

    Args:
        ids: the tokens; the first is only read.
        trainer: verl's worker group of the actor.
        servers: handles of the inference servers, one per replica.
        limit: the largest mean distance of log-probabilities between the trainer and a server, in nats.
    """

    ids: Sequence[int]
    trainer: Any
    servers: Sequence[Any]
    limit: float

    @contextmanager
    def watch_sync(self, metrics: dict[str, float]) -> Iterator[None]:
        """Compare every server with the trainer across the weight sync in the `with` block; add `canary/gap`.

        Raises:
            InfrastructureError: if a server does not answer, or its weights are not the trainer's.
        """
        expected = self.score_by_trainer()
        yield
        found = self.score_by_servers()
        gaps = [float((logprobs - expected).abs().mean()) for logprobs in found]
        metrics["canary/gap"] = max(gaps)
        for number, (gap, logprobs) in enumerate(zip(gaps, found, strict=True)):
            if not gap <= self.limit:  # a NaN is no good either
                raise InfrastructureError(
                    f"inference server {number} does not serve the trainer's weights: over {len(expected)} fixed "
                    f"tokens its log-probabilities are {gap:.3f} nats from the trainer's on average (mean "
                    f"{float(logprobs.mean()):.3f} against {float(expected.mean()):.3f}), and max_rollout_gap="
                    f"{self.limit:g} is allowed. Its weight reload is broken, or it computes in another precision: "
                    "mend it, or raise max_rollout_gap"
                )

    def score_by_trainer(self) -> Tensor:
        """Return the trainer's log-probabilities of the tokens after the first."""
        data = canary_rows(self.ids, data_parallel_size(self.trainer))
        scored: TensorDict = self.trainer.compute_log_prob(data)
        logprobs: Tensor = response_from_nested(scored["log_probs"], data["response_mask"])
        return logprobs.unbind()[0].float().cpu()

    def score_by_servers(self) -> list[Tensor]:
        """Return the same of every server."""
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
        answers = [
            server.generate.remote(prompt_ids=[*self.ids], sampling_params=dict(params), request_id=uuid.uuid4().hex)
            for server in self.servers
        ]
        try:
            outputs = ray.get(answers, timeout=PATIENCE_S)
        except GetTimeoutError:
            raise InfrastructureError(
                f"an inference server has not scored {len(self.ids)} tokens within {PATIENCE_S:.0f} s of a weight sync"
            ) from None
        scores = [output.extra_fields.get("prompt_logprobs") for output in outputs]
        if None in scores:
            raise InfrastructureError(
                f"inference server {scores.index(None)} refused to score tokens after a weight sync: "
                f"it ended with '{outputs[scores.index(None)].stop_reason}'"
            )
        return [torch.tensor(rows, dtype=torch.float32)[: len(self.ids) - 1, 0] for rows in scores]


def check_rollout_gap(reported: Mapping[str, Sequence[float]], limit: float, step: int) -> None:
    """Check that a step's first update begins with log-probabilities like those of the rollout.

    Args:
        reported: of the updates of one call to verl's actor, the first one's first.
        limit: the largest mean distance, in nats, with the same weights on both sides.
        step: for the message.

    Raises:
        InfrastructureError: if the distance is larger.
    """
    gap = next(iter(reported.get(ROLLOUT_GAP.removeprefix("actor/"), ())), 0.0)
    if not gap <= limit:
        raise InfrastructureError(
            f"step {step} learns from tokens that other weights sampled: at its first update their log-probabilities "
            f"are {gap:.3f} nats from the rollout's on average, and max_rollout_gap={limit:g} is allowed. The weight "
            "reload of the inference servers is broken, or they compute in another precision: mend it, or raise "
            "max_rollout_gap"
        )


def canary_ids(tokenizer: Any, context: int) -> list[int]:
    """Return the fixed tokens: `TOKENS` and one before them, or fewer in a short context."""
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
    wanted = min(TOKENS + 1, context - 1)
    return (ids * (wanted // len(ids) + 1))[:wanted]


def canary_rows(ids: Sequence[int], copies: int) -> TensorDict:
    """Return the tokens as rows of verl's, one for each data-parallel rank, to be scored at temperature 1."""
    columns = {
        "prompts": ids[:1],
        "responses": ids[1:],
        "input_ids": ids,
        "position_ids": range(len(ids)),
        "response_mask": [1] * (len(ids) - 1),
        "loss_mask": [1] * (len(ids) - 1),
    }
    nested = {name: _nested(values, copies) for name, values in columns.items()}
    data = TensorDict(nested, batch_size=copies)
    one_row = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}  # whatever the run's own micro-batches are
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0, **one_row)
    tu.assign_non_tensor(data, **{REPLAY: "", RECORD: ()})
    return data


def _nested(values: Sequence[int], copies: int) -> Tensor:
    return torch.nested.as_nested_tensor([torch.tensor([*values]) for _ in range(copies)], layout=torch.jagged)


def data_parallel_size(workers: Any) -> int:
    """Return how many parts verl cuts a batch into, for the ranks of the actor's workers."""
    if "actor" not in workers._dispatch_info:  # as verl's `_balance_batch` does
        workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
    return int(max(workers._dispatch_info["actor"])) + 1
