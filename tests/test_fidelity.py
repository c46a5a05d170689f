"""docs/fidelity.md: every setting that makes a preset's update is there, beside its source's, with a reason."""

import pytest

from agent_rl.algorithms.explain import UPDATES_OF_SOURCES
from agent_rl.algorithms.updates import UpdatesConfig
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.config import choices, load_config, setting_names
from tests.fidelity import (
    PAGE,
    UNKNOWN,
    data,
    defaults,
    page,
    preset,
    row_of,
    rows_of,
    settings,
    source_of,
    updates,
    written,
)

PRESETS = choices("algorithm")
PAPERS = [name for name in PRESETS if name.endswith("-paper")]


def test_fidelity_page_is_made_of_the_presets() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.fidelity"


def test_preset_has_a_row_for_every_setting() -> None:
    assert [(n, s) for n in PRESETS for s in settings(n) if row_of(n, s) is None] == []
    # a row of all presets is about the default
    rest = [(n, s, v) for n in PRESETS for s, v in settings(n).items() if s not in rows_of(n)]
    assert [(n, s) for n, s, v in rest if v != defaults().get(s)] == []


def test_setting_of_a_preset_has_its_own_row() -> None:
    for name in PRESETS:
        given = preset(name).model_fields_set - {"name"}
        assert given <= {setting.split(".")[0] for setting in rows_of(name)}, name


def test_deviation_from_a_source_has_a_reason() -> None:
    found = [(n, s, v, row) for n in PRESETS for s, v in settings(n).items() if (row := row_of(n, s))]
    assert [x for x in found if x[2] != x[3].value and x[3].value not in UNKNOWN and not x[3].why] == []
    assert sum(x[2] != x[3].value for x in found) > 50


def test_fidelity_data_names_settings_and_presets() -> None:
    assert sorted(data()["presets"]) == sorted({source_of(name) for name in PRESETS})
    known = {name.removeprefix("algorithm.") for name in setting_names(TrainConfig)} | {"updates"}
    for name in data()["presets"]:
        # those of the parts in a list are named after the part, and only where it is chosen
        assert {s for s in rows_of(name) if s.count(".") < 2} - known == set(), name
        chosen = {s for n in PRESETS if source_of(n) == name for s in settings(n)}
        assert {s for s in rows_of(name) if s.count(".") == 2} <= chosen, name


@pytest.mark.parametrize("name", PAPERS)
def test_paper_preset_has_the_values_of_its_source(name: str) -> None:
    changed = {s: v for s, v in settings(name).items() if v != settings(source_of(name)).get(s)}
    assert preset(name).name == name and changed
    assert [
        s for s, v in changed.items() if rows_of(name)[s][1] not in UNKNOWN and written(rows_of(name)[s][1]) != v
    ] == []


def test_paper_preset_sets_the_updates_of_a_run() -> None:
    def run(*settings: str) -> UpdatesConfig:
        return load_config("backend/embedded", TrainConfig, settings).updates

    assert run("algorithm=gdpo").most == 1 and run("algorithm=gdpo-paper").minibatches == 4
    asked = run("algorithm=gdpo-paper", "updates.epochs=2")
    assert (asked.minibatches, asked.epochs) == (4, 2)
    assert run("algorithm=gdpo-paper", "updates.minibatches=1").most == 1
    assert load_config("backend/embedded", TrainConfig, ["algorithm=ppo-paper"]).updates.most == 320


def test_paper_preset_takes_the_updates_of_its_source() -> None:
    stated = {name: rows_of(name)["updates"][1] for name in PRESETS if name == source_of(name)}
    several = {f"{name}-paper": number for name, number in stated.items() if isinstance(number, int) and number > 1}
    listed = {f"{name}-paper": int(text.split()[0].strip(",")) for name, text in UPDATES_OF_SOURCES.items()}
    assert listed == several
    assert several.pop("gspo-paper") == 4  # `algorithm=gspo updates.minibatches=4` is all of it
    sources = {setting: written(value) for setting, (_, value, *_) in rows_of("gspo").items()}
    assert [s for s, v in sources.items() if v not in UNKNOWN | {settings("gspo")[s]}] == ["updates"]
    assert {name: updates(name) for name in several} == several and "cispo-paper" in several


def test_paper_preset_is_composed_of_its_base() -> None:
    composed = load_config("backend/embedded", TrainConfig, ["algorithm=vineppo-paper"]).algorithm
    assert composed == preset("vineppo-paper") and composed.vine.max_episodes == preset("vineppo").vine.max_episodes
