"""Shared parts of the tests against verl and TRL: their import, or the reason of its failure, and batches of agents."""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

os.environ.update(WANDB_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", VLLM_NO_USAGE_STATS="1")

_missing: list[str] = []


def required(name: str) -> ModuleType:
    """Import a module of verl or TRL; without it skip the test file, or fail it where the comparison is CI's job."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs, at import
            return importlib.import_module(name)
    except ImportError as error:
        reason = f"{name} can't be imported ({error}): `make test-verl` installs it and runs these tests"
    if os.environ.get("CI") and os.environ.get("AGENT_RL_REFERENCE") == "1":
        pytest.fail(reason, pytrace=False)
    _missing.append(reason)
    pytest.skip(reason, allow_module_level=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report each missing library: a number of skipped files does not say that nothing was compared."""
    for reason in dict.fromkeys(_missing):
        terminalreporter.write_line(f"NOT COMPARED: {reason}", yellow=True)


@dataclass(frozen=True)
class Rows:
    """A batch of multi-turn rows; all `[B, T]` are float64, and 0 outside the mask as the trainer leaves them."""

    mask: Tensor
    groups: Tensor
    scores: Tensor
    """`[B]`; one row an episode."""
    rewards: Tensor
    """On sampled tokens."""
    values: Tensor
    advantages: Tensor
    """One number a row, on its sampled tokens; no two are equal."""
    theta: Tensor
    old: Tensor
    mu: Tensor
    reference: Tensor

    @property
    def index(self) -> object:
        """The groups as verl takes them."""
        return self.groups.numpy()

    @property
    def terminal(self) -> Tensor:
        """The scores, on each row's last sampled token; a row without any has its score nowhere."""
        last = self.mask.shape[1] - 1 - self.mask.flip(1).int().argmax(1)
        out = torch.zeros_like(self.theta)
        out[torch.arange(len(last)), last] = self.scores
        return torch.where(self.mask, out, 0.0)


def rows(seed: int, *, spread: float = 0.3, empty: bool = True, singletons: bool = True, extreme: bool = False) -> Rows:
    """Make rows: turns of 1 to 5 sampled tokens with 0 to 4 of the environment's between, padded on the right.

    Args:
        seed: of everything.
        spread: the standard deviation of the gaps between the four policies, in nats.
        empty: include a row with nothing sampled, and one with a single token.
        singletons: include groups with a single row, which the references treat differently.
        extreme: include gaps of some 100 nats.
    """
    g = torch.Generator().manual_seed(seed)

    def up_to(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(mask.shape, generator=g, dtype=torch.float64)

    def logprobs(of: Tensor) -> Tensor:
        return torch.where(mask, of.clamp(max=-1e-3), 0.0)

    groups = torch.tensor([7, 3, 7, 3, 9, 7, 3, 9, *([5, 11] if singletons else [])])
    mask = torch.zeros(len(groups), 32, dtype=torch.bool)
    for row in mask:
        at = up_to(0, 3)  # an environment's message may come first
        for _ in range(up_to(1, 4)):
            length = up_to(1, 5)
            row[at : at + length] = True
            at += length + up_to(0, 4)
    if empty:
        mask[1], mask[4] = False, torch.arange(32) == 2
    old = -normal().exp()
    shocks = normal(100.0) * (torch.rand(mask.shape, generator=g) < 0.1) if extreme else 0.0
    scores = torch.randn(len(groups), generator=g, dtype=torch.float64)
    return Rows(
        mask=mask,
        groups=groups,
        scores=scores,
        rewards=torch.where(mask, normal(), 0.0),
        values=normal(),
        advantages=torch.where(mask, torch.randn(len(groups), generator=g, dtype=torch.float64)[:, None], 0.0),
        theta=logprobs(old + normal(spread) + shocks),
        old=logprobs(old),
        mu=logprobs(old + normal(spread) - shocks),
        reference=logprobs(old + normal(spread)),
    )


def slope(loss: Tensor, by: Tensor) -> Tensor:
    """The gradient of a loss."""
    (gradient,) = torch.autograd.grad(loss, by)
    return gradient


def same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> None:
    """Assert equality but for rounding; references that compute in float32 need a tolerance."""
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)
