"""Every knob of every preset acts: at four mini-batches it changes a step of a small policy; benchmarks/sweep.py."""

from __future__ import annotations

import sys

import pytest
from tree import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # behind all others: its files import what lies beside them

from sweep import base, is_idle, same, sweep
from swept import CRITIC, IDLE, PRESETS, SET_ASIDE, knobs_of, preset, reason

pytestmark = pytest.mark.sandbox


@pytest.mark.parametrize("name", PRESETS)
def test_knobs_of_presets_change_the_policy_or_are_refused(name: str) -> None:
    wanted = knobs_of(name)
    found = sweep(name, wanted)
    assert found.keys() == wanted
    idle = {knob for knob, changed in found.items() if is_idle(changed)}
    assert idle == {knob for knob in wanted if reason(knob, name)}
    refused = {knob: why for knob, why in found.items() if isinstance(why, str)}
    without = {"advantage.eps"} if preset(name).advantage.get("std") is False else set()
    assert wanted & without <= refused.keys() <= SET_ASIDE | without
    assert all("set " in why or "leave it out" in why for why in refused.values())


def test_presets_are_as_many_algorithms() -> None:
    moved = {name: base(preset(name)) for name in PRESETS}
    assert all(change.isfinite().all() and change.norm() > 0.01 for change in moved.values())
    assert same(PRESETS) == []


def test_table_of_the_sweep_has_every_knob() -> None:
    knobs = {knob for name in PRESETS for knob in knobs_of(name)}
    assert {f"critic.{knob}" for knob in CRITIC} | IDLE.keys() <= knobs
    section = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8").split("### Every knob\n")[1].split("\n## ")[0]
    assert {line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")} - {"setting"} == knobs
