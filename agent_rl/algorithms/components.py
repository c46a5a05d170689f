"""Components: the named functions that the parts of an algorithm can be, registered by decorators.

    @advantage("median-centred", formula="A = R - median of the batch")
    def median_centred(scores: Tensor, *, scale: Positive = 1.0) -> Tensor:
        return (scores - scores.nanmedian()) * scale

A function's positional parameters are what it reads: their names are looked up in what is known at the time, and tell
what has to be computed for it. Its keyword-only parameters are its knobs: their types, bounds and defaults are the
config's. In a config a component is `name`, or `{name: ..., knob: value}`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Generic, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, Field, JsonValue, ValidationError, create_model
from pydantic_core import PydanticCustomError

from agent_rl.config import Section
from agent_rl.errors import ConfigError, DefinitionError, did_you_mean
from agent_rl.registries import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from agent_rl.algorithms.advantages.estimate import AdvantageEstimate, TurnAdvantages
    from agent_rl.algorithms.objectives.base import Prepared, TokenLoss

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., object])

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
AtLeastOne = Annotated[float, Field(ge=1)]
AboveOne = Annotated[float, Field(gt=1)]
Count = Annotated[int, Field(ge=1)]
Bound = Annotated[float, Field(allow_inf_nan=True)]
"""May be infinite; every other number of a config is finite."""

Layout = Literal["rows", "lines", "groups", "tokens"]
"""How the arrays of a whole batch's tokens are laid out for a component, `[B, T]` each.

`rows`: every row with all its tokens, padded to the longest; as simple as it is large where one row is long. `lines`:
the sampled tokens of an episode, of all its rows, in one line; some lines at a time, so that each has to be judged by
itself. `groups`: the same, with all lines of a group. `tokens`: every sampled token as a line of its own.
"""

ComponentConfig = dict[str, JsonValue]
"""`{"name": ..., knob: value}`, with every knob's value filled in."""


class Part(Generic[R]):
    """A function with its knobs set, called with the objects that hold its inputs."""

    def __init__(
        self, name: str, function: Callable[..., R], knobs: Mapping[str, object], layout: Layout = "rows"
    ) -> None:
        self.name, self.layout = name, layout
        self.reads = reads_of(function)
        own = {key: value for key, value in knobs.items() if key in inspect.signature(function).parameters}
        self.function: Callable[..., R] = partial(function, **own)

    def __call__(self, *known: object) -> R:
        """Call the function; raise ConfigError if what it reads was not computed."""
        arguments = []
        for name in self.reads:
            value: object = None
            for source in known:
                if (value := getattr(source, name, None)) is not None:
                    break
            else:
                computed(value, name, self.name)
            arguments.append(value)
        return self.function(*arguments)


COMPUTED_BY = {
    "reference_logprobs": "the trainer scores the rows under the policy that the run started from",
    "values": "the trainer's critic values the rows; set critic.where",
    "sum_pi_squared": "old's forward pass; set proximal=auto or recompute",
    "old_experts": "old's forward pass through a mixture of experts; set proximal=recompute",
}
"""Who computes what may be missing."""


def computed(value: R | None, name: str, reader: str) -> R:
    """Return a value, or raise ConfigError with who reads and who computes it if it is None."""
    if value is None:
        raise ConfigError(
            f"'{reader}' reads {name}, which were not computed: they come from "
            f"{COMPUTED_BY.get(name, 'the stage before')}"
        )
    return value


