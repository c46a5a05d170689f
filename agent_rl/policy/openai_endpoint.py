"""How an OpenAI-compatible endpoint is reached: its address, its key, and what it is asked at most."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol
from urllib.parse import urlsplit

from agent_rl.errors import ConfigError
from agent_rl.pacing import Pace
from agent_rl.policy.openai_client import CONNECT, ChatClient


class EndpointSettings(Protocol):
    """How a server is reached, and what it is asked at most: an `OpenAIPolicy`, or the section `judge`."""

    @property
    def base_url(self) -> str | None:
        """The server's address; None for OPENAI_BASE_URL, otherwise OpenAI's own."""

    @property
    def api_key_env(self) -> str:
        """The environment variable that holds the key; a server at another address may need none."""

    @property
    def timeout(self) -> float:
        """Seconds of one attempt."""

    @property
    def retries(self) -> int:
        """Attempts after the first, of one reply."""

    @property
    def concurrency(self) -> int:
        """Requests under way at most."""

    @property
    def requests_per_minute(self) -> float | None:
        """At most; None for no limit."""

    @property
    def tokens_per_minute(self) -> float | None:
        """Of prompts and replies, at most."""


def connect(model: str, settings: EndpointSettings, section: str, *, needs_key: bool = True) -> ChatClient:
    """Return a client; it connects with its first request.

    Args:
        model: as the server lists it.
        settings: the server's.
        section: theirs, as errors name them.
        needs_key: whether it is to be asked anything.

    Raises:
        ConfigError: if the package, the key or the address is missing or wrong.
    """
    try:
        import openai
    except ImportError as error:
        raise ConfigError(f"{section}.model={model} needs the package openai: pip install -e '.[openai]'") from error
    key_name = settings.api_key_env
    address = settings.base_url or os.environ.get("OPENAI_BASE_URL")
    if address is not None and not address.startswith(("http://", "https://")):
        raise ConfigError(f"{section}.base_url={address} has no scheme: write http://{address}")
    if "@" in urlsplit(address or "").netloc:
        raise ConfigError(f"{section}.base_url holds a password, and is stored: let {section}.api_key_env name the key")
    key = os.environ.get(key_name)
    if needs_key and not key and (address is None or key_name != "OPENAI_API_KEY"):
        raise ConfigError(
            f"{section}.model={model} needs a key: set {key_name}, or name another variable: {section}.api_key_env=NAME"
        )
    api = openai.AsyncOpenAI(
        api_key=key or "none",
        base_url=address,
        max_retries=0,
        timeout=openai.Timeout(settings.timeout, connect=CONNECT),
    )
    rates = (settings.requests_per_minute, settings.tokens_per_minute)
    requests, tokens = (Pace(rate / 60 if rate else None) for rate in rates)
    room = asyncio.Semaphore(settings.concurrency)
    return ChatClient(api, model, key_name, settings.timeout, settings.retries, requests, tokens, room, section=section)
