"""Reads settings."""

import re
from collections.abc import Mapping

NAME = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)")
VARIABLE = re.compile(r"\$\{(\w+)\}")


def read(text: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of a text; ${NAME} is one of those before, or of the environment, but not in single quotes.

    Raises:
        ValueError: if a line is none.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        match = NAME.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is no setting: {line}")
        found[match[1]] = _value(match[2], {**(environment or {}), **found})
    return found


def _value(text: str, known: Mapping[str, str]) -> str:
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1]
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1]
    return VARIABLE.sub(lambda match: known.get(match[1], ""), text)
