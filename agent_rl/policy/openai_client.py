"""Requests to one model of an OpenAI-compatible server: paced, retried and counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pydantic import ValidationError

from agent_rl.core.display import plural
from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError, PolicyError, did_you_mean
from agent_rl.pacing import Pace
from agent_rl.policy.openai_failures import (
    AttemptError,
    ContextOverflowError,
    RefusedError,
    cause,
    is_passing,
    is_too_long,
    reason,
    retry_after,
)
from agent_rl.policy.openai_tally import Tally
from agent_rl.policy.openai_wire import ChatAnswer, ModelList
from agent_rl.seeds import Stream, rng

if TYPE_CHECKING:
    import openai

_log = logging.getLogger(__name__)

PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second attempt; each further one waits twice as long, up to a limit."""
LONGEST_WAIT = 300.0
"""Seconds: a server that asks for a longer wait fails the reply."""
CONNECT = 10.0
"""Seconds for a connection, and for the first look at the server."""
POOL = 32
"""Connections among which a request looks for a free one."""
CHARACTERS = 4
"""Of a token, as long as no server has counted."""
EXPECTED = 256
"""Tokens of the first replies, as tokens per minute count them before the server does."""
OWN = "api.openai.com"
"""OpenAI's address: its models take `max_completion_tokens`, other servers `max_tokens`."""
without_requests: ContextVar[bool] = ContextVar("without_requests", default=False)
"""Whether a request fails before it is made: floors, played unasked, must cost nothing."""


