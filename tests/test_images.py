"""Images in messages: of tools and observations, in requests, stores, views; refused where policies read tokens."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.core.ending import Ending
from agent_rl.core.messages import ToolCall, ToolErrorKind
from agent_rl.errors import DamagedEpisodeError, RenderError
from agent_rl.formats.chat import read_chat
from agent_rl.formats.reading import import_episodes
from agent_rl.formats.writing import export_episodes
from agent_rl.gym.env import messages_of
from agent_rl.gym.tool_calls import call_tools
from agent_rl.judge.prompt import exhibit
from agent_rl.policy import oracle
from agent_rl.rollout import Job, run_episode
from agent_rl.rollout.as_gymnasium import TextEnv
from agent_rl.store.codec import dump_line, load_line
from agent_rl.view.html import write_report
from agent_rl.view.page.data import dump, episode_json
from tests.doubles import small_renderer, token_policy
from tests.fake_openai import FakeOpenAI, called, said

RED = ar.Image.of(np.full((3, 5, 3), (200, 30, 10), np.uint8))
GREY = ar.Image.of(np.arange(24, dtype=np.uint8).reshape(4, 6))
JPEG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffc0000b080011001f01011100ffd9")
"""The segments of a JPEG file of 31x17 pixels, without its pixels."""
LOOK = ToolCall("c1", "look", {})


@ar.register("images-test-v0", tasks=[{"late": late} for late in (False, True)])
class Gallery(ar.ToolEnv):
    """Shows a picture at once, or only when a tool is called; the answer is its colour."""

    def reset(self, task: ar.Task, rng: np.random.Generator) -> Any:
        return "which colour?" if task["late"] else ["which colour?", RED]

    @ar.tool(inline=True)
    def look(self) -> list[str | ar.Image]:
        """Look at the pictures."""
        return ["before", RED, GREY]

    @ar.tool(inline=True)
    def plot(self) -> ar.Image:
        """Plot."""
        return GREY

    def oracle(self) -> Any:
        yield ar.Message("assistant", tool_calls=(LOOK, ToolCall("c2", "plot", {})))
        yield "red"

    @ar.reward
    def is_red(self, episode: ar.Episode) -> bool:
        return episode.final_text == "red"


class Blinking(gymnasium.Env[Any, Any]):
    """Renders a brighter frame at each step, of which there are two."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's own declaration
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self.steps = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return 0, 0.0, self.steps == 2, False, {}

    def render(self) -> Any:
        return np.full((2, 4, 3), self.steps, np.uint8)


def played(policy: Any = None, *, late: bool = True) -> ar.Episode:
    """Play an episode of the gallery."""
    return asyncio.run(run_episode(Job(ar.spec("images-test-v0"), {"late": late}, 0), policy or oracle()))


# the image and the message


