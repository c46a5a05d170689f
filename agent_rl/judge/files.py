"""Rubric files: our own YAML and JSON, and those of other projects, recognised by their keys.

Ours, with everything but the criteria's texts left out where it is the default:

    name: capital
    normalize: positive            # or absolute, none
    criteria:
      - text: Names Paris.
        weight: 2
        rule: {contains: Paris}    # agent_rl.judge.rules; without one, a model judges
      - text: Invents a source.
        weight: -1
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.judge.importers import FORMATS
from agent_rl.judge.rubric import Criterion, Normalize, Rubric, Rule, View
from agent_rl.judge.rule_kinds import KINDS, check_rule, describe_rule

ID_WORDS = 6
"""Of a text, for the id of a criterion that has none."""
ROW_IDS = ("prompt_id", "id", "task_id", "question_id")
"""Keys that name a row of a file with many rubrics, the first that it has."""


def _as_word(value: object) -> object:
    return {False: "no", True: "yes"}[value] if isinstance(value, bool) else value


_Word = Annotated[str, BeforeValidator(_as_word)]
"""A text: YAML reads a bare no and yes as false and true."""


class _CriterionSpec(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", coerce_numbers_to_str=True)

    id: str = ""
    text: str = ""
    weight: float = 1.0
    choices: tuple[_Word, ...] = ("no", "yes")
    view: View = "answer"
    gate: bool = False
    may_be_na: bool = False
    rule: dict[str, JSON] | None = None
    tags: tuple[str, ...] = ()
    source: str = "static"


class _RubricSpec(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", coerce_numbers_to_str=True)

    name: str = ""
    version: str = "1"
    normalize: Normalize = "positive"
    clip: tuple[float, float] | None = None
    criteria: list[dict[str, JSON] | str]


def load_rubric(source: str | Path | Mapping[str, JSON]) -> Rubric:
    """Return the rubric of a file, or of a mapping with its content.

    Raises:
        ConfigError: naming the file, the criterion and the key or value that is wrong.
    """
    if isinstance(source, Mapping):
        return rubric_of(source)
    path = Path(source)
    content = _read(path)
    if path.suffix == ".jsonl":
        if not isinstance(content, list) or len(content) != 1:
            raise ConfigError(f"{path} has a rubric a row: give load_rubrics the file, and take one by its id")
        content = content[0]
    return _rubric(content, path.stem, str(path))


def load_rubrics(path: str | Path) -> dict[str, Rubric]:
    """Return the rubrics of a .jsonl file with one a row, by the row's id, or its number from 0 if it has none.

    Raises:
        ConfigError: naming the file, the row and what is wrong.
    """
    path = Path(path)
    rows = _read(path)
    if path.suffix != ".jsonl" or not isinstance(rows, list):
        raise ConfigError(f"{path} is no .jsonl file: give load_rubric a file with one rubric")
    found = dict[str, Rubric]()
    for number, row in enumerate(rows):
        names = [str(row[key]) for key in ROW_IDS if row.get(key) is not None] if isinstance(row, Mapping) else []
        name = names[0] if names else str(number)
        if name in found:
            raise ConfigError(f"{path}: two rows have the id '{name}'")
        found[name] = _rubric(row, name, f"{path}: row {number + 1}")
    return found


def rubric_of(value: JSON, name: str = "rubric") -> Rubric:
    """Return the rubric that a value holds, such as a task's: a mapping, a list of criteria, or either as JSON.

    Args:
        value: in our own format, or that of HealthBench, open-instruct, verifiers or PaperBench.
        name: of the rubric, if the value has none.

    Raises:
        ConfigError: naming the criterion and the key or value that is wrong.
    """
    return _rubric(value, name, "")


def dump_rubric(rubric: Rubric) -> dict[str, JSON]:
    """Return a rubric as `load_rubric` reads it, without what is a default."""
    dumped: dict[str, JSON] = {"name": rubric.name}
    dumped |= _without_defaults(rubric, {"version": "1", "normalize": "positive", "clip": None})
    return {**dumped, "criteria": [_dump_criterion(criterion) for criterion in rubric.criteria]}


def save_rubric(rubric: Rubric, path: str | Path) -> None:
    """Write a rubric to a .yaml or .json file."""
    from yaml import safe_dump  # type: ignore[import-untyped]

    dumped = dump_rubric(rubric)
    is_json = Path(path).suffix == ".json"
    text = json.dumps(dumped, indent=2, ensure_ascii=False) + "\n" if is_json else None
    Path(path).write_text(text or safe_dump(dumped, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")


# --- reading ---


def _read(path: Path) -> JSON:
    from yaml import YAMLError

    readers: dict[str, Callable[[str], object]] = {
        ".yaml": _read_yaml,
        ".yml": _read_yaml,
        ".json": _read_json,
        ".jsonl": lambda text: [_read_json(line) for line in text.split("\n") if line.strip()],
        ".toml": _read_toml,
    }
    if path.suffix not in readers:
        raise ConfigError(f"rubric={path} is no rubric file: it ends in {', '.join(readers)}")
    try:
        content = readers[path.suffix](path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, YAMLError, RecursionError) as error:
        raise ConfigError(f"the rubric {path} can't be read: {' '.join(str(error).split())}") from error
    return cast(JSON, json.loads(json.dumps(content, default=str)))  # YAML makes dates of 2024-01-01


def _read_yaml(text: str) -> object:
    from yaml import MappingNode, SafeLoader, load

    class Loader(SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: str | None) -> MappingNode:
            node = super().compose_mapping_node(anchor)
            _once([(str(key.value), value) for key, value in node.value])
            return node

    return load(text, Loader)


def _read_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return pairs as a dict; each key is in it once, as the last would quietly take the place of the others."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at])]
        raise ValueError(f"it has the key '{twice[0]}' twice in one place: write it once")
    return found


def _read_toml(text: str) -> object:
    import tomllib

    return tomllib.loads(text)


def _rubric(value: JSON, name: str, where: str) -> Rubric:
    """Return the rubric of a value, in whichever format; `where` begins each message."""
    prefix = f"{where}: " if where else ""
    if isinstance(value, str):
        try:
            value = cast(JSON, _read_json(value))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{prefix}{value!r:.60} is no rubric in JSON: {error}") from error
    try:
        return _checked(_in_our_format(value), name)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error.__cause__


def _in_our_format(value: JSON) -> Mapping[str, JSON]:
    for is_of_format, translate in FORMATS.values():
        if is_of_format(value):
            return translate(value)
    if isinstance(value, list | tuple):
        return {"criteria": value}
    if isinstance(value, Mapping):
        return value
    raise ConfigError(
        f"{value!r:.60} is no rubric: give a mapping with criteria, in our format or {', '.join(FORMATS)}"
    )


def _checked(value: Mapping[str, JSON], name: str) -> Rubric:
    try:
        spec = _RubricSpec.model_validate(value)
    except ValidationError as error:
        raise ConfigError(_explain(error, _RubricSpec, "the rubric")) from error
    criteria, ids = list[Criterion](), set[str]()
    given = {str(each["id"]) for each in spec.criteria if isinstance(each, Mapping) and each.get("id")}
    for number, each in enumerate(spec.criteria, 1):
        criterion = _criterion({"text": each} if isinstance(each, str) else each, number, given | ids)
        ids.add(criterion.id)
        criteria.append(criterion)
    return Rubric(spec.name or name, tuple(criteria), spec.version, spec.normalize, spec.clip)


def _criterion(value: Mapping[str, JSON], number: int, taken: set[str]) -> Criterion:
    named = value.get("id") or value.get("text") or ""
    where = f"criterion {number}" + (f" ('{str(named)[:40]}')" if named else "")
    try:
        spec = _CriterionSpec.model_validate(value)
    except ValidationError as error:
        raise ConfigError(_explain(error, _CriterionSpec, where)) from error
    try:
        rule = None if spec.rule is None else _rule(spec.rule)
        text = spec.text or ("" if rule is None else describe_rule(rule))
        if not text.strip():
            raise ConfigError("it has no text: write what is asked, such as `text: Names Paris.`")
        settings = spec.model_dump(exclude={"id", "text", "rule"})
        return Criterion(spec.id or _id_of(text, number, taken), text, rule=rule, **settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _rule(value: Mapping[str, JSON]) -> Rule:
    """Return the rule of `{KIND: value, option: ...}` or `{KIND: {value: ..., option: ...}}`."""
    kinds = [key for key in value if key in KINDS]
    if len(kinds) != 1:
        known = ", ".join(KINDS)
        if kinds or not value:
            raise ConfigError(f"a rule has one kind, this has {len(kinds)}: write {{KIND: VALUE}}, of {known}")
        hint = did_you_mean(next(iter(value)), KINDS)
        raise ConfigError(f"no rule '{next(iter(value))}'.{hint} There are: {known}")
    kind = kinds[0]
    compared, options = value[kind], {key: option for key, option in value.items() if key != kind}
    if isinstance(compared, Mapping) and "value" in compared:
        options |= {key: option for key, option in compared.items() if key != "value"}
        compared = compared["value"]
    rule = Rule(kind, compared, options)
    check_rule(rule)
    return rule


def _id_of(text: str, number: int, taken: set[str]) -> str:
    """Return an id of a text's first words: the same wherever the criterion is in its rubric, if no other has it."""
    words = re.findall(r"\w+", text.lower())[:ID_WORDS]
    name = "-".join(words)[:60] or f"criterion-{number}"
    return name if name not in taken else next(f"{name}-{n}" for n in range(2, 10**9) if f"{name}-{n}" not in taken)


