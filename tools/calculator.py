"""The calculator: one operation on two whole numbers per call."""

from __future__ import annotations

import operator
import re

from agent_rl.tool import tool

_OPERATION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@tool(inline=True)
def calculator(expression: str) -> int:
    """Compute one operation on two whole numbers.

    Args:
        expression: such as "12*7", "5-9" or "-4+18"; exactly one of + - *.
    """
    match = _OPERATION.fullmatch(expression)
    if match is None:
        raise ValueError("give one operation on two whole numbers, such as 12*7")
    left, sign, right = match.groups()
    return int(_OPERATORS[sign](int(left), int(right)))
