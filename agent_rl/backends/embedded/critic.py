"""Critic: a value head, on the policy's trunk or on one of its own, and how it is trained and stored."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import skip_init
from transformers import PreTrainedModel

from agent_rl.algorithms import Algorithm, Denominators, Rows
from agent_rl.algorithms.batch import CriticTargets
from agent_rl.backends.embedded.optimizer import Optimizer, OptimizerConfig
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.engines.embedded.parts import body_of, head_of, states_of
from agent_rl.moe.routes import routed

FILE = "critic.pt"


class Critic(nn.Module):
    """Predicts the return from the state before each token. It begins with 0 for every state.

    So it does in a run that starts from another run's checkpoint, as a return means something else there: only a run
    that is resumed continues with its critic.
    """

    trunk: nn.Module | None
    """A separate critic's own; None for one that reads the policy's states."""

    def __init__(self, policy: PreTrainedModel, algorithm: Algorithm, config: OptimizerConfig) -> None:
        super().__init__()
        critic = algorithm.config.critic
        self.algorithm = algorithm
        self.trunk = copy.deepcopy(body_of(policy)) if critic.where == "separate" else None
        # skip_init: the default one would draw from torch's global generator
        self.head: nn.Linear = skip_init(  # type: ignore[no-untyped-call]
            nn.Linear, head_of(policy).weight.shape[1], 1, dtype=torch.float32, device=policy.device
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.optimizer = Optimizer(self, config.model_copy(update={"lr": critic.lr, "muon_lr": 0.0}))
        self._sums: dict[str, float] = {}

    def forward(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """Return the value of the state before each token, float32 `[B, T]`, from the ids, int64 `[B, T]`.

        `states` are `Scores.hidden` of the policy, `[B, T, hidden]`; a separate critic does not look at them.
        """
        return self._read(states if self.trunk is None else _states(self.trunk, token_ids))

    @torch.no_grad()
    def values(
        self,
        policy: PreTrainedModel,
        rows: Rows,
        token_budget: int,
        precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 - frozen
        given: Tensor | None = None,
    ) -> Tensor:
        """Return the values at the sampled tokens of a whole batch, float32 `[N]`; 0 elsewhere.

        `token_budget` padded tokens at a time. A shared critic reads the policy's trunk as the update will: in this
        precision, on the routes `given` of a mixture of experts, `[N, layers, top_k]`.
        """
        whole = torch.zeros_like(rows.rollout_logprobs)
        for indices in rows.cut_rows(token_budget):
            part, grid = rows.padded(indices, self.head.weight.device), rows.grid(torch.tensor(indices))
            if self.trunk is not None:
                states = _states(self.trunk, part.token_ids)
            else:
                routes = None if given is None else grid.lay(given, -1)
                with precision.region(part.token_ids.device), routed(policy, routes):
                    states = pad(states_of(policy, part.token_ids[:, :-1]), (0, 0, 1, 0))
            values = self._read(states)
            grid.put(torch.where(part.loss_mask, values, 0.0), whole)
        return whole

    def loss(self, states: Tensor, token_ids: Tensor, targets: CriticTargets, whole: Denominators) -> Tensor:
        """Return a micro-batch's share of the value loss; its metrics are kept for `step`."""
        terms = self.algorithm.value_loss(self(token_ids, states), targets, whole)
        for name, total in terms.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total / whole.valued
        return terms.loss

    def step(self, scale: float) -> dict[str, float]:
        """Update from the gradients of a whole batch, at `scale` times the learning rate; return metrics."""
        metrics = {f"critic/{name}": value for name, value in self._sums.items()}
        self._sums = {}
        return metrics | {"critic/grad_norm": self.optimizer.step(scale)}

    def discard(self) -> None:
        """Drop the gradients of a batch, and its metrics."""
        self._sums = {}
        self.optimizer.discard()

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into a checkpoint's folder, beside the policy."""
        torch.save({"weights": self.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Load the state that `save` wrote."""
        state = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        self.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _read(self, states: Tensor) -> Tensor:
        values: Tensor = self.head(states.to(self.head.weight.dtype))[..., 0]
        return values


def _states(trunk: nn.Module, token_ids: Tensor) -> Tensor:
    """Return the state before each token, `[B, T, hidden]`; 0 before the first, as in `Scores.hidden`."""
    states: Tensor = trunk(input_ids=token_ids[:, :-1]).last_hidden_state
    return pad(states, (0, 0, 1, 0))
