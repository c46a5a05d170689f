"""The calculator: one operation on two whole numbers per call."""

from __future__ import annotations

import operator as operators
from typing import Literal

from agent_rl.gym.tool import tool

_OPERATORS = {"+": operators.add, "-": operators.sub, "*": operators.mul}


@tool(inline=True)
def calculator(operator: Literal["+", "-", "*"], left: int, right: int) -> int:
    """Compute one operation on two whole numbers.

    Args:
        operator: what to do.
        left: the first number.
        right: the second number.
    """
    return int(_OPERATORS[operator](left, right))