def test_image_of_takes_files_urls_and_pixels(tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(RED.data)
    assert ar.Image.of(file) == ar.Image.of(str(file)) == ar.Image.of(RED.url) == ar.Image.of(RED.data) == RED
    assert (RED.size, RED.media_type, str(RED)) == ((5, 3), "image/png", f"[image: png 5x3, sha256 {RED.sha256[:12]}]")
    assert (ar.Image(JPEG).size, ar.Image(JPEG).media_type) == ((31, 17), "image/jpeg")
    assert RED != GREY and "xIDAT" not in repr(RED) and len(repr(RED)) < 60


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_image_of_pixels_is_what_pil_reads(mode: str) -> None:
    pil = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (9, 7, len(mode))[: 2 + (mode != "L")], dtype=np.uint8)
    read = pil.open(io.BytesIO(ar.Image.of(pixels).data))
    assert read.mode == mode and (np.asarray(read) == pixels).all()
    assert ar.Image.of(read).size == (7, 9)


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        (b"GIF89a", ValueError, "no whole PNG or JPEG"),
        (RED.data[:18], ValueError, "no whole PNG or JPEG"),
        (JPEG[:24], ValueError, "no whole PNG or JPEG"),
        ("data:image/png;base64,@@", ValueError, "holds no base64"),
        ("data:text/plain,red", ValueError, "has to begin with data:image/"),
        (RED.url.partition(",")[2] * 99, ValueError, r"^Image.of\('iVBOR.{15}'\.\.\.\): \d+ characters are no path"),
        (np.zeros((2, 2)), ValueError, r"array of float64 \(2, 2\) is no image"),
        (3, TypeError, "give bytes, a path"),
    ],
)
def test_image_of_refuses_what_is_none(source: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ar.Image.of(source)


def test_message_text_is_made_of_its_parts() -> None:
    message = ar.Message("user", parts=["look:", RED, "and?"])
    assert (
        message.content == f"look:\n{RED}\nand?" and message.images == (RED,) and ar.Message("user", "x").images == ()
    )
    assert replace(message, name="cam") == ar.Message("user", name="cam", parts=("look:", RED, "and?"))
    with pytest.raises(ValueError, match="give one of them"):
        replace(message, content="other")
    with pytest.raises(ValueError, match="only user and tool messages hold images"):
        ar.Message("assistant", parts=[RED])
    with pytest.raises(TypeError, match="list of texts and images"):
        ar.Message("user", parts=[RED.data])  # type: ignore[list-item]


def test_observations_may_be_images() -> None:
    assert messages_of(RED) == (ar.Message("user", parts=[RED]),)
    assert messages_of(["look", RED]) == messages_of(("look", RED)) == (ar.Message("user", parts=["look", RED]),)
    with pytest.raises(TypeError, match="an observation is"):
        messages_of([ar.Message("user", "look"), RED])  # type: ignore[list-item]


def test_tools_return_images_alone_or_in_lists() -> None:
    episode = played()
    assert [m.images for m in episode.messages] == [(), (), (RED, GREY), (GREY,), ()]
    assert episode.messages[2].content == f"before\n{RED}\n{GREY}" and episode.reward == 1.0

    @ar.tool(inline=True, max_output=20)
    def talk() -> object:
        """Talk."""
        return ["x" * 99, RED]

    (result,) = asyncio.run(call_tools({"talk": talk}, [ToolCall("c", "talk", {})], None))
    assert result.images == (RED,) and "79 characters left out" in result.content and result.tool_error is None

    @ar.tool(inline=True)
    def nested() -> object:
        """Nest."""
        return {"picture": RED}

    (result,) = asyncio.run(call_tools({"nested": nested}, [ToolCall("c", "nested", {})], None))
    assert result.tool_error is ToolErrorKind.EXCEPTION and "no JSON form" in result.content


# policies


def test_openai_requests_hold_images_of_tools_behind_all_results() -> None:
    with (
        FakeOpenAI([called(("look", "{}", "c1"), ("plot", "{}", "c2")), said("red")]) as server,
        ar.OpenAIPolicy("m", base_url=server.url) as policy,
    ):
        episode = played(policy, late=False)
    assert episode.reward == 1.0
    text = lambda words: {"type": "text", "text": words}  # noqa: E731
    image = lambda shown: {"type": "image_url", "image_url": {"url": shown.url}}  # noqa: E731
    opening, reply, *rest = server.asked[-1]["messages"]
    assert opening == {"role": "user", "content": [text("which colour?"), image(RED)]} and reply["role"] == "assistant"
    assert [(m["role"], m.get("tool_call_id")) for m in rest] == [("tool", "c1"), ("tool", "c2"), ("user", None)]
    assert [m["content"] for m in rest[:2]] == [f"before\n{RED}\n{GREY}", str(GREY)]
    pairs = [(text(str(shown)), image(shown)) for shown in (RED, GREY, GREY)]
    assert rest[2]["content"] == [part for pair in pairs for part in pair]


@pytest.mark.parametrize("late", [False, True])
def test_token_policies_refuse_images_and_name_the_environment(late: bool) -> None:
    policy = token_policy(ar.Message("assistant", tool_calls=(LOOK,)), "red")
    episode = played(policy, late=late)
    assert (episode.ending, episode.reward, episode.turns) == (Ending.POLICY_ERROR, None, int(late))
    assert episode.error is not None and episode.error.type == "ConfigError" and episode.error.where == "policy"
    assert (
        episode.error.message.startswith(f"images-test-v0: {RED} in a message")
        and "policy=openai" in episode.error.message
    )
    assert bool(sum(t.sampled for t in episode.trajectories)) == late, "what was sampled before is kept"


def test_renderers_refuse_images() -> None:
    shown = (ar.Message("user", parts=[RED]),)
    with pytest.raises(RenderError, match=re.escape(str(RED))):
        small_renderer().prompt(shown, ())
    with pytest.raises(RenderError, match=re.escape(str(RED))):
        small_renderer().bridge([1], [2], shown)


# Gymnasium


def test_gymnasium_view_shows_a_line_for_each_image() -> None:
    env = TextEnv(env="images-test-v0")
    opening, _ = env.reset(options={"task": {"late": False}})
    assert opening.endswith(f"which colour?\n{RED}")
    check_env(env, skip_render_check=True)
    env.close()


def test_from_gym_shows_rendered_frames() -> None:
    ar.register("images-test/blinking-v0", tasks=[{}])(ar.from_gym(Blinking, images=True))
    (episode,) = ar.run("images-test/blinking-v0", "demonstrator")
    frames = [image for message in episode.messages for image in message.images]
    assert [frame.size for frame in frames] == [(4, 2)] * 3 and len({frame.sha256 for frame in frames}) == 3


def test_trl_refuses_images_and_names_the_environment() -> None:
    env = ar.as_trl("images-test-v0")()
    with pytest.raises(RenderError, match=re.escape(f"images-test-v0: {RED} in a message")):
        env.reset(task='{"late": false}')
    assert env.reset(task='{"late": true}') == "which colour?"
    with pytest.raises(RenderError, match=re.escape(f"images-test-v0: {RED} in a message")):
        env.look()  # type: ignore[attr-defined]
    assert env.get_reward() is not None, "which ends it"


# the store


def test_store_holds_each_image_once_and_reads_it_back(tmp_path: Path) -> None:
    episodes = [played(late=late) for late in (False, True)]
    with ar.EpisodeWriter(tmp_path) as writer:
        for episode in episodes:
            writer.write(episode)
        writer.flush()
    assert {f.name for f in (tmp_path / "images").iterdir()} == {f"{image.sha256}.png" for image in (RED, GREY)}
    lines = (tmp_path / "episodes.jsonl").read_bytes()
    assert b"iVBOR" not in lines and str(RED).encode() in lines
    assert [e.messages for e in ar.read_episodes(tmp_path)] == [e.messages for e in episodes]


def test_verify_leaves_out_messages_whose_images_are_gone(tmp_path: Path) -> None:
    with ar.EpisodeWriter(tmp_path) as writer:
        for episode in ar.run("images-test-v0", "oracle", n=1):
            writer.write(episode)
    assert ar.verify(tmp_path).counts == {"same": 1}
    shutil.rmtree(tmp_path / "images")
    with pytest.warns(UserWarning, match="is missing"):
        found = ar.verify(tmp_path)
    assert found.counts == {"unverified": 1}
    assert found.reasons == {"images of its messages are not beside the episodes": 1}


def test_line_sent_elsewhere_holds_its_images() -> None:
    episode = played()
    odd = replace(episode, messages=(ar.Message("user", parts=["half \ud800", RED]), *episode.messages))
    for sent in (episode, odd):
        assert load_line(dump_line(sent)).messages == sent.messages
    plain = replace(episode, messages=(ar.Message("user", "x"),))
    assert b"parts" not in dump_line(plain)


def test_store_says_which_image_is_missing_or_another(tmp_path: Path) -> None:
    with ar.EpisodeWriter(tmp_path) as writer:
        writer.write(played(late=False))
    file = tmp_path / "images" / f"{RED.sha256}.png"
    file.write_bytes(GREY.data)
    with pytest.raises(DamagedEpisodeError, match=f"episodes.jsonl:1: the image {RED.sha256} has the hash"):
        list(ar.read_episodes(tmp_path))
    file.unlink()
    with pytest.warns(UserWarning, match=f"{RED.sha256}.png is missing, so the message keeps only its text"):
        (episode,) = ar.read_episodes(tmp_path)
    assert episode.messages[0] == ar.Message("user", f"which colour?\n{RED}") and episode.messages[3].images == (GREY,)


@pytest.mark.parametrize(
    ("at", "change", "says"),
    [
        (9, {}, "the parts of message 9 contradict the others"),
        (-1, {}, "greater than or equal to 0"),
        (0, {"sha256": "../" * 22}, "should match pattern"),
        (0, {"base64": "@@"}, "is no base64"),
        (0, {"base64": "R0lG", "sha256": hashlib.sha256(b"GIF").hexdigest()}, "is none: bytes that begin with b'GIF'"),
        (0, {"base64": None, "media_type": "image/tiff"}, "unknown type 'image/tiff'; known: image/png"),
    ],
)
def test_line_with_odd_parts_is_damaged(at: int, change: dict[str, Any], says: str, tmp_path: Path) -> None:
    row = json.loads(dump_line(replace(played(), messages=(ar.Message("user", parts=[RED]),))))
    ((_, (packed,)),) = row["parts"]
    row["parts"] = [[at, [packed | change]]]
    with pytest.raises(DamagedEpisodeError, match=re.escape(says)):
        load_line(json.dumps(row).encode(), tmp_path)


def test_line_of_an_older_version_ignores_parts() -> None:
    line = json.loads(dump_line(played()))
    del line["parts"]
    episode = load_line(json.dumps(line).encode())
    assert [m.content for m in episode.messages] == [m.content for m in played().messages]


# views and formats


def test_views_show_pictures_and_the_terminal_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episode = played(late=False)
    with ar.EpisodeWriter(tmp_path) as writer:
        writer.write(episode)
    assert main(["view", str(tmp_path), episode.id]) == 0
    out = capsys.readouterr().out
    assert str(RED) in out and "base64" not in out
    shown = [{"text": str(image), "url": image.url} for image in (RED, GREY)]
    (opening, (_, look, _), *_) = [turn["messages"] for turn in json.loads(dump(episode_json(episode)))["cut"]]
    assert opening[0]["images"] == shown[:1] and look["images"] == shown and "parts" not in look
    page = write_report(tmp_path / "r.html", title="t", summary={}, curve_svg="<svg/>", facts=(), comparisons=(),
                        after=[episode])  # fmt: skip
    assert page.read_text().count(f'<img alt="{RED}" src="{RED.url}">') == 2


def test_chat_format_holds_images_and_others_refuse_them(tmp_path: Path) -> None:
    episode = played(late=False)
    export_episodes([episode], tmp_path / "e.jsonl", "openai")
    (again,) = import_episodes(tmp_path / "e.jsonl")
    assert [m.parts for m in again.messages] == [m.parts for m in episode.messages]
    elsewhere = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}]
    (message,) = read_chat([{"role": "user", "content": elsewhere}])
    assert (message.content, message.parts) == ("see [image_url]", ())
    with pytest.raises(ar.ConfigError, match=r"images-test-v0 shows \[image: png.*--to atif has no place for images"):
        export_episodes([episode], tmp_path / "atif.jsonl", "atif")


def test_judges_read_a_line_for_each_image() -> None:
    shown = exhibit(played(), "transcript", b"secret")
    assert str(GREY) in shown.text and "base64" not in shown.text
