"""Domains: what a key of verl's config takes, as verl_keys.txt words it."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from agent_rl.errors import did_you_mean

_NUMBER = re.compile(r"(int|float)(?:(>=|>)(-?\d+)|([\[(])(\d),(\d)])?")


def misfit(key: str, value: object, domain: str, value_of: Callable[[str], object]) -> str | None:
    """Return why verl has no use for a value at a key; None if it has.

    Args:
        key: in full.
        value: what it is set to.
        domain: what it takes, as verl_keys.txt has it.
        value_of: looks other keys up.
    """
    if domain.endswith("?") and value is None:
        return None
    domain = domain.removesuffix("?")
    if domain in _SPECIAL:
        return _SPECIAL[domain](key, value, value_of)
    if number := _NUMBER.fullmatch(domain):
        return None if _is_within(value, number) else f"it takes {_in_words(number)}"
    if domain in _TYPES:
        kind, words = _TYPES[domain]
        return None if isinstance(value, kind) else f"it takes {words}"
    choices = domain.split("|")
    return None if str(value) in choices else f"it takes {' or '.join(choices)}.{did_you_mean(str(value), choices)}"


_TYPES: dict[str, tuple[type, str]] = {"bool": (bool, "true or false"), "text": (str, "text"), "any": (object, "any")}


def _is_within(value: object, number: re.Match[str]) -> bool:
    kind, sign, bound, bracket, low, high = number.groups()
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else (int, float)):
        return False
    if not math.isfinite(value):
        return False
    if bracket:
        return (value > int(low) if bracket == "(" else value >= int(low)) and value <= int(high)
    return sign is None or (value > int(bound) if sign == ">" else value >= int(bound))


def _in_words(number: re.Match[str]) -> str:
    kind, sign, bound, bracket, low, high = number.groups()
    words = "a whole number" if kind == "int" else "a number"
    if bracket:
        return f"{words} in {bracket}{low}, {high}]"
    return f"{words} {'above' if sign == '>' else 'of at least'} {bound}" if sign else words


Special = Callable[[str, object, Callable[[str], object]], "str | None"]


def _list_of(kind: type, words: str) -> Special:
    def misfit(key: str, value: object, value_of: Callable[[str], object]) -> str | None:
        fits = isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
        return None if fits else f"it takes a list of {words}"

    return misfit


def _betas(key: str, value: object, value_of: Callable[[str], object]) -> str | None:
    fits = isinstance(value, list) and len(value) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in value)
    return None if fits else "it takes two numbers in [0, 1)"


def _contents(key: str, value: object, value_of: Callable[[str], object]) -> str | None:
    needed, possible = {"model", "optimizer", "extra"}, {"model", "optimizer", "extra", "hf_model"}
    given = set(map(str, value)) if isinstance(value, list) else set()
    if given <= possible and needed <= given:
        return None
    return f"it takes a list of {', '.join(sorted(possible))}, of which a resumed run needs {', '.join(sorted(needed))}"


def _loggers(key: str, value: object, value_of: Callable[[str], object]) -> str | None:
    from verl.utils.tracking import Tracking

    unknown = [name for name in value if name not in Tracking.supported_backend] if isinstance(value, list) else [value]
    if not unknown:
        return None
    near = did_you_mean(str(unknown[0]), Tracking.supported_backend)
    return f"it takes a list of {', '.join(Tracking.supported_backend)}.{near}"


def _optimizer(key: str, value: object, value_of: Callable[[str], object]) -> str | None:
    """Check an optimizer's name in its module, or an argument of it."""
    section = key.partition(".optim.")[0] + ".optim"
    module, name = str(value_of(f"{section}.optimizer_impl")), str(value_of(f"{section}.optimizer"))
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        return f"{module} can't be imported: {error}"
    if found is None:
        return f"{module} has no optimizer '{name}'.{did_you_mean(name, dir(importlib.import_module(module)))}"
    argument = key.partition(".override_optimizer_config.")[2]
    parameters = inspect.signature(found).parameters
    if argument and argument not in parameters:
        return f"{module}.{name} has no argument '{argument}'.{did_you_mean(argument, parameters)}"
    return None


def _runtime_env(key: str, value: object, value_of: Callable[[str], object]) -> str | None:
    from ray.runtime_env import RuntimeEnv

    name, _, below = key.partition(".runtime_env.")[2].partition(".")
    if name not in RuntimeEnv.known_fields:
        return f"Ray has no such part of an environment.{did_you_mean(name, RuntimeEnv.known_fields)}"
    if name == "env_vars" and (not below or not isinstance(value, str)):
        return "it takes text, below env_vars: quote a number"
    return None


def _vllm_argument(key: str, value: object, value_of: Callable[[str], object]) -> str | None:
    """Check an argument of vLLM's server by its source: to import it takes half a minute."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return None
    name, known = key.partition(".vllm.")[2].partition(".")[0], _vllm_arguments(Path(found.origin).parent)
    if name not in known:
        return f"vLLM has no argument '{name}'.{did_you_mean(name, known)}"
    kinds = known[name].split(" | ")
    if any(kind not in _PLAIN for kind in kinds):
        return None
    fits = any(isinstance(value, _PLAIN[kind]) and isinstance(value, bool) == (kind == "bool") for kind in kinds)
    return None if fits else f"it takes {known[name]}"


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}


def _vllm_arguments(package: Path) -> dict[str, str]:
    """Return the fields of vLLM's argument classes, with their annotations."""
    found: dict[str, str] = {}
    for file in ("engine/arg_utils.py", "entrypoints/openai/cli_args.py"):
        if (package / file).exists():
            for cls in ast.walk(ast.parse((package / file).read_text(encoding="utf-8"))):
                if isinstance(cls, ast.ClassDef):
                    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
                    found |= {ast.unparse(node.target): ast.unparse(node.annotation) for node in fields}
    return found


def _model_setting(key: str, value: object, value_of: Callable[[str], object]) -> str | None:
    """Check a setting of the model's own config, if its folder is here."""
    from transformers import AutoConfig

    name = key.partition(".override_config.")[2].partition(".")[0]
    folder = Path(str(value_of("actor_rollout_ref.model.path")))
    if name == "attn_implementation":
        choices = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
        return None if value in choices else f"it takes {' or '.join(choices)}.{did_you_mean(str(value), choices)}"
    known = AutoConfig.from_pretrained(folder).to_dict() if (folder / "config.json").exists() else {name: None}
    near = did_you_mean(name, [*known, "attn_implementation"])
    return None if name in known else f"the model's config has no '{name}'.{near}"


_SPECIAL: dict[str, Special] = {
    "list": _list_of(str, "text"),
    "ints": _list_of(int, "whole numbers"),
    "betas": _betas,
    "contents": _contents,
    "loggers": _loggers,
    "optimizer": _optimizer,
    "runtime_env": _runtime_env,
    "vllm": _vllm_argument,
    "model": _model_setting,
}
