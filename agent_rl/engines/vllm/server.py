"""A vLLM server over HTTP: token ids in and out, with retries."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from agent_rl.engines.stateless import EngineOutput, Settings
from agent_rl.engines.vllm.wire import ENDPOINTS, read_answer
from agent_rl.errors import ConfigError, PolicyError

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

TRIES = 6
"""Of one request."""
PAUSE = 0.5
"""Seconds before the second try; each further one waits twice as long, the last 8 s."""
SECONDS = 600.0
"""How long one request may take."""


class _Model(BaseModel):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(BaseModel):
    data: list[_Model]


class _NotThereError(PolicyError):
    """The server has no such endpoint."""


class Server:
    """One vLLM server; every method runs in the event loop that `open` ran in.

    `model` is its name for the model, `root` the folder or name of the weights, `processed` whether log-probabilities
    are those of the sampled distribution; they are known after `open`. The address is such as http://host:8000, with or
    without /v1. At most `concurrency` requests are under way, further ones wait here. `context` is the longest sequence
    to allow; None for the server's.
    """

    def __init__(self, url: str, concurrency: int = 64, context: int | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"policy.url={url} has no scheme: write http://{url}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._concurrency = concurrency
        self.model = self.root = ""
        self._endpoint = ENDPOINTS[0]
        self.context_limit = context
        self.processed = True

    async def open(self) -> None:
        """Connect; find out the model and the kind of log-probabilities.

        Raises:
            ConfigError: if it is no vLLM server.
            PolicyError: if it can't be reached, or gives no token ids.
        """
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("policy.url needs httpx: pip install -e '.[train]'") from error
        key = os.environ.get("VLLM_API_KEY")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(SECONDS, connect=10.0),
            limits=httpx.Limits(max_connections=None),
        )
        self._room = asyncio.Semaphore(self._concurrency)
        try:
            await self._look()
        except BaseException:
            await self.close()
            raise

    async def _look(self) -> None:
        """Find out its model."""
        try:
            models = _Models.model_validate(await self._send("GET", "/v1/models")).data
        except ValidationError as error:
            raise ConfigError(f"{self.url}/v1/models lists no models: is this a vLLM server?") from error
        if not models:
            raise ConfigError(f"{self.url} has no model: give the address of a vLLM server")
        card = models[0]  # LoRA adapters come after the model that they adapt
        self.model, self.root = card.id, card.root or card.id
        limits = [n for n in (self.context_limit, card.max_model_len) if n is not None]
        self.context_limit = min(limits, default=None)
        await self._probe()

    async def close(self) -> None:
        """Close the connections; the server stops what it samples for them."""
        await self._client.aclose()

    async def _probe(self) -> None:
        """Find the endpoint: sample one token with top_k=1.

        Its log-probability is 0 if the server reports those of the sampled distribution.
        """
        settings: Settings = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
        for self._endpoint in ENDPOINTS:
            try:
                answer = await self.generate("probe", [0], settings)
            except _NotThereError:
                continue
            self.processed = all(abs(x) < 1e-6 for x in answer.logprobs)
            return
        raise PolicyError(f"{self.url} has none of {', '.join(e.path for e in ENDPOINTS)}: is this a vLLM server?")

    async def generate(self, sequence: str, token_ids: list[int], settings: Settings) -> EngineOutput:
        """Implements `Generate`.

        Raises:
            PolicyError: if the server refuses, gives no token ids or log-probabilities, or can't be reached.
        """
        endpoint = self._endpoint
        async with self._room:
            body = await self._send("POST", endpoint.path, endpoint.request(self.model, token_ids, settings))
        try:
            return read_answer(body)
        except (ValidationError, IndexError) as error:
            raise PolicyError(f"{self.url} gave an answer that can't be read: {error}") from error

    async def _send(self, method: str, path: str, body: Settings | None = None) -> Any:
        import httpx

        problem, pause = "", PAUSE
        for tried in range(TRIES):
            if tried:
                _log.warning("%s%s: %.300s; attempt %d of %d in %g s", self.url, path, problem, tried + 1, TRIES, pause)
                await asyncio.sleep(pause)
                pause *= 2
            try:
                response = await self._client.request(method, path, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code < 500 and response.status_code != 429:
                return self._body(response)
            problem = f"status {response.status_code}: {_message(response)}"
        raise PolicyError(f"{self.url}{path} failed {TRIES} times; at last: {problem}")

    def _body(self, response: httpx.Response) -> Any:
        if response.status_code in (401, 403):
            raise PolicyError(f"{self.url} wants a key: set VLLM_API_KEY to the server's")
        if response.is_error:
            problem = _NotThereError if response.status_code == 404 else PolicyError
            raise problem(f"{response.url} refused (status {response.status_code}): {_message(response)}")
        try:
            return response.json()
        except ValueError as error:
            raise PolicyError(f"{response.url} did not answer with JSON: {response.text[:200]!r}") from error


def _message(response: httpx.Response) -> str:
    """Return the server's error message."""
    try:
        body = response.json()
        return str(body.get("error", body)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return response.text[:200]
