"""MiniWoB's pages in a real Chromium: what is read, clicked and typed, and a browser that dies."""

from __future__ import annotations

import asyncio
import os

import pytest

import agent_rl as ar
from agent_rl.envs.adapters import chromium, miniwob
from agent_rl.envs.quiz import one_call
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import env_ids, spec
from agent_rl.policy import Scripted
from agent_rl.rollout import Job, run_episode
from tests.debian import has_program

NAMES = (os.environ.get("AGENT_RL_CHROMIUM", ""), *chromium.NAMES)
pytestmark = pytest.mark.skipif(
    not has_program(*filter(None, NAMES), package="chromium-headless-shell"),
    reason="NOT TESTED: MiniWoB, as there is no Chromium: apt-get install chromium-headless-shell",
)


def play(name: str, *script: str | ar.Message, seed: int = 7) -> ar.Episode:
    job = Job(spec(f"miniwob/{name}-v0"), {"seed": seed, "mode": "train"}, 0)
    return asyncio.run(run_episode(job, Scripted(lambda env, seed: (message for message in script))))


def said(episode: ar.Episode) -> list[str]:
    return [message.content for message in episode.messages if message.role != "assistant"]


def test_pages_open_and_giving_up_earns_nothing() -> None:
    """One page in four, as each takes half a second."""
    pages = [id for id in env_ids() if id.startswith("miniwob/")]
    names = {path.stem for path in miniwob.PAGES.glob("*.html")}
    assert len(pages) == len(names) - sum(map(len, miniwob.LEFT_OUT.values())) == len(names - miniwob._left_out)

    pages = pages[::4]

    async def give_up() -> list[ar.Episode]:
        turns = asyncio.Semaphore(8)

        async def one(id: str) -> ar.Episode:
            async with turns:
                policy = Scripted(lambda env, seed: (text for text in ["I am done."]))
                return await run_episode(Job(spec(id), miniwob.make_task("eval", 0), 0), policy)

        return await asyncio.gather(*(one(id) for id in pages))

    episodes = dict(zip(pages, asyncio.run(give_up()), strict=True))
    assert {id: str(e.error) for id, e in episodes.items() if e.error} == {}
    assert {id for id, e in episodes.items() if e.reward} == set()
    assert not [id for id, e in episodes.items() if "[" not in e.messages[0].content]


@pytest.mark.parametrize("name", ["click-test", "enter-password", "click-checkboxes", "choose-list", "click-tab"])
def test_oracle_solves_and_chance_does_not(name: str) -> None:
    assert ar.evaluate(f"miniwob/{name}-v0", "oracle", n=4).success.value == 1.0
    assert ar.evaluate(f"miniwob/{name}-v0", "nothing", n=2).success.value == 0.0


def test_text_is_typed_and_page_is_the_seeds() -> None:
    first = play("enter-text", one_call("type", element=5, text="a"), one_call("type", element=5, text='"é☃'))
    assert [said(first)[0]] == [said(play("enter-text", "no"))[0]] != [said(play("enter-text", "no", seed=8))[0]]
    assert 'Enter "' in said(first)[0] and "[5] input_text id=tt" in said(first)[0]
    assert 'value="a" focused=yes' in said(first)[1] and 'value="\\"é☃"' in said(first)[2]


def test_calls_that_make_no_sense_are_answered() -> None:
    calls = (one_call("click", element=99), one_call("type", element=4, text="x" * 501), one_call("press", key="F1"))
    episode = play(
        "choose-list", *calls, one_call("type", element=4, text="none of these"), one_call("press", key="Tab")
    )
    answers = said(episode)[1:]
    assert "no element 99; the page has 4" in answers[0] and "500 is the most" in answers[1]
    assert "error" in answers[2] and "no option 'none of these'" in answers[3] and "[4] select" in answers[4]


def test_browser_that_dies_fails_its_episodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kill() -> None:
        browser = await chromium._shared.get()
        browser.kill()
        await browser.reading

    class Killing(spec("miniwob/click-test-v0").cls):
        async def step(self, action):
            await chromium._loop().run(kill())
            return await super().step(action)

    ar.register("miniwob-test/killing-v0", tasks=miniwob.make_task)(Killing)
    (episode,) = ar.run("miniwob-test/killing-v0", "oracle", n=1)
    assert episode.reward is None and episode.ending.value == "tool_infra" and "Chromium has" in str(episode.error)
    assert ar.run("miniwob/click-test-v0", "oracle", n=1)[0].success
    monkeypatch.setenv("AGENT_RL_CHROMIUM", "/no/such")
    with pytest.raises(ConfigError, match=r"AGENT_RL_CHROMIUM='/no/such' is no program: apt-get install chromium"):
        chromium.executable()
