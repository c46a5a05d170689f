"""Reward components: methods marked by `@reward` or `@group_reward`, judges, and the check of their values."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat, TypeAlias, TypeVar, cast, overload

import numpy as np

from agent_rl.core.episode import Reward
from agent_rl.core.judgement import Judgement
from agent_rl.errors import DefinitionError

RewardValue: TypeAlias = float | int | bool | Judgement | None
RewardMethod: TypeAlias = Callable[..., RewardValue | Awaitable[RewardValue]]
M = TypeVar("M", bound=RewardMethod)
F = TypeVar("F", bound=Callable[..., object])

GroupRewardMethod: TypeAlias = Callable[..., Sequence[RewardValue] | Awaitable[Sequence[RewardValue]]]
G = TypeVar("G", bound=GroupRewardMethod)

_NUMBERS = (int, float, np.bool_, np.integer, np.floating)
_MARK, _GROUP_MARK = "__agent_rl_reward__", "__agent_rl_group_reward__"


@dataclass(frozen=True, slots=True)
class RewardComponent:
    """A `@reward` method, or a judge, as a class knows it."""

    name: str
    weight: float
    attribute: str
    is_async: bool
    inline: bool = False
    """Whether a sync method runs on the event loop."""
    is_judged: bool = False
    """Whether a judge gives it, whose answer takes long: the episode's place is given to another one meanwhile."""


@overload
def reward(method: M, /) -> M: ...
@overload
def reward(*, weight: float = 1.0, name: str | None = None, inline: bool = False) -> Callable[[M], M]: ...
def reward(
    method: M | None = None, /, *, weight: float = 1.0, name: str | None = None, inline: bool = False
) -> M | Callable[[M], M]:
    """Make a component of the reward of an `Env` method, sync or async, that takes the finished `Episode`.

    It returns a number, a bool, or the `Judgement` of a judge; None means "not scored", and the episode is left out
    rather than given 0. Sync ones run one after the other in a worker thread. `Budget.score_seconds` bounds them all.

    Args:
        method: the method, when used as a bare `@reward`.
        weight: its factor in the episode's reward; 0 only records it.
        name: the component's name; the method's name if left out.
        inline: run a sync method straight on the event loop, as a tool's `inline`: the fastest, but nothing else runs
            meanwhile, and nothing can stop it.

    Raises:
        DefinitionError: if the method takes other arguments, the weight is not finite, or an async method is inline.
    """
    if method is None:
        return lambda method: _marked(method, weight, name, inline=inline)
    return _marked(method, weight, name, inline=inline)


@overload
def group_reward(method: G, /) -> G: ...
@overload
def group_reward(*, weight: float = 1.0, name: str | None = None) -> Callable[[G], G]: ...
def group_reward(method: G | None = None, /, *, weight: float = 1.0, name: str | None = None) -> G | Callable[[G], G]:
    """Make a component of the reward of an `Env` method, sync or async, that compares the episodes of one task.

    It takes an `EpisodeGroup` and returns one value per episode, in their order; None means "not scored". It is called
    once every episode of the group has ended, on an instance of the environment that was not reset. Episodes that
    failed are not in the group. Where tasks are run once, to evaluate, it is not called.

    Args:
        method: the method, when used as a bare `@group_reward`.
        weight: its factor in the episodes' rewards; 0 only records it.
        name: the component's name; the method's name if left out.

    Raises:
        DefinitionError: if the method takes other arguments or the weight is not finite.
    """
    if method is None:
        return lambda method: _marked(method, weight, name, group=True)
    return _marked(method, weight, name, group=True)


def collect_rewards(cls: type) -> tuple[tuple[RewardComponent, ...], tuple[RewardComponent, ...]]:
    """Return the components of a class, of episodes and of groups, each in the order of their definition."""
    seen: dict[str, str] = {}

    def collect(mark: str, decorator: str) -> Iterator[RewardComponent]:
        for attribute, method in declared_members(cls, lambda member: hasattr(member, mark), decorator):
            component: RewardComponent = getattr(method, mark)
            if (name := component.name) in seen:
                raise DefinitionError(f"{cls.__name__}.{seen[name]} and .{attribute} are both rewards called '{name}'")
            seen[name] = attribute
            yield replace(component, attribute=attribute)

    return tuple(collect(_MARK, "@reward")), tuple(collect(_GROUP_MARK, "@group_reward"))