@dataclass(frozen=True)
class Component(Generic[R]):
    """One function that a part can be."""

    name: str
    function: Callable[..., R]
    formula: str
    """In one line, in terms of the knobs."""
    source: str
    """The paper and equation, or whose variant it is."""
    prepare: Callable[..., Prepared] | None = None
    """For objectives over the whole batch: what is to be computed before each update."""
    layout: Layout = "rows"
    finish: Callable[..., Tensor] | None = None
    """What is done with the result of the whole batch, `found`, in the layout `tokens`."""
    drift: Callable[..., Tensor] | None = None
    """For objectives of sequences: what each token adds to the mean that its sequence's ratio is made of."""

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of what it reads, in order."""
        prepared = reads_of(self.prepare) if self.prepare else ()
        return tuple(dict.fromkeys((*prepared, *reads_of(self.function))))

    @property
    def returns(self) -> str:
        """The name of the type that the function declares to return; empty if it doesn't say."""
        declared = inspect.signature(self.function).return_annotation
        name = declared if isinstance(declared, str) else getattr(declared, "__name__", "")
        return name.strip("'\"").rpartition(".")[2]

    @property
    def _functions(self) -> list[Callable[..., object]]:
        return [function for function in (self.prepare, self.function, self.finish) if function is not None]

    @property
    def own(self) -> list[str]:
        """The names of the knobs."""
        return [p.name for function in self._functions for p in _knobs_of(function)]

    @cached_property
    def knobs(self) -> type[BaseModel]:
        """The keyword-only parameters, as a schema."""
        fields: dict[str, object] = {}
        for function in self._functions:
            knobs = _knobs_of(function)
            # of the knobs only: what is read is a Tensor, whose name needs torch
            hints = get_type_hints(
                SimpleNamespace(__annotations__={p.name: p.annotation for p in knobs}),
                inspect.unwrap(function).__globals__,
                include_extras=True,
            )
            fields |= {p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in knobs}
        schema: type[BaseModel] = create_model(self.function.__name__, __base__=Section, **fields)  # type: ignore[call-overload]
        return schema


