"""Metrics of a step's advantages: what training is about to push towards and away from."""

from __future__ import annotations

import torch
from torch import Tensor


def tool_error_metrics(advantages: Tensor, tool_errors: Tensor, trained: Tensor) -> dict[str, float]:
    """Say whether failed tool calls are being trained away, or towards.

    Training pushes away from failed calls while episodes that have them do worse than others: a correlation that rises
    towards 0 and above says that the reward has stopped to care.

    Args:
        advantages: of whole episodes, float `[E]`; a mean over sampled tokens where tokens differ.
        tool_errors: failed calls, int `[E]`.
        trained: bool `[E]`; the others are left out.

    Returns:
        `advantage/with_tool_errors` and `advantage/without_tool_errors`, the means over episodes that have a failed
        call or have none, and `advantage/tool_error_correlation`, Pearson's, between the number of failed calls and the
        advantage. What is not defined is left out: a mean over nothing, a correlation of constants.
    """
    values, errors = advantages[trained].double(), tool_errors[trained].double()
    chosen = {"with_tool_errors": values[errors > 0], "without_tool_errors": values[errors == 0]}
    found = {f"advantage/{name}": float(some.mean()) for name, some in chosen.items() if len(some)}
    if len(values) and values.min() < values.max() and errors.min() < errors.max():
        found["advantage/tool_error_correlation"] = float(torch.corrcoef(torch.stack([errors, values]))[0, 1])
    return found
