"""Reads settings."""

import re
from collections.abc import Mapping

NAME = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=(.*)")
QUOTED = re.compile(r"""('[^']*'|"[^"]*")\s*(?:#.*)?""")
COMMENT = re.compile(r"\s#.*")
VARIABLE = re.compile(r"\$\{(\w+)\}")


def read(text: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of a text; ${NAME} is one of those before, or of the environment, but not in single quotes.

    Raises:
        ValueError: if a line is none.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = NAME.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is no setting: {line}")
        found[match[1]] = _value(match[2], {**(environment or {}), **found})
    return found


def _value(text: str, known: Mapping[str, str]) -> str:
    quoted = QUOTED.fullmatch(text.strip())
    text = quoted[1][1:-1] if quoted else COMMENT.sub("", text).strip()
    if quoted and quoted[1][0] == "'":
        return text
    return VARIABLE.sub(lambda match: known.get(match[1], ""), text)