def _explain(error: ValidationError, schema: type[BaseModel], where: str) -> str:
    first = min(
        error.errors(), key=lambda each: each["type"] != "extra_forbidden"
    )  # a wrong key explains a missing one
    key = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and part in schema.model_fields)
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][0])
        hint = did_you_mean(name, schema.model_fields)
        return f"{where} has no key '{name}'.{hint} It may have: {', '.join(schema.model_fields)}"
    if first["type"] == "missing":
        return f"{where} has no '{key}': write a list of criteria, each with a text or a rule"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where}: {key}={first['input']!r:.60}: {message}"


# --- writing ---


def _dump_criterion(criterion: Criterion) -> JSON:
    defaults = {name: field.default for name, field in _CriterionSpec.model_fields.items()}
    dumped: dict[str, JSON] = {"id": criterion.id, "text": criterion.text}
    dumped |= _without_defaults(criterion, {k: v for k, v in defaults.items() if k not in ("id", "text", "rule")})
    if criterion.rule is not None:
        dumped["rule"] = _dump_rule(criterion.rule)
    return dumped


def _dump_rule(rule: Rule) -> JSON:
    holds_value = isinstance(rule.value, Mapping) and "value" in rule.value
    return {rule.kind: {"value": rule.value} if holds_value else rule.value, **rule.options}


def _without_defaults(part: object, defaults: Mapping[str, object]) -> dict[str, JSON]:
    values = {name: getattr(part, name) for name, default in defaults.items() if getattr(part, name) != default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
