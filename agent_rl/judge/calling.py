"""Caller: requests to a judge's model, by a JSON schema, through the log of calls and within a limit of cost."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from agent_rl.core.judgement import JudgeFault
from agent_rl.core.messages import JSON
from agent_rl.core.usage import Usage
from agent_rl.errors import ConfigError, PolicyError
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.log import CallLog, call_key
from agent_rl.judge.reply import Answer
from agent_rl.policy.openai_client import CHARACTERS, ChatClient
from agent_rl.policy.openai_endpoint import connect
from agent_rl.policy.openai_failures import ContextOverflowError, RefusedError
from agent_rl.policy.openai_tally import Tally
from agent_rl.policy.openai_thread import ClientThread
from agent_rl.rollout.usage import load_prices, price_of

T = TypeVar("T")

ASKED_AGAIN = 2
"""Times that a reply which can't be used is asked for once more."""
NO_SCHEMA = (400, 422, 501)
"""Statuses by which servers refuse `response_format`."""
_FILTERED = re.compile("content.?(filter|policy|management)", re.IGNORECASE)


class CallError(Exception):
    """A call that has no answer."""

    def __init__(self, fault: JudgeFault, detail: str) -> None:
        super().__init__(detail)
        self.fault, self.detail = fault, detail


class Caller:
    """The model of a judge's settings, and what it was asked before."""

    def __init__(self, config: JudgeConfig, log: Path | None = None) -> None:
        """Keep the settings; files and connections are opened by the first call.

        Raises:
            ConfigError: if the settings have no model, or no price for it.
        """
        if config.model is None:
            raise ConfigError("judge.model is not set: name a model that the server has, or use a RuleJudge")
        self.name = config.model
        self.cost = 0.0
        """What its calls have cost so far, by the prices."""
        self._config, self._path = config, log
        self._server = ClientThread("judge", self._connect)
        self._price = price_of(self.name, load_prices(config.prices)) if config.prices else None

    @property
    def secret(self) -> bytes:
        """The log's: what marks in requests follow from."""
        return self._log.secret

    @property
    def logged(self) -> int:
        """How many calls the log answered."""
        return self._log.found if "_log" in self.__dict__ else 0  # which opens no log, where nothing was asked

    async def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run in the event loop of its connections."""
        return await self._server.loop.run(coroutine)

    def close(self) -> None:
        """Close connections and the log; it may be used again."""
        self._server.close()
        if (log := self.__dict__.pop("_log", None)) is not None:
            log.close()

    @cached_property
    def _log(self) -> CallLog:
        return CallLog(self._path)

    @property
    def _client(self) -> ChatClient:
        return self._server.client

    def _connect(self) -> ChatClient:
        client = connect(self.name, self._config, "judge")
        client.retries_timeouts = False  # one that hangs costs its timeout, once
        return client

    async def ask(
        self,
        messages: Sequence[JSON],
        schema: Mapping[str, JSON],
        sample: int,
        usage: list[Usage],
        about: Mapping[str, JSON],
    ) -> Answer:
        """Return the answer to a request, from the log or the server; called inside `run`.

        Args:
            messages: of the request.
            schema: of the reply, as JSON; sent as long as the server takes one.
            sample: its number, where the same is asked several times.
            usage: what is used is added to it.
            about: what the log says of it.

        Raises:
            CallError: if there is none.
            ConfigError: if the server refuses the key, the model or every request.
        """
        config = self._config
        body: dict[str, JSON] = {"model": self.name, **self._client.limit(config.max_tokens)}
        if config.temperature is not None:
            body["temperature"] = config.temperature
        logged = partial(self._logged, messages, sample, usage, about)
        by_schema = config.structured is not False and self._model not in self._log.unstructured
        if by_schema:
            wanted: JSON = {"name": "verdicts", "strict": True, "schema": schema}
            try:
                return await logged(body | {"response_format": {"type": "json_schema", "json_schema": wanted}})
            except RefusedError as error:
                if config.structured or error.status not in NO_SCHEMA:
                    raise _refused(error) from None
        try:
            answer = await logged(body)
        except RefusedError as error:
            raise _refused(error) from None
        if by_schema:
            self._log.refuse_schema(self._model)
        return answer

    @property
    def _model(self) -> str:
        return f"{self._client.address} {self.name}"

    async def _logged(
        self,
        messages: Sequence[JSON],
        sample: int,
        usage: list[Usage],
        about: Mapping[str, JSON],
        body: Mapping[str, JSON],
    ) -> Answer:
        """Return an answer from the log, or ask for it."""
        body = {**body, "messages": messages}
        key = call_key(body=body, sample=sample)
        size = sum(len(str(message["content"])) for message in messages if isinstance(message, Mapping))
        about = {**about, "sample": sample, "request": body}
        return await self._log.get(key, partial(self._request, key, body, size, usage, about))

    async def _request(
        self, key: str, body: Mapping[str, JSON], size: int, usage: list[Usage], about: Mapping[str, JSON]
    ) -> Answer:
        """Ask the server, and write what it says, or why it says nothing."""
        tally, client = Tally(self.name, seed=int(key[:8], 16)), self._client
        try:
            said = (await client.ask(body, size / CHARACTERS, tally)).choices
        except PolicyError as error:
            if (used := tally.usage()).attempts:
                usage.append(used)
            is_stopped = str(error) == client.stop
            self._spend(tally, size)  # answers without a message cost, too
            if is_stopped:
                if not self._is_spent:
                    raise ConfigError(client.stop) from None
                raise CallError(JudgeFault.COST, client.stop) from None
            fault = JudgeFault.TIMEOUT if tally.errors[-1:] == ["timeout"] else JudgeFault.SERVER
            if isinstance(error, ContextOverflowError):
                fault = JudgeFault.TOO_LONG
            self._log.fail(key, fault, str(error), used, about)
            if isinstance(error, RefusedError):
                raise
            raise CallError(fault, str(error)) from None
        assert said is not None
        message = said[0].message
        answer = Answer(message.text, message.refusal or "", tally.finish_reason)
        used = tally.usage()
        self._log.keep(key, answer, used, about)
        usage.append(used)
        self._spend(tally, size)
        return answer

    @property
    def _is_spent(self) -> bool:
        return self._config.max_cost is not None and self.cost >= self._config.max_cost

    def _spend(self, tally: Tally, asked: int) -> None:
        """Add what a call cost; at the limit no more calls are made. Tokens that no server counted are estimated."""
        if self._price is None:
            return
        guessed = (Usage(self.name, asked // CHARACTERS, said // CHARACTERS) for said in tally.uncounted)
        self.cost += sum(map(self._price.of, (tally.usage(), *guessed)))
        if self._is_spent:
            self._client.stop = f"the judge's calls have cost {self.cost:.4g}: judge.max_cost={self._config.max_cost:g}"


def _refused(error: RefusedError) -> CallError:
    is_filtered = _FILTERED.search(str(error)) is not None
    return CallError(JudgeFault.REFUSED if is_filtered else JudgeFault.SERVER, str(error))
