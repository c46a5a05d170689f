"""Settings that are secrets: the keys that Ray's workers get, which nothing stores or prints."""

from __future__ import annotations

import re
from typing import Any

_SECRET = re.compile(r"env_vars\.(\w*(?:KEY|TOKEN|SECRET|PASSWORD)\w*)$", re.IGNORECASE)


def without_secrets(settings: Any, key: str = "") -> Any:
    """Return settings with references to environment variables in place of secrets."""
    if isinstance(settings, dict):
        return {name: without_secrets(value, f"{key}.{name}") for name, value in settings.items()}
    found = _SECRET.search(key)
    return f"${{oc.env:{found[1]}}}" if found else settings