@dataclass
class ChatClient:
    """A client of one model; every method runs in one event loop."""

    api: openai.AsyncOpenAI
    model: str
    key_name: str
    """The environment variable of the key."""
    timeout: float
    retries: int
    requests: Pace
    tokens: Pace
    room: asyncio.Semaphore
    expected: float = EXPECTED
    """Tokens of a reply: a moving mean."""
    section: str = "policy"
    """Of the settings, as errors name them."""
    retries_timeouts: bool = True
    """Whether an attempt that took too long is followed by another."""
    stop: str = ""
    """Why nothing more is asked: the server refused everything before its first answer, or a caller set it."""
    has_answered: bool = False
    pools: list[tuple[openai.AsyncOpenAI, asyncio.Semaphore]] = field(default_factory=list)
    """The same client with connections of its own, and how many more requests it takes."""

    @cached_property
    def address(self) -> str:
        """Of the server."""
        return str(self.api.base_url).rstrip("/")

    def limit(self, tokens: int | None) -> dict[str, JSON]:
        """Return the part of a request that limits the reply's tokens; nothing for None."""
        name = "max_completion_tokens" if OWN in self.address else "max_tokens"
        return {} if tokens is None else {name: tokens}

    async def check(self) -> None:
        """Look whether the server is there, takes the key and has the model.

        Raises:
            ConfigError: if not, with the way out.
        """
        import openai

        try:
            async with asyncio.timeout(CONNECT):
                response = await self.api.models.with_raw_response.list()
            ids = [model.id for model in ModelList.model_validate_json(response.text).data]
        except (TimeoutError, openai.APITimeoutError):
            raise ConfigError(
                f"{self.address} does not answer within {CONNECT:g} s: check {self.section}.base_url"
            ) from None
        except openai.APIConnectionError as error:
            raise ConfigError(
                f"{self.address} can't be reached ({cause(error)}): check {self.section}.base_url, and whether the "
                "server runs"
            ) from None
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise ConfigError(self._refused_key(error)) from None
            if error.status_code == 404:
                await self._probe()
            return  # a server without a list, or one that is busy
        except ValidationError:
            await self._probe()
            return
        if self.model not in ids:
            listed = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
            raise ConfigError(
                f"{self.section}.model={self.model}: {self.address} lists no such model."
                f"{did_you_mean(self.model, ids)} It has: {listed}.\n"
                f"{self.section}.check=false asks for it all the same."
            )

    async def _probe(self) -> None:
        """Ask for one token, of a server that lists no models."""
        body: dict[str, JSON] = {"model": self.model, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
        try:
            async with asyncio.timeout(CONNECT):
                await self._attempt(body, Tally(self.model))
        except (AttemptError, TimeoutError):
            return  # busy, perhaps
        except PolicyError as error:
            raise ConfigError(str(error)) from None
        finally:
            self.has_answered, self.stop = False, ""

    async def ask(self, body: Mapping[str, JSON], tokens: float, tally: Tally) -> ChatAnswer:
        """Return the first answer to a request.

        Args:
            body: of the request.
            tokens: of its prompt, estimated.
            tally: what is used is added to it.

        Raises:
            ContextOverflowError: if the prompt is longer than the model's context.
            PolicyError: if the server refuses, or no attempt succeeds.
        """
        if without_requests.get():
            raise PolicyError("no model is asked while floors are played beside an evaluation: floors=true asks")
        pause = PAUSE
        for attempts in range(1, self.retries + 2):
            self._go_on()
            reserved = tokens + self.expected
            await self.requests.wait(sleep=tally.wait)
            await self.tokens.wait(reserved, sleep=tally.wait)
            try:
                async with self.room:
                    self._go_on()
                    answer = await self._attempt(body, tally)
            except AttemptError as error:
                tally.errors[-1] = error.kind
                early = rng(Stream.RETRY, tally.seed, attempts).random() / 2  # not all at once, after a failure of all
                wait = max(pause * (1 - early), error.wait)
                is_last = attempts > self.retries or (error.kind == "timeout" and not self.retries_timeouts)
                if is_last or wait > LONGEST_WAIT:
                    why = f"it asks to wait {wait:g} s" if wait > LONGEST_WAIT else f"failed {plural(attempts, 'time')}"
                    raise PolicyError(f"{self.address} {why}; at last: {error}") from None
                _log.warning("%s: %.300s; attempt %d in %g s", self.address, error, attempts + 1, wait)
                if error.kind == "429":
                    self.requests.pause(error.wait)  # the others would only meet it, too
                await tally.wait(wait)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self._learn(answer, reserved)
                return answer
        raise AssertionError("the last attempt returns or raises")

    def _go_on(self) -> None:
        if self.stop:
            raise PolicyError(self.stop)

    def _learn(self, answer: ChatAnswer, reserved: float) -> None:
        if (used := answer.usage) is not None:
            self.tokens.correct((used.prompt_tokens or 0) + (used.completion_tokens or 0) - reserved)
            self.expected += 0.1 * ((used.completion_tokens or 0) - self.expected)

    async def _attempt(self, body: Mapping[str, JSON], tally: Tally) -> ChatAnswer:
        import httpx
        import openai

        sent = {**body, **(body.get("extra_body") or {})}  # type: ignore[dict-item]
        sent.pop("extra_body", None)
        started = time.monotonic()
        tally.errors.append("cancelled")  # until its end is known
        try:
            async with asyncio.timeout(self.timeout):  # the SDK's limits the wait for the next bytes only
                api, room = self._free_pool()
                async with room:
                    ask = api.chat.completions.with_raw_response.create  # what it knows by name it copies, for 0.5 ms
                    response = await ask(model=self.model, messages=[], extra_body=sent)
            answer = ChatAnswer.model_validate_json(response.text)
        except (TimeoutError, openai.APITimeoutError) as error:
            if not isinstance(error.__cause__, httpx.ConnectTimeout):
                tally.uncounted.append(round(self.expected) * CHARACTERS)
            raise AttemptError("timeout", f"no answer within {self.section}.timeout={self.timeout:g} s") from None
        except openai.APIConnectionError as error:
            raise AttemptError("connection", cause(error)) from None
        except openai.APIStatusError as error:
            raise self._failure(error, tally) from None
        except ValidationError as error:
            tally.uncounted.append(len(response.text))
            raise AttemptError("bad_answer", f"an answer that can't be read: {error.errors()[0]['msg']}") from None
        tally.answers.append(answer)
        if not answer.error and (answer.usage is None or answer.usage.prompt_tokens is None):
            tally.uncounted.append(len(answer.choices[0].message.text) if answer.choices else 0)
        if not answer.choices or answer.choices[0].finish_reason == "error":
            said = f": {answer.error}" if answer.error else ""
            raise AttemptError("no_choice", f"an answer without a message{said}")
        tally.errors.pop()
        tally.seconds = time.monotonic() - started
        tally.finish_reason = answer.choices[0].finish_reason or "unknown"
        self.has_answered = True
        return answer

    def _free_pool(self) -> tuple[openai.AsyncOpenAI, asyncio.Semaphore]:
        """Return the first pool that takes a request, or a new one: a request looks at all connections of its own."""
        import openai

        for pool in self.pools:
            if not pool[1].locked():
                return pool
        own = self.api.copy(http_client=openai.DefaultAsyncHttpxClient()) if self.pools else self.api
        self.pools.append((own, asyncio.Semaphore(POOL)))
        return self.pools[-1]

    async def close(self) -> None:
        """Close all connections."""
        for api in dict.fromkeys([self.api, *(api for api, _ in self.pools)]):
            await api.close()

    def _failure(self, error: openai.APIStatusError, tally: Tally) -> Exception:
        """Return the meaning of a status: another attempt, a refusal, or a prompt beyond the context."""
        status, said = error.status_code, reason(error, self.api.api_key)
        if is_passing(error):
            return AttemptError(str(status), f"status {status}: {said}", retry_after(error))
        if is_too_long(error, said):
            tally.errors.pop()
            tally.finish_reason = "context_length"
            return ContextOverflowError(f"the conversation is too long for {self.model}: {said}")
        tally.errors[-1] = str(status)
        if status in (401, 403):
            message = self._refused_key(error)
        elif status == 404:
            message = (
                f"{self.address} has no model '{self.model}', or no chat completions there (status 404): check "
                f"{self.section}.model and {self.section}.base_url, which mostly ends in /v1: {said}"
            )
        else:
            message = f"{self.address} refused a request (status {status}): {said}"
        if status in (401, 403, 404) and not self.has_answered:
            self.stop = message
        return RefusedError(message, status)

    def _refused_key(self, error: openai.APIStatusError) -> str:
        said = reason(error, self.api.api_key)
        return f"{self.address} refuses the key of {self.key_name} (status {error.status_code}): {said}"
