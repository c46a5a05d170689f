"""Failed requests to an OpenAI-compatible server: what each means, and why it failed."""

from __future__ import annotations

import email.utils
import re
import time
from typing import TYPE_CHECKING

from agent_rl.errors import PolicyError

if TYPE_CHECKING:
    import openai

_TOO_LONG = re.compile("context.?(length|window|size)|prompt is too long", re.IGNORECASE)
"""The ways of servers to refuse a prompt for its length."""
_PASSING = (408, 409, 425, 429)
"""Statuses below 500 that another attempt may not meet."""


class ContextOverflowError(PolicyError):
    """The conversation is longer than the model's context."""


class RefusedError(PolicyError):
    """The server refuses the request: another attempt would meet the same."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class AttemptError(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, kind: str, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.kind, self.wait = kind, wait


def is_passing(error: openai.APIStatusError) -> bool:
    """Whether another attempt may not meet the same."""
    is_spent = error.code == "insufficient_quota"
    is_of_server = error.status_code >= 500 and error.status_code != 501  # which says that it never will
    return not is_spent and (error.status_code in _PASSING or is_of_server)


def is_too_long(error: openai.APIStatusError, said: str) -> bool:
    """Whether a prompt was refused for its length."""
    return _TOO_LONG.search(f"{error.code} {said}") is not None


def reason(error: openai.APIStatusError, key: str) -> str:
    """Return the server's words for an error, in a line, without the key."""
    body = error.body
    inner = body.get("error", body) if isinstance(body, dict) else body
    said = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(said or "no reason given").replace(key, "[key]").split())[:300]


def cause(error: BaseException) -> str:
    """Return why there is no connection: the innermost error's words."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def retry_after(error: openai.APIStatusError) -> float:
    """Return how many seconds a server asks to wait; 0 if it does not."""
    headers = error.response.headers
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(milliseconds) / 1000)
        return max(0.0, float(headers.get("retry-after", 0)))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(headers["retry-after"]).timestamp() - time.time())
    except (ValueError, KeyError):
        return 0.0
