"""`agent-rl view runs/latest --tui`: the screens, driven by keys without a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from agent_rl.cli import main
from agent_rl.core.messages import Message
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.token_records import TokenRecord, TokenRecordWriter
from agent_rl.view.tui.app import Browser
from agent_rl.view.tui.base import PAGE
from tests.doubles import example_episode

HOSTILE = "\x1b[2J[bold]x[/bold]\u202e"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs: one episode, and more than a page of them."""
    folder = tmp_path_factory.mktemp("runs")
    with EpisodeWriter(folder / "one") as writer:
        messages = (*example_episode().messages[:3], Message("tool", HOSTILE, name=HOSTILE), Message("assistant", "49"))
        writer.write(example_episode("hostile", messages=messages))
    with EpisodeWriter(folder / "many") as writer:
        for n in range(PAGE + 10):
            rewards = (replace(example_episode().rewards[0], value=n / 200),)
            writer.write(example_episode(f"e{n:03d}", group_id=f"g{n // 4}", rewards=rewards))
    with TokenRecordWriter(folder / "many") as records:
        values = np.array([0.5, 0.5, -1.0, -1.0], np.float32)
        records.write([TokenRecord("e000", 0, 5, values, np.array([-0.5, -0.1, -0.1, -2.0], np.float32))])
    return folder


def browsed(path: Path, drive: Callable[[Pilot[None]], Awaitable[None]], size: tuple[int, int] = (80, 24)) -> None:
    async def run() -> None:
        async with Browser(path).run_test(size=size) as pilot:
            await pilot.pause()
            await drive(pilot)

    asyncio.run(run())


def shown(pilot: Pilot[Any], id: str) -> str:
    return str(pilot.app.screen.query_one(id, Static).content)


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await pilot.pause()


def test_tui_browses_from_runs_to_tokens_and_back(runs: Path) -> None:
    async def drive(pilot: Pilot[None]) -> None:
        table = pilot.app.screen.query_one(DataTable)
        assert {str(table.get_row_at(n)[0]) for n in range(table.row_count)} == {"one", "many"}
        await press(pilot, *(["down"] if str(table.get_row_at(0)[0]) == "one" else []), "enter")
        assert f"{PAGE + 10} of {PAGE + 10} episodes" in shown(pilot, "#note")
        await press(pilot, "enter")
        assert "e000" in shown(pilot, "#title") and "correct" in shown(pilot, "#text")
        await press(pilot, "down", "down")
        assert 'price(item="chair")' in shown(pilot, "#text") and "no such item" in shown(pilot, "#text")
        await press(pilot, "enter")
        assert shown(pilot, "#text") == "10 11" and "3: id 10, policy, turn 0, logprob -0.500" in shown(pilot, "#note")
        await press(pilot, "right", "right", "right")
        assert "4: id 11" in shown(pilot, "#note"), "the span's last token"
        modes = []
        for _ in range(5):
            await press(pilot, "m")
            modes.append(shown(pilot, "#note").split("\n")[1].partition(":")[0])
        assert modes == ["advantage", "ratio", "version", "source", "logprob"]
        await press(pilot, "escape", "escape", "escape")
        assert shown(pilot, "#note") == "2 runs"

    browsed(runs, drive)


@pytest.mark.sandbox
def test_tui_filters_sorts_and_groups(runs: Path) -> None:
    async def drive(pilot: Pilot[None]) -> None:
        def ids() -> list[str]:
            table = pilot.app.screen.query_one(DataTable)
            return [str(table.get_row_at(n)[0]) for n in range(table.row_count)]

        assert len(ids()) == PAGE
        await press(pilot, "ctrl+end")
        assert len(ids()) == PAGE + 10, "another page is read when its rows are near"
        await press(pilot, "slash", *"reward>=0.275", "enter")
        assert f"{PAGE + 10 - 55} of {PAGE + 10} episodes; where reward>=0.275" in shown(pilot, "#note")
        await press(pilot, "s", *"reward", "enter", "r")
        assert ids()[0] == f"e{PAGE + 9:03d}" and "sort reward; reversed" in shown(pilot, "#note")
        before = ids()
        await press(pilot, "slash", "home", "shift+end", *"rewrd<1", "enter")
        assert "no such field" in shown(pilot, "#note") and ids() == before, "kept where it has no meaning"
        await press(pilot, "slash", "escape")
        assert "where reward>=0.275" in shown(pilot, "#note")
        await press(pilot, "g")
        assert ids() == ["e108", "e109"] and "group g27" in shown(pilot, "#title")

    browsed(runs / "many", drive)


def test_tui_shows_no_control_characters(runs: Path) -> None:
    async def drive(pilot: Pilot[None]) -> None:
        await press(pilot, "f", *"nothing", "enter")
        assert "0 of 1 episode" in shown(pilot, "#note")
        await press(pilot, "f", *["backspace"] * 7, "enter", "enter", "down", "down")
        text = shown(pilot, "#text")
        assert "[bold]x[/bold]" in text and "␛[2J" in text and not {"\x1b", "\u202e"} & {*text}

    browsed(runs / "one", drive, (60, 15))


def test_tui_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith(("textual", "agent_rl.view.tui"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    assert main(["view", "runs", "--tui"]) == 1
    assert capsys.readouterr().err == "agent-rl: --tui needs textual: pip install 'agent-rl[tui]'\n"


def test_tui_lists_groups_with_their_means(runs: Path) -> None:
    async def drive(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"id=e00*", "enter", "G")
        table = pilot.app.screen.query_one(DataTable)
        rows = [[str(cell) for cell in table.get_row_at(n)] for n in range(table.row_count)]
        assert [row[0] for row in rows] == ["g0", "g1", "g2"] and rows[0][3] == "0 of 4" and rows[2][3] == "0 of 2"
        assert "3 groups; where id=e00*" in shown(pilot, "#note")
        await press(pilot, "down", "down", "enter")
        assert "4 of 110 episodes" in shown(pilot, "#note")
        await press(pilot, "escape", "escape")
        assert "10 of 110 episodes" in shown(pilot, "#note")

    browsed(runs / "many", drive)
