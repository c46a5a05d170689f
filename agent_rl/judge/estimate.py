"""What judging would cost: the judge's own requests, each looked up in the log of calls, and none sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent_rl.core.messages import JSON
from agent_rl.core.usage import Usage
from agent_rl.judge.calling import Caller
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.model import ModelJudge
from agent_rl.judge.offline import Plan
from agent_rl.judge.reply import Answer
from agent_rl.policy.openai_client import ChatClient
from agent_rl.policy.openai_endpoint import connect
from agent_rl.rollout.usage import load_prices, price_of
from agent_rl.store.episodes import episode_at
from agent_rl.store.lines import read_lines
from agent_rl.store.shards import Place

BYTES = (5.0, 3.0)
"""Of a token: prose in English, and what is dense, such as code."""
SAID = (25.0, 120.0)
"""Tokens of a verdict: terse, and with a long quotation. A model that reasons first takes more."""
ENOUGH = 5
"""Logged calls from which on they say more than these."""
READ = 500
"""Logged calls that are looked at."""
_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"

Span = tuple[float, float]
"""The least and the most that is likely."""


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What a plan's missing calls would take."""

    episodes: int
    calls: int
    """To be made; replies that can't be used are asked for once more, which is not in it."""
    logged: int
    """Calls that the log answers."""
    input_tokens: Span
    output_tokens: Span
    cost: Span | None
    """None without prices."""
    is_counted: bool
    """Whether the model's own vocabulary counted the input."""
    seen: int
    """Logged calls of this model that corrected the numbers."""


def estimate_cost(plan: Plan) -> CostEstimate:
    """Return what a plan's missing calls would take; nothing is asked or written.

    Raises:
        ConfigError: if the judge's settings have no meaning.
        StoreError: if the log of calls is in use.
    """
    config, places = plan.config, plan.selection.places
    if config.model is None:
        return CostEstimate(len(places), 0, 0, (0, 0), (0, 0), None, True, 0)
    with closing(_DryJudge(config, plan.calls if plan.calls.exists() else None)) as judge:
        asyncio.run(_ask_all(plan, judge, places))
        requests, logged = judge.dry.requests, judge.dry.logged
    count = vocabulary(config.model)
    sizes = [sum(map(count or _bytes, request.texts)) for request in requests]
    found = list(_seen(plan.calls, config.model, count or _bytes)) if plan.calls.exists() else []
    a_unit: Span = (1.0, 1.0) if count else (1 / BYTES[0], 1 / BYTES[1])
    a_verdict = SAID
    if len(found) >= ENOUGH:
        a_unit, a_verdict = (_usual([pair[side] for pair in found]) for side in (0, 1))
    verdicts = sum(request.verdicts for request in requests)
    tokens_in, tokens_out = _times(sum(sizes), a_unit), _times(verdicts, a_verdict)
    if config.max_tokens is not None:
        tokens_out = (min(tokens_out[0], most := config.max_tokens * len(requests)), min(tokens_out[1], most))
    cost = None
    if config.prices is not None:
        price = price_of(config.model, load_prices(config.prices))
        low, high = (price.of(Usage("", round(i), round(o))) for i, o in zip(tokens_in, tokens_out, strict=True))
        cost = (low, high)
    return CostEstimate(len(places), len(requests), logged, tokens_in, tokens_out, cost, count is not None, len(found))


@dataclass(frozen=True, slots=True)
class _Request:
    texts: tuple[str, ...]
    verdicts: int


class _DryCaller(Caller):
    """Sends nothing: what the log lacks is answered by each criterion's first choice."""

    def __init__(self, config: JudgeConfig, log: Path | None) -> None:
        super().__init__(config, log)
        self.requests: list[_Request] = []

    def _connect(self) -> ChatClient:
        return connect(self.name, self._config, "judge", needs_key=False)

    async def _request(
        self, key: str, body: Mapping[str, JSON], size: int, usage: list[Usage], about: Mapping[str, JSON]
    ) -> Answer:
        menus = _menus(body)
        self.requests.append(_Request(_texts(body), len(menus)))
        entries = {id: {"reason": "", "evidence": "", "verdict": menu[0]} for id, menu in menus.items()}
        return Answer(json.dumps({"verdicts": entries}), "", "stop")


class _DryJudge(ModelJudge):
    def __init__(self, config: JudgeConfig, log: Path | None) -> None:
        super().__init__(config, log)
        self.caller = self.dry = _DryCaller(config, log)


async def _ask_all(plan: Plan, judge: ModelJudge, places: Sequence[Place]) -> None:
    for place in places:
        episode = episode_at(plan.selection.path, place)
        await judge.judge(episode, plan.rubric_of(episode))


def _texts(body: Mapping[str, JSON]) -> tuple[str, ...]:
    messages = body["messages"]
    assert isinstance(messages, Sequence)
    return tuple(str(message["content"]) for message in messages if isinstance(message, Mapping))


def _menus(body: Mapping[str, JSON]) -> dict[str, list[str]]:
    """Return the choices of each criterion that a request asks for; none of a comparison, or of one for proposals."""
    before, _, lines = _texts(body)[1].rpartition("\nCriteria:\n")
    if not before or not lines.startswith("{"):
        return {}
    return {asked["id"]: asked["choices"] for asked in map(json.loads, lines.split("\n"))}


def _seen(log: Path, model: str, count: Callable[[str], int]) -> Iterator[Span]:
    """Yield of logged calls of a model the input's tokens in units of `count`, and the tokens of a verdict."""
    left = READ
    for _, line in read_lines(log):
        if left == 0 or not line.startswith(b'{"key"'):
            continue
        try:
            call = json.loads(line)
        except ValueError:
            continue  # damaged: where its answer is needed, the run says so
        body, used = call["request"], call["usage"]
        is_counted = bool(used["input_tokens"] and used["output_tokens"])
        if body["model"] == model and is_counted and len(body["messages"]) == 2 and (menus := _menus(body)):
            left -= 1
            yield used["input_tokens"] / sum(map(count, _texts(body))), used["output_tokens"] / len(menus)


def _usual(values: Sequence[float]) -> Span:
    low, high = np.quantile(values, [0.1, 0.9])
    return float(low), float(high)


def _times(amount: float, each: Span) -> Span:
    return amount * each[0], amount * each[1]


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def vocabulary(model: str) -> Callable[[str], int] | None:
    """Return what counts a text's tokens by the model's own vocabulary, if it is on this machine; no network."""
    try:
        import tiktoken

        name = tiktoken.encoding_name_for_model(model)
    except (ImportError, KeyError):
        return None
    variables = (os.environ.get(name) for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"))
    folder = next((value for value in variables if value is not None), "") or f"{tempfile.gettempdir()}/data-gym-cache"
    if not (Path(folder) / hashlib.sha1(_URL.format(name).encode()).hexdigest()).exists():
        return None  # it would be downloaded
    encoding = tiktoken.get_encoding(name)
    return lambda text: len(encoding.encode_ordinary(text))