def declared_members(cls: type, is_declared: Callable[[object], bool], decorator: str) -> Iterator[tuple[str, object]]:
    """Yield a decorator's attributes, base classes first; what a subclass overrides keeps its place."""
    bases = reversed(cls.__mro__)
    names = dict.fromkeys(
        name for base in bases for name, member in vars(base).items() if is_declared(_unwrapped(member))
    )
    for name in names:
        member = inspect.getattr_static(cls, name)
        if is_declared(member):
            yield name, member
        elif is_declared(_unwrapped(member)):
            kind = type(member).__name__
            raise DefinitionError(
                f"{cls.__name__}.{name} has {decorator} below @{kind}, where it is not seen: drop {kind}"
            )
        elif member is not None:
            raise DefinitionError(
                f"{cls.__name__}.{name} overrides a method that has {decorator} and has none itself: decorate it, "
                f"or write `{name} = None` to take it out"
            )


def _unwrapped(member: object) -> object:
    """Return what a static method, a class method or a property is of; anything else as it is."""
    if isinstance(member, staticmethod | classmethod):
        return cast(object, member.__func__)
    return member.fget if isinstance(member, property) else member


def is_reward(member: object) -> bool:
    """Return whether something is a component of a reward, of episodes or of groups."""
    return hasattr(member, _MARK) or hasattr(member, _GROUP_MARK)


def method_of(holder: object, component: RewardComponent) -> Callable[..., Any]:
    """Return a component's method, which an attribute of the same name does not hide."""
    found = next(vars(cls)[component.attribute] for cls in type(holder).__mro__ if component.attribute in vars(cls))
    bound: Callable[..., Any] = found.__get__(holder, type(holder)) if hasattr(found, "__get__") else found
    return bound


def mark_reward(member: object, component: RewardComponent, *, group: bool = False) -> None:
    """Make an attribute of a class a component of the reward, of an episode or of a group."""
    setattr(member, _GROUP_MARK if group else _MARK, component)


def as_reward(component: RewardComponent, value: object, where: str, source: str = "env") -> Reward:
    """Return the reward that a component's method gave, as `checked_reward`; of a judgement, its score or its faults.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is NaN or infinite.
    """
    if not isinstance(value, Judgement):
        return Reward(component.name, checked_reward(value, where), component.weight, source)
    score = checked_reward(value.score, where)
    faults = Counter(map(str, value.faults)) if score is None else {}
    error = f"not judged: {', '.join(f'{fault} ({n})' for fault, n in faults.items())}" if faults else None
    return Reward(component.name, score, component.weight, "judge", error=error)


def rewards_of_failure(components: Iterable[RewardComponent]) -> tuple[Reward, ...]:
    """Return the rewards of an episode that counts as failed and can't be asked for them: 0 of each component."""
    return tuple(Reward(c.name, 0.0, c.weight) for c in components)


def checked_reward(value: object, where: str) -> float | None:
    """Return what a reward method returned as a float, or None.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is NaN or infinite.
    """
    if value is None:
        return None
    if not isinstance(value, _NUMBERS):
        raise TypeError(f"reward {where} returned {value!r}, a {type(value).__name__}; return a number, a bool or None")
    if not _is_finite(value):
        raise ValueError(f'reward {where} returned {value!s:.40}; return a finite number, or None for "not scored"')
    return float(value)


def _is_finite(value: SupportsFloat) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def _marked(method: F, weight: float, name: str | None, *, inline: bool = False, group: bool = False) -> F:
    argument = "group" if group else "episode"
    label = getattr(method, "__qualname__", repr(method))
    if not callable(method):
        raise DefinitionError(f"@ar.reward({method!r}): options have names, such as @ar.reward(weight=0.5)")
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise DefinitionError(f"reward '{label}' has weight={weight}; give a finite number")
    if inline and inspect.iscoroutinefunction(method):
        raise DefinitionError(f"reward '{label}' is async and inline: drop inline=True, it needs no thread")
    try:
        inspect.signature(method).bind("self", argument)
    except TypeError as error:
        raise DefinitionError(
            f"reward '{label}{inspect.signature(method)}' must be a method that takes the finished {argument}: "
            f"def {getattr(method, '__name__', 'reward')}(self, {argument})"
        ) from error
    is_async = inspect.iscoroutinefunction(method)
    component = RewardComponent(name or method.__name__, weight, method.__name__, is_async, inline)
    mark_reward(method, component, group=group)
    return method
