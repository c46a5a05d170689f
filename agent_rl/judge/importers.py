"""Rubrics of other projects, translated to our own format: each names the normaliser that its source scores by.

    HealthBench      rows of criterion, points and tags; sum of the points met over the sum of the positive ones
    open-instruct    title, description and weight, also DR Tulu's; 0, 1 or 2 of 2, over the sum of absolute weights
    verifiers        name, text, weight and choices from worst to best, judged by the transcript; a weighted mean
    PaperBench       a tree of requirements; a leaf's weight is its share of its siblings', times its parent's

DR Tulu's own reward code divides by the positive weights: write `"normalize": "positive"` beside the rubrics for it.
What has no weight is left out, with a line in the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError

_log = logging.getLogger(__name__)
_Row: TypeAlias = Mapping[str, JSON]

DESCRIPTIONS = ("description", "rubric_item", "Ingredient")
"""Where open-instruct's data sets have a criterion's text."""


def _items(value: JSON, *keys: str) -> list[_Row]:
    """Return the criteria that are in a list, or in a mapping's list under one of the keys; none if there are none."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in keys if key in value), None)
    found = list(value) if isinstance(value, list | tuple) else []
    return cast("list[_Row]", found) if all(isinstance(each, Mapping) for each in found) else []


def _have(items: Sequence[_Row], *keys: str) -> bool:
    return bool(items) and all(any(key in item for key in keys) for item in items)


def _has_weight(item: _Row, where: str) -> float:
    weight = item.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        raise ConfigError(f"{where} has weight={weight!r}: give a number from 0 on, as its format does")
    return weight


def _weighed(criteria: Sequence[dict[str, JSON]], format: str) -> list[JSON]:
    kept: list[JSON] = [criterion for criterion in criteria if criterion["weight"] != 0]
    if len(kept) < len(criteria):
        left_out = [str(c.get("id") or c["text"])[:60] for c in criteria if c["weight"] == 0]
        _log.warning("%s: %d criteria without weight are left out: %s", format, len(left_out), "; ".join(left_out))
    if not kept:
        raise ConfigError(f"no criterion of this {format} rubric has a weight: give one of them more than 0")
    return kept


# --- HealthBench ---


def _is_healthbench(value: JSON) -> bool:
    items = _items(value, "rubrics")
    return _have(items, "criterion") and _have(items, "points")


def _healthbench(value: JSON) -> _Row:
    criteria: list[dict[str, JSON]] = [
        {"text": item["criterion"], "weight": item["points"], "tags": item.get("tags") or []}
        for item in _items(value, "rubrics")
    ]
    return {"criteria": _weighed(criteria, "HealthBench")}


# --- open-instruct, DR Tulu ---


def _ground_truth(value: JSON) -> JSON:
    """Return the row's rubric, which open-instruct's data sets hold as JSON, some in a list."""
    if isinstance(value, Mapping) and "ground_truth" in value:
        value = value["ground_truth"]
        if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], str):
            value = value[0]
        if isinstance(value, str):
            try:
                return cast(JSON, json.loads(value))
            except ValueError:
                return None
    return value


def _is_open_instruct(value: JSON) -> bool:
    items = _items(_ground_truth(value), "rubrics")
    return _have(items, *DESCRIPTIONS) and not _have(items, "text")


def _open_instruct(value: JSON) -> _Row:
    rubrics = _ground_truth(value)
    row = rubrics if isinstance(rubrics, Mapping) else {}
    types = found if isinstance(found := row.get("rubrics_types"), list | tuple) else ()
    criteria = list[dict[str, JSON]]()
    for number, item in enumerate(_items(rubrics, "rubrics")):
        title, text = item.get("title"), next(item[key] for key in DESCRIPTIONS if key in item)
        criteria.append(
            {
                "text": f"{title}: {text}" if title and title != text else text,
                "weight": cast(float, item.get("weight", 1.0)),
                "choices": ["no", "partly", "yes"],
                "tags": list(types[number : number + 1]),
            }
        )
    return {"normalize": row.get("normalize", "absolute"), "criteria": _weighed(criteria, "open-instruct")}


# --- verifiers ---


_VERIFIERS_KEYS = {"name", "text", "weight", "choices"}


def _is_verifiers(value: JSON) -> bool:
    items = _items(value, "criteria")
    return _have(items, "name") and _have(items, "text") and not any(item.keys() - _VERIFIERS_KEYS for item in items)


def _verifiers(value: JSON) -> _Row:
    criteria = list[dict[str, JSON]]()
    for item in _items(value, "criteria"):
        rest = {key: each for key, each in item.items() if key != "name"}
        criteria.append({"weight": 1.0, "view": "transcript", **rest, "id": item["name"]})
        _has_weight(criteria[-1], f"criterion '{item['name']}'")
    return {"criteria": _weighed(criteria, "verifiers")}


# --- PaperBench ---


def _is_paperbench(value: JSON) -> bool:
    return isinstance(value, Mapping) and "requirements" in value and "sub_tasks" in value


def _paperbench(value: JSON) -> _Row:
    return {"criteria": _weighed(list(_leaves(cast(_Row, value), 1.0, ())), "PaperBench")}


def _leaves(node: _Row, share: float, above: tuple[str, ...]) -> Iterator[dict[str, JSON]]:
    """Yield the leaves of a node, with the requirements above them; its share of the tree's score is given."""
    children = _items(node, "sub_tasks")
    if missing := [key for key in ("requirements", *(() if children else ("id",))) if key not in node]:
        raise ConfigError(f"node {str(dict(node))[:80]} has no {' and no '.join(missing)}")
    requirements = str(node["requirements"])
    if not children:
        text = f"{requirements}\n(Part of: {' / '.join(above)})" if above else requirements
        category = node.get("task_category")
        yield {"id": str(node["id"]), "text": text, "weight": share, "tags": [category] if category else []}
    weights = [_has_weight(child, f"node '{child.get('id')}'") for child in children]
    total = sum(weights)
    for child, weight in zip(children, weights, strict=True):
        yield from _leaves(child, share * weight / total if total else 0.0, (*above, requirements))


FORMATS: Mapping[str, tuple[Callable[[JSON], bool], Callable[[JSON], _Row]]] = {
    "HealthBench": (_is_healthbench, _healthbench),
    "open-instruct": (_is_open_instruct, _open_instruct),
    "verifiers": (_is_verifiers, _verifiers),
    "PaperBench": (_is_paperbench, _paperbench),
}
"""How a rubric of each is recognised, and translated; no two recognise the same."""
