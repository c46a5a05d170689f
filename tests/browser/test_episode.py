"""One episode in the page: its conversation, its tokens, its group; nothing that was written in it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from agent_rl.core.episode import Episode, Failure, Origin
from agent_rl.core.images import Image
from agent_rl.core.judgement import Judgement, Verdict
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.token_records import TokenRecord, TokenRecordWriter
from agent_rl.view.page.build import save_page
from tests.browser.conftest import PHONE
from tests.browser.runs import HOSTILE
from tests.episodes import example_episode

if TYPE_CHECKING:
    from playwright.sync_api import Page

LONG = 40_000
"""Tokens of the long episode, of which a tenth are sampled."""
VERDICTS = (Verdict("right", "yes", 1.0, "It says so.", "the chair  is 49"), Verdict("short", "no", 0.0))


def samples() -> list[Episode]:
    """Two samples of a task, the second of which departs in its answer; the first is judged and was continued."""
    first = example_episode("a/1", judgements=(Judgement("r@1", "m", VERDICTS, 0.5),))
    said = (*first.messages[:-1], Message("assistant", "Well, the chair is 49."))
    other = replace(example_episode("b"), messages=(*first.messages[:-1], Message("assistant", "Well, it is 50.")))
    other = replace(other, origin=Origin("train", "train", 5, 2), trajectories=(differing(), forked()))
    return [replace(first, messages=said), other, example_episode("c", parent=("a/1", 1), group_id="g1")]


def differing() -> Trajectory:
    made = Trajectory()
    made.append([1, 2, 3], Source.PROMPT, 0)
    made.append_completion(Completion((10, 99), (-0.5, -3.0), FinishReason.STOP, (7, 7)), 0)
    return made


def forked() -> Trajectory:
    made = Trajectory(Fork(0, 3))
    made.append([1, 2, 3], Source.PROMPT, 0)
    made.append_completion(Completion((11,), (-0.25,), FinishReason.STOP, (8,)), 1)
    return made


def hostile() -> Episode:
    """Every text that a page shows, hostile."""
    evil = f"{HOSTILE} </script> javascript:alert(1) \u2028"
    call = ToolCall("c", evil, {evil: evil, "url": "javascript:document.title='run'"}, error=evil)
    messages = (
        Message("user", evil),
        Message("assistant", evil, reasoning=evil, tool_calls=(call,)),
        Message("tool", evil),
    )
    judged = Judgement(evil, evil, (Verdict(evil, evil, 1.0, evil, evil),), 1.0, suspect=(evil,))
    failed = Failure("step", evil, evil, evil)
    return example_episode("evil", messages=messages, steps=(), task={evil: evil}, error=failed, judgements=(judged,))


def long_episode() -> Episode:
    trajectory = Trajectory()
    for turn in range(LONG // 2000):
        trajectory.append([*range(1800)], Source.ENV, turn)
        trajectory.append_completion(Completion((5,) * 200, (-0.1,) * 200, FinishReason.STOP, (turn,) * 200), turn)
    return example_episode("long", trajectories=(trajectory,), group_id="g2")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("run")
    with EpisodeWriter(folder) as writer:
        for episode in (*samples(), hostile(), long_episode()):
            writer.write(episode)
    advantages, logprobs = np.float32([1, np.nan, -1, 0]), np.float32([-0.5, -0.0625, -0.1, -2.0])
    with TokenRecordWriter(folder) as records:
        records.write([TokenRecord("a/1", 0, 5, advantages, logprobs)])
    save_page(folder, folder / "run.html")
    return (folder / "run.html").as_uri()


def tip(page: Page) -> dict[str, str]:
    page.locator(".tip:visible").wait_for()
    return dict(zip(page.locator(".tip dt").all_inner_texts(), page.locator(".tip dd").all_inner_texts(), strict=True))


def test_episode_shows_conversation_and_verdicts(page: Page, url: str) -> None:
    page.goto(f"{url}#/episode/a%2F1")
    page.locator("h1", has_text="red chair").wait_for()
    assert "0.458" in page.locator(".tiles").inner_text() and "1 error" in page.locator(".tiles").inner_text()
    assert page.locator(".turn").count() == 3 and page.locator(".bubble.failed", has_text="exception").count() == 1
    assert "not scored" in page.locator(".rewards").inner_text()
    page.locator(".evidence").click()
    assert page.locator("mark.found").inner_text() == "the chair is 49"
    fold = page.locator("details.reasoning")
    assert fold.get_attribute("open") is None
    page.keyboard.press("e")
    assert page.locator(".reasoning .said").inner_text() == "Look it up."
    page.keyboard.press("f")
    assert page.locator("details.fold[open]").count() == 0


def test_images_of_messages_are_pictures(page: Page, tmp_path: Path) -> None:
    shown, given = Image.of(np.zeros((2, 3), np.uint8)), example_episode("p")
    messages = (given.messages[0], Message("user", parts=["what?", shown]), *given.messages[2:])
    with EpisodeWriter(tmp_path) as writer:
        writer.write(replace(given, messages=messages))
    save_page(tmp_path, tmp_path / "run.html")
    page.goto(f"{(tmp_path / 'run.html').as_uri()}#/episode/p")
    picture = page.locator("img.picture")
    picture.wait_for()
    assert picture.get_attribute("alt") == str(shown)
    assert picture.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [3, 2]


def test_links_lead_to_turns_parents_and_neighbours(page: Page, url: str) -> None:
    page.goto(f"{url}#/episode/a%2F1/turn/1")
    page.locator("#turn-1.hit").wait_for()
    assert page.evaluate("document.activeElement.id") == "turn-1"
    page.locator("dd a", has_text="c").click()
    page.locator("#turn-1.hit").wait_for()
    assert page.locator(".turn.inherited").count() == 1 and "#/episode/c/turn/1" in page.url
    page.locator("dd a", has_text="a/1").click()
    page.locator(".path", has_text="1 of 5").wait_for()
    page.keyboard.press("]")
    page.locator(".path", has_text="2 of 5").wait_for()
    assert page.url.endswith("#/episode/b")


def test_tokens_are_coloured_by_mode(page: Page, url: str) -> None:
    page.goto(f"{url}#/episode/a%2F1/tokens")
    page.locator(".token-text i").first.wait_for()
    shades = "[...document.querySelectorAll('.chunk i')].map((token) => token.className)"
    assert page.evaluate(shades) == ["heat3", "heat1", "heat1", "heat5"]
    expected = {
        "advantage": ["above4", "left-out", "below4", "even"],
        "ratio": ["even", "even", "even", "above4"],
        "version": ["age1", "age1", "age1", "age6"],
        "source": ["own"] * 4,
    }
    for mode, classes in expected.items():
        page.locator(".segmented button", has_text=mode).click()
        assert page.evaluate(shades) == classes, mode
        assert page.locator(".legend > span").count() >= 2 and f"mode={mode}" in page.url


def test_token_tells_what_is_stored(page: Page, url: str) -> None:
    page.goto(f"{url}#/episode/a%2F1/token/8?mode=ratio")
    page.locator(".token-text i.pinned").wait_for()
    expected = {"token": "8, id 13", "log-probability": "\u22122.5", "probability": "0.0821", "ratio": "1.65"}
    assert tip(page) == expected | {"advantage": "0", "turn": "1", "version": "8"}
    page.keyboard.press("ArrowLeft")
    assert tip(page)["token"] == "7, id 12"
    page.keyboard.press("ArrowLeft")
    assert tip(page)["token"] == "4, id 11"  # over what the environment said
    page.keyboard.press("Enter")
    assert "/token/4?" in page.url
    page.goto(f"{url}#/episode/a%2F1/token/1")
    assert tip(page) == {"token": "1, id 2", "source": "prompt", "turn": "0"}


def test_links_to_tokens_open_their_trajectory(page: Page, url: str) -> None:
    page.goto(f"{url}#/episode/b")
    page.locator("#turn-0 .to-tokens").click()
    page.locator('.pinned[data-n="3"]').wait_for()
    assert page.locator("select[aria-label=trajectory]").input_value() == "0"
    page.go_back()
    page.locator("#turn-1 .to-tokens").click()
    page.locator('.pinned[data-n="3"]').wait_for()
    assert page.locator("select[aria-label=trajectory]").input_value() == "1"


def test_modes_without_data_say_why(page: Page, url: str) -> None:
    page.goto(f"{url}#/episode/b/tokens")
    page.locator(".segmented [aria-disabled]", has_text="ratio").click(force=True)
    assert "no update's records" in page.locator(".note").inner_text()
    choice = page.get_by_label("trajectory")
    assert "forked from 0 at 3" in choice.inner_text()
    choice.select_option("0")
    page.locator(".chunk i").first.wait_for()
    assert page.locator(".chunk i").count() == 2


def test_long_episode_has_few_nodes(page: Page, url: str) -> None:
    page.goto(f"{url}#/episode/long/tokens")
    page.locator(".token-text i").first.wait_for()
    assert page.locator(".token-text i").count() < LONG / 20 and page.locator(".span").count() == LONG // 1000
    page.evaluate(f"go(link('episode', 'long', 'token', {LONG - 1}))")
    page.locator(f'i.pinned[data-n="{LONG - 1}"]').wait_for()
    assert tip(page)["token"].startswith(f"{LONG - 1},")


def test_group_marks_first_differences(page: Page, url: str) -> None:
    page.goto(f"{url}#/group/g0")
    page.locator(".side-by-side").wait_for()
    heads = page.locator(".side-by-side thead tr").first.locator("td").all_inner_texts()
    assert [head.split("\n")[-1] for head in heads] == ["a/1", "evil", "b"]
    assert page.locator(".departs mark.differs").all_inner_texts()[-1] == "it is 50."
    page.locator(".side-by-side thead a", has_text="token 4").click()
    page.locator(".token-text i.pinned").wait_for()
    page.go_back()
    page.locator(".sort", has_text="reward").click()
    assert page.locator("[aria-sort=descending]").inner_text().startswith("reward")


@pytest.mark.parametrize("place", ["episode/evil", "group/g0", "list"])
def test_hostile_text_stays_text(page: Page, url: str, place: str) -> None:
    page.goto(f"{url}#/{place}")
    page.locator("#view .view").wait_for()
    page.evaluate("foldAll(document, true)")
    shown = page.locator("body").inner_text()
    assert "<script>document.title" in shown and "\\u202eevil␛[31m" in shown
    assert not {"\u202e", "\x1b"} & set(shown) and page.title() != "run"
    assert page.locator("#view script, #view img, #view a:not([href^='#/'])").count() == 0


def test_phone_has_no_sideways_scroll(page: Page, url: str) -> None:
    page.set_viewport_size(PHONE)
    for place in ("episode/a%2F1", "episode/a%2F1/tokens", "episode/evil", "group/g0"):
        page.goto(f"{url}#/{place}")
        page.locator("h1").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], place
