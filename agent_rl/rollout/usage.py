"""What the replies of a served model used together: tokens, attempts, latency, and their price."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from agent_rl.config import Section
from agent_rl.core.episode import Episode
from agent_rl.core.usage import Usage
from agent_rl.errors import ConfigError, did_you_mean


class Price(Section):
    """What a million tokens of a model cost, in any currency."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    """Reasoning included."""
    cached: float | None = Field(None, ge=0)
    """Of the input that was read from a cache; None for the price of the input."""

    def of(self, usage: Usage) -> float:
        """Return the price of a reply; 0 if the server did not say what it used."""
        cached = self.input if self.cached is None else self.cached
        fresh = (usage.input_tokens or 0) - usage.cached_tokens
        return (fresh * self.input + usage.cached_tokens * cached + (usage.output_tokens or 0) * self.output) / 1e6


Prices: TypeAlias = Mapping[str, Price]
"""By the model's name, as `policy.model` has it."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The median, and what 90 % and 99 % do not exceed; NaN of nothing."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Return the quantiles of some values."""
        return cls(*map(float, np.quantile(values, [0.5, 0.9, 0.99]) if values else [np.nan] * 3))

    def __str__(self) -> str:
        return f"{self.p50:.3g} / {self.p90:.3g} / {self.p99:.3g} s"


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """What some replies used, with those of failed episodes and all attempts."""

    replies: int
    attempts: int
    input_tokens: int
    cached_tokens: int
    """Of the input."""
    output_tokens: int
    reasoning_tokens: int
    """Of the output."""
    uncounted: int
    """Replies whose tokens the server did not say: the sums lack them."""
    latency: Quantiles
    """Of the replies, in seconds: of the attempt that was answered, not of a refusal for its length."""
    errors: Mapping[str, int]
    """Attempts that failed, by class."""


def total_usage(episodes: Iterable[Episode]) -> UsageTotals:
    """Add up what episodes used."""
    return usage_totals([usage for episode in episodes for usage in episode.usage])


def usage_totals(replies: Sequence[Usage]) -> UsageTotals:
    """Add up what replies used."""
    return UsageTotals(
        replies=len(replies),
        attempts=sum(u.attempts for u in replies),
        input_tokens=sum(u.input_tokens or 0 for u in replies),
        cached_tokens=sum(u.cached_tokens for u in replies),
        output_tokens=sum(u.output_tokens or 0 for u in replies),
        reasoning_tokens=sum(u.reasoning_tokens for u in replies),
        uncounted=sum(u.input_tokens is None for u in replies),
        latency=Quantiles.of([u.seconds for u in replies if u.seconds]),
        errors=dict(Counter(error for u in replies for error in u.errors)),
    )


def total_cost(episodes: Iterable[Episode], prices: Prices) -> float:
    """Return what episodes cost.

    Raises:
        ConfigError: if a model has no price.
    """
    return cost_of((usage for episode in episodes for usage in episode.usage), prices)


def cost_of(replies: Iterable[Usage], prices: Prices) -> float:
    """Return what replies cost.

    Raises:
        ConfigError: if a model has no price.
    """
    return sum(price_of(usage.model, prices).of(usage) for usage in replies)


def price_of(model: str, prices: Prices) -> Price:
    """Return the price of a model.

    Raises:
        ConfigError: if it has none.
    """
    if model not in prices:
        raise ConfigError(f"the prices have no model '{model}'.{did_you_mean(model, prices)} Add it: {_EXAMPLE}")
    return prices[model]


_EXAMPLE = "gpt-5-mini: {input: 0.25, cached: 0.025, output: 2} (per million tokens)"


def load_prices(path: str | os.PathLike[str]) -> Prices:
    """Read a YAML file of prices, a model a line, as `gpt-5-mini: {input: 0.25, cached: 0.025, output: 2}`.

    Raises:
        ConfigError: if it can't be read, with what is wrong.
    """
    from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

    try:
        return TypeAdapter(dict[str, Price]).validate_python(safe_load(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ConfigError(f"prices={path} can't be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"prices={path}: {where}: {first['msg'].lower()}; a model a line: {_EXAMPLE}") from error
