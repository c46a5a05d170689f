"""agent_rl.view.notebook: what a notebook shows is escaped, and bounded."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.rollout import summarise
from agent_rl.runs.metrics import Metrics
from agent_rl.view.notebook import CHARACTERS, LARGEST, MOST, TOKENS
from tests.doubles import example_episode

NASTY = "<script>alert('x')</script>\u202e&\x1b[31m"
GROUP = ar.EpisodeGroup("g0", (example_episode(), example_episode("e1")))


class Page(HTMLParser):
    """The tags and text of a page, which must be balanced."""

    def __init__(self, shown: object) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(shown._repr_html_())  # type: ignore[attr-defined]
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in ("br", "meta", "path", "use"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "use"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def test_episode_shows_turns_rewards_and_tokens() -> None:
    page = Page(example_episode())
    for text in ("What does the café's red chair cost?", "turn 1", "price", "✗ exception", "reward", "10 11"):
        assert text in page.text
    assert page.tags[:2] == ["div", "style"]


def test_episode_is_one_line_in_a_list() -> None:
    shown = "Episode('e0', shop-v0, reward 0.4583, 2 turns, done)"
    assert repr([example_episode()]) == f"[{shown}]" and repr(GROUP) == "EpisodeGroup('g0', 2 episodes)"


def test_trajectory_colours_tokens_by_source() -> None:
    html = example_episode().trajectories[0]._repr_html_()
    for source, ids in (("prompt", "1 2 3"), ("policy", "10 11"), ("env", "4 5"), ("template", "6")):
        assert f'<span class="{source}" title="turn ' in html and f">{ids}</span>" in html
        assert f".{source} {{" in html
    assert "version 8" in html


def test_group_shows_each_episode() -> None:
    assert "2 episodes of one task" in Page(GROUP).text and "e1 ·" in Page(GROUP).text


def test_evaluation_shows_its_interval() -> None:
    text = Page(summarise([*GROUP.episodes])).text
    assert "tool errors" in text and "of 2" in text


def test_metrics_are_tables_by_kind() -> None:
    rows = [{"kind": "train", "step": step, "rollout/success": step / 50} for step in range(50)]
    page = Page(Metrics([*rows, {"kind": "eval", "step": 0, "split": NASTY, "odd": None}]))
    assert page.tags.count("table") == 2 and "The last 20 of 50 rows." in page.text
    assert "script" not in page.tags and "0.98" in page.text and "None" not in page.text


def test_run_shows_rates_and_curve(folder: Path, tmp_path: Path) -> None:
    page = Page(ar.Run(folder))
    assert {"svg", "table"} <= set(page.tags) and "before greedy" in page.text
    assert "It did not end." in Page(ar.Run(tmp_path)).text


@pytest.mark.parametrize("field", ["env", "id", "messages", "error", "rewards"])
def test_display_escapes_what_models_write(field: str) -> None:
    changes = {
        "messages": (ar.Message("user", NASTY), ar.Message("assistant", NASTY, reasoning=NASTY)),
        "error": ar.Failure(NASTY, NASTY, NASTY, NASTY),
        "rewards": (ar.Reward(NASTY, 1.0),),
    }
    episode = example_episode(**{field: changes.get(field, NASTY)})
    assert "&lt;script" in episode._repr_html_()
    for shown in (episode, replace(GROUP, episodes=(episode,))):
        html = shown._repr_html_()
        assert "<script" not in html and "\u202e" not in html and "\x1b" not in html


def test_display_is_bounded() -> None:
    said = tuple(ar.Message("user", "<" * 10**6) for _ in range(100))
    steps = example_episode().steps[:1] * 49
    long = example_episode(messages=said, steps=steps)
    text = Page(long).text
    assert f"… and {10**6 - CHARACTERS} more characters" in text and f"The first {MOST} of 49 turns." in text
    many = replace(GROUP, episodes=(long,) * 1000)
    assert all(len(shown._repr_html_()) <= LARGEST for shown in (long, many))
    trajectory = ar.Trajectory()
    trajectory.append(range(10**5), ar.Source.PROMPT, 0)
    assert str(TOKENS - 1) in Page(trajectory).text and str(TOKENS + 1) not in Page(trajectory).text