class ComponentRegistry(Generic[R]):
    """The components of one kind: the decorator to add one, and the annotation of config fields."""

    def __init__(self, kind: str, *known: str, optional: bool = False) -> None:
        """Start without components. They can read what is `known`; `optional` lets a config have none."""
        self.kind, self.known, self.optional = kind, known, optional
        self._registry: Registry[Component[R]] = Registry(kind)

    def __call__(
        self,
        name: str,
        *,
        formula: str,
        source: str = "",
        prepare: Callable[..., Prepared] | None = None,
        layout: Layout = "rows",
        finish: Callable[..., Tensor] | None = None,
        drift: Callable[..., Tensor] | None = None,
    ) -> Callable[[F], F]:
        """Register a function under a name of configs; see `Component`.

        Raises:
            DefinitionError: if the function reads what is not known, or has a knob without a type.
        """

        def register(function: F) -> F:
            for each in (function, prepare) if prepare else (function,):
                self._check_parameters(name, each)
            made = Component(name, function, formula, source, prepare, layout, finish, drift)
            self._registry.add(name, made, function)  # type: ignore[arg-type]
            return function

        return register

    def __getitem__(self, chosen: ComponentConfig | str) -> Component[R]:
        return self._registry[chosen if isinstance(chosen, str) else str(chosen["name"])]

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def bind(self, chosen: ComponentConfig) -> Part[R]:
        """Return the chosen function with its knobs set."""
        return Part(str(chosen["name"]), self[chosen].function, chosen, self[chosen].layout)

    def bind_finish(self, chosen: ComponentConfig) -> Part[Tensor] | None:
        """Return what finishes the chosen function's result, if there is such a thing."""
        finish = self[chosen].finish
        return None if finish is None else Part(str(chosen["name"]), finish, chosen, "tokens")

    def check(self, value: object) -> ComponentConfig | None:
        """Return a choice with its defaults filled in, or None for none; for pydantic, raise what is wrong with it."""
        given = {"name": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
        name = given.pop("name", None)
        if self.optional and (value is None or name == "none"):
            return None
        if not isinstance(name, str) or name not in self._registry:
            names = (*(("none",) if self.optional else ()), *self)
            hint = did_you_mean(str(name), names) if name else " It needs a name."
            raise _problem(f"no {self.kind} '{name}'.{hint} There are: {', '.join(names)}")
        knobs = self[name].knobs
        for key in given:
            if key not in knobs.model_fields:
                known = ", ".join(knobs.model_fields) or "none"
                raise _problem(f"'{name}' has no knob '{key}'.{did_you_mean(key, knobs.model_fields)} It has: {known}")
        try:
            return {"name": name, **knobs.model_validate(given).model_dump()}
        except ValidationError as error:
            first = error.errors()[0]
            given_as = "" if first["type"] == "missing" else f"={first['input']}"
            raise _problem(f"'{name}': {'.'.join(map(str, first['loc']))}{given_as}: {first['msg'].lower()}") from error

    def settings(self) -> set[str]:
        """Return every key that some component takes."""
        return {"name"}.union(*(self[name].own for name in self))

    def _check_parameters(self, name: str, function: Callable[..., object]) -> None:
        for p in inspect.signature(function).parameters.values():
            if p.kind is p.KEYWORD_ONLY:
                if p.annotation is p.empty:
                    raise DefinitionError(f"{self.kind} '{name}': knob '{p.name}' needs a type: {p.name}: float")
            elif p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise DefinitionError(f"{self.kind} '{name}' takes *{p.name}: name each array that it reads")
            elif p.default is not p.empty:
                raise DefinitionError(f"{self.kind} '{name}': put a * before '{p.name}', which makes it a knob")
            elif p.name not in self.known:
                raise DefinitionError(
                    f"{self.kind} '{name}' reads '{p.name}', which there is not.{did_you_mean(p.name, self.known)} "
                    f"It can read: {', '.join(self.known)}; a knob stands behind a *"
                )


def reads_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of a function's positional parameters."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _knobs_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("choice", "{text}", {"text": message})


_EPISODES = (
    *("scores", "groups", "lengths", "cut_short", "kept", "tool_errors", "tasks"),
    *("components", "component_names", "component_weights", "has_component"),
    *("states", "turn_rewards", "turn_sampled", "sampled"),
)
"""Of the episodes of a step, see `Experience`."""
_ROWS = ("token_ids", "mask", "rollout_logprobs", "rewards", "turns", "versions", "sources", "episode")
"""Of their rows, see `Rows`; `mask` is `loss_mask`."""
_POLICIES = ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs", "advantages", "mask")
"""In an update, see `objectives.base`."""

shaping: ComponentRegistry[Tensor] = ComponentRegistry("shaping", *_EPISODES, *_ROWS)
"""Changes scores: returns others, `[E]`."""
filter: ComponentRegistry[Tensor] = ComponentRegistry("filter", *_EPISODES, "unshaped", *_ROWS)
"""Says which episodes are trained on, bool `[E]`; as `ar.filter`, it hides a built-in of Python here only."""
advantage: ComponentRegistry[Tensor | AdvantageEstimate | TurnAdvantages] = ComponentRegistry(
    *("advantage", *_EPISODES, "baselines", "state_values", *_ROWS, "trained"),
    *("old_logprobs", "reference_logprobs", "values", "sum_pi_squared"),
)
"""Returns advantages: of episodes `[E]`, of tokens `[B, T]`, of turns, or with the targets of a critic."""
weight: ComponentRegistry[Tensor] = ComponentRegistry(
    "weight", "old_logprobs", "rollout_logprobs", "mask", "turns", "versions", "sources", optional=True
)
"""Returns what each token's loss is multiplied with, `[B, T]`."""
rejection: ComponentRegistry[Tensor] = ComponentRegistry(
    "rejection", "old_logprobs", "rollout_logprobs", "mask", "turns", "versions", "sources"
)
"""Says which tokens stay, bool `[B, T]`."""
objective: ComponentRegistry[TokenLoss | Tensor] = ComponentRegistry(
    "objective", *_POLICIES, "sequences", "weights", "group", "sides"
)
"""Returns the loss of each token, `[B, T]`. What it prepares is given every sampled token of the batch as a row of its
own, `[n, 1]`, and may also read the weights, groups and sides of these."""
negative_mask: ComponentRegistry[Tensor] = ComponentRegistry("negative mask", *_POLICIES, optional=True)
"""Says which rows have no loss from the objective, bool `[B]`; they still count in the denominators. A row that it
is given is an episode, however many rows that is trained in."""
aggregation: ComponentRegistry[Tensor] = ComponentRegistry(
    "aggregation", "loss", "mask", "whole", "prompt_shares", "sequence_tokens"
)
"""Returns a micro-batch's share of the loss, a scalar."""
