"""docs/fidelity.md, made of the presets and of docs/fidelity.yaml: `python -m tests.fidelity` writes it.

A preset NAME-paper has its source's value where NAME has another and the parts can express it; its rows are NAME's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from yaml import safe_load

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.updates import UpdatesConfig
from agent_rl.config import choices

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "fidelity.md"
UNKNOWN = {"not checked", "not stated"}
INTRODUCTION = """# Fidelity: the presets and their sources

What each preset of `agent-rl train algorithm=NAME` sets, what its source has, and why ours differs. This page is made
of `configs/algorithm/` and `docs/fidelity.yaml`, and a test fails where a preset has a setting without a row, or
differs from its source without a reason. Where a repository is named, its files were read at that commit. A value that
cites a section, an equation or a table only was known from before: the papers were not read again for this page, but
for the parts that a preset's head names. *Not stated* says that the source gives no value; *not checked* that it was
not looked up, or not found; *not used* that a setting does nothing with the others as they are.

*updates* is how many updates a batch gets, a setting of the run: one, unless it or a preset says more. Several cost
little time, but at the default learning rate, which is tuned for one, four did no better and 16 fell (BENCHMARKS.md,
Several updates a batch): they want a smaller `optimizer.lr`. NAME-paper takes its source's
number, where that is stated and another than one; of gigpo's script it is one for 256 turns, which no number says, and
of gspo it is all that differs, so that `updates.minibatches=4` makes GSPO's of it.
The optimizer, the learning rate, the temperature and the sizes of a batch are the run's, too, and not compared here.
Every log-ratio is clamped to ± 20. NAME-paper is a preset of its own:
NAME, with its source's values in the rows that its table lists.
"""


class Row(NamedTuple):
    """What the sources say about a setting."""

    where: str
    value: str
    why: str = ""

    @classmethod
    def read(cls, given: list[object]) -> Row:
        return cls(str(given[0]), written(given[1]), *map(str, given[2:]))


Rows = Mapping[str, list[object]]


@functools.cache
def data() -> dict[str, Any]:
    """Return docs/fidelity.yaml."""
    return safe_load((ROOT / "docs" / "fidelity.yaml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def rows_of(name: str) -> Rows:
    """Return the rows of a preset's own table."""
    return data()["presets"][source_of(name)]["rows"]  # type: ignore[no-any-return]


def everywhere() -> Rows:
    """Return the rows of what presets leave at their defaults."""
    return data()["everywhere"]  # type: ignore[no-any-return]


def row_of(name: str, setting: str) -> Row | None:
    """Return the row of a preset's setting: its own, or that of all presets which leave the default."""
    found = rows_of(name).get(setting) or everywhere().get(setting)
    return Row.read(found) if found else None


def source_of(name: str) -> str:
    """Return the preset whose source a preset has."""
    return name.removesuffix("-paper")


@functools.cache
def preset(name: str) -> AlgorithmConfig:
    """Return a preset; without Hydra, which takes 50 ms for each."""
    return AlgorithmConfig.model_validate({key: value for key, value in _given(name).items() if key != "updates"})


def updates(name: str) -> int:
    """Return how many updates a batch gets by a preset."""
    return UpdatesConfig.model_validate(_given(name).get("updates", {})).most


def _given(name: str) -> dict[str, object]:
    given = safe_load((ROOT / "configs" / "algorithm" / f"{name}.yaml").read_text(encoding="utf-8"))
    (base,) = given.pop("defaults", [None])
    return given if base is None else _merged(_given(base), given)


def _merged(base: dict[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    both = {key: (base.get(key), value) for key, value in changes.items()}
    deep = {k: _merged(b, v) if isinstance(b, dict) and isinstance(v, dict) else v for k, (b, v) in both.items()}
    return base | deep


@functools.cache
def settings(name: str) -> dict[str, str]:
    """Return the settings that make a preset's update, with their values as text; the number of updates, too."""
    return {"updates": written(updates(name))} | dict(_acting(preset(name)))


@functools.cache
def defaults() -> dict[str, str]:
    return dict(_acting(AlgorithmConfig()))


def _acting(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    idle = {
        "kl": config.kl.where == "none" and {"coefficient", "kind"},
        "critic": config.critic.where == "none" and {"coefficient", "clip_eps", "lr", "warmup_steps"},
        "refill": config.refill.max_rounds == 1 and {"oversampling"},
        "vine": config.vine.max_episodes == 0 and {"continuations", "max_episodes"},
    }
    for part, value in config.model_dump(exclude={"name"}).items():
        if isinstance(value, list | tuple):
            yield part, written([chosen["name"] for chosen in value])
            for chosen in value:
                yield from ((f"{part}.{chosen['name']}.{k}", written(v)) for k, v in chosen.items() if k != "name")
        elif isinstance(value, dict):
            if "name" in value:
                yield part, written(value["name"])
            left_out = {"name"} | (idle.get(part) or set())
            yield from ((f"{part}.{knob}", written(v)) for knob, v in value.items() if knob not in left_out)
        else:
            yield part, written(value)


def written(value: object) -> str:
    """Return a value as the page has it: numbers in one form, whichever they are written in."""
    if value is None or value == [] or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(written, value))
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def page() -> str:
    """Return the page."""
    names = sorted(choices("algorithm"), key=lambda name: (source_of(name), name))
    rows = [_line(setting, defaults()[setting], Row.read(row)) for setting, row in everywhere().items()]
    about = "What a preset leaves at its default and has no row for in its own table."
    return "\n".join([INTRODUCTION, *map(_section, names), f"## Every other setting\n\n{about}\n\n{_table(rows)}"])


def _section(name: str) -> str:
    own, source = settings(name), source_of(name)
    if name == source:
        about = data()["presets"][name]["source"]
        wanted = [*(s for s in own if s in rows_of(name)), *(s for s in rows_of(name) if s not in own)]
    else:
        about = f"As {source}, with its source's values for these."
        wanted = [s for s in own if own[s] != settings(source).get(s)]
    found = {s: Row.read(rows_of(name)[s]) for s in wanted}
    if name != source:  # why the other preset differs
        found = {s: row._replace(why="") for s, row in found.items()}
    return f"## {name}\n\n{about}\n\n{_table([_line(s, own.get(s, 'not used'), row) for s, row in found.items()])}"


def _line(setting: str, ours: str, row: Row) -> str:
    return f"| {setting} | {ours} | {row.value} | {row.where} | {row.why if ours != row.value else ''} |"


def _table(lines: list[str]) -> str:
    return "\n".join(
        ["| setting | ours | the source's | where | why ours differs |", "|---|---|---|---|---|", *lines, ""]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
