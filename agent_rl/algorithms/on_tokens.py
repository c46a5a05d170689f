"""What components read of a batch's tokens, and what they return: for tokens, turns or episodes, given to tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from agent_rl.algorithms.advantages.estimate import AdvantageEstimate, TurnAdvantages
from agent_rl.algorithms.advantages.token import settle
from agent_rl.algorithms.batch import Rows
from agent_rl.algorithms.components import Part
from agent_rl.algorithms.experience import Experience
from agent_rl.errors import DefinitionError
from agent_rl.grid import LINES, cut_lengths


def of_tokens(rows: Rows) -> dict[str, Tensor | None]:
    """What components may read of the tokens of rows, by its name."""
    names = ("token_ids", "rollout_logprobs", "rewards", "turns", "versions", "sources")
    return {"mask": rows.loss_mask} | {name: getattr(rows, name) for name in names}


def settled(rows: Rows) -> Tensor:
    """The rewards of rows, moved to sampled tokens, float64 `[N]`."""
    found = torch.zeros_like(rows.rewards)
    for part in cut_lengths(rows.lengths, LINES):
        grid = rows.grid(torch.tensor(part))
        grid.put(settle(grid.lay(rows.rewards), grid.lay(rows.loss_mask)), found)
    return found


def on_tokens(
    part: Part[Tensor | AdvantageEstimate | TurnAdvantages], found: object, x: Experience
) -> Tensor | AdvantageEstimate:
    """Give tokens what an advantage returned for them, their turns or their episodes, `[N]`."""
    rows, size = x.rows, x.rows.loss_mask.shape
    if isinstance(found, AdvantageEstimate) and found.advantages.shape == size:
        return found
    if "values" in part.reads:
        raise DefinitionError(
            f"advantage '{part.name}' reads the critic's values but returned {described(found)}: the critic would "
            "never learn; return an AdvantageEstimate, which has its targets"
        )
    if isinstance(found, TurnAdvantages):
        return _of_turns(found.advantages, rows)
    if isinstance(found, Tensor) and found.shape == x.scores.shape:
        return torch.where(rows.loss_mask, found.nan_to_num(0.0)[rows.episode_of_token], 0.0)
    if isinstance(found, Tensor) and found.shape == size:
        return found
    raise DefinitionError(
        f"advantage '{part.name}' returned {described(found)}: return a tensor of shape [E] = "
        f"{tuple(x.scores.shape)}, a number per episode, or [B, T] = {rows.shape}, one per token"
    )


def _of_turns(per_turn: Tensor, rows: Rows) -> Tensor:
    """Give sampled tokens the number of their turn, `[E, K]` → `[N]`; NaN becomes 0."""
    sampled = torch.nonzero(rows.loss_mask)[:, 0]
    turns = rows.turns[sampled]
    if len(turns) and int(turns.max()) >= per_turn.shape[-1]:
        raise DefinitionError(
            f"a token was sampled in turn {int(turns.max())}, counted from 0, but there are advantages for "
            f"{per_turn.shape[-1]} turns"
        )
    found = per_turn.nan_to_num(0.0)[rows.episode_of_token[sampled], turns]
    return found.new_zeros(len(rows.loss_mask)).index_put((sampled,), found)


def shaped(part: Part[Tensor], found: object, shape: torch.Size, rows: Rows | None = None) -> Tensor:
    """Check the shape of what a part returned; of tokens it returned it in that of `rows`, `[B, T]`."""
    if not isinstance(found, Tensor) or found.shape != shape:
        wanted = tuple(shape) if rows is None else rows.shape
        raise DefinitionError(f"'{part.name}' returned {described(found)}: it must return a tensor of shape {wanted}")
    return found


def described(found: object) -> str:
    """Say what a component returned."""
    return f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
