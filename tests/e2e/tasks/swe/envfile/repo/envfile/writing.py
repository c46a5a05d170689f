"""Writes settings."""

from collections.abc import Mapping


def write(settings: Mapping[str, str]) -> str:
    """Return a text that is read as these settings."""
    return "".join(f"{name}='{value}'\n" for name, value in settings.items())
