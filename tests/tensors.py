"""Writing small tensors down, and comparing results with numbers worked out by hand."""

from types import SimpleNamespace

import torch
from torch import Tensor

from agent_rl.algorithms.components import aggregation, reads_of
from agent_rl.algorithms.objectives.base import Sequences


def t64(rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def i64(rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def bits(*rows: str) -> Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


def same(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance, equal_nan=True)


def token_loss(objective, logprobs, old, mu, advantages, mask):
    """Call an objective with those of its arguments that it reads."""
    known = {"logprobs": logprobs, "old_logprobs": old, "rollout_logprobs": mu, "advantages": advantages, "mask": mask}
    known["sequences"] = Sequences.of(mask)
    return objective(*(known[name] for name in reads_of(objective)))


def aggregate(chosen, loss, mask, whole, prompt_shares=None):
    """Aggregate a loss by a component's name, or its name and knobs."""
    part = aggregation.bind(aggregation.check(chosen))
    known = SimpleNamespace(
        loss=loss, mask=mask, whole=whole, prompt_shares=prompt_shares, sequence_tokens=mask.sum(-1)
    )
    return part(known)
