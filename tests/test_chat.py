"""`agent-rl chat`: replies, tools that run, streaming, and what ends a reply or a conversation."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.cli.chat import _Screen
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import FinishReason, Trajectory
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import Reply
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering import load_renderer, train_tokenizer
from agent_rl.runs.chat import StreamingEngine
from agent_rl.store.episodes import read_episodes
from tests import fake_openai
from tests.engines import tiny
from tests.templates import THOUGHTS

Types = Callable[..., None]
OF_THE_README = "agent-rl chat runs/latest env=calculator-v0"


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> Types:
    """Let a person type lines; an exception among them is raised, and the end is Ctrl-D."""

    def script(*lines: object) -> None:
        left = list(lines)

        def read(prompt: str) -> str:
            line = left.pop(0) if left else EOFError()
            if isinstance(line, BaseException):
                raise line
            return str(line)

        monkeypatch.setattr("builtins.input", read)

    return script


class Caller:
    """Calls the calculator, then says what it returned; implements `Policy` and `Conversation`."""

    context_limit: int | None = None
    trajectories: tuple[Trajectory, ...] = ()

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def start(self, tools: Sequence[ToolSpec], seed: int) -> "Caller":
        self.tool = tools[0].name if tools else ""
        return self

    def observe(self, messages: Sequence[Message]) -> int:
        self.heard += messages
        return 0

    async def reply(self, max_tokens: int | None = None) -> Reply:
        last = self.heard[-1]
        left, operator, right = (last.content.split() * 3)[:3]
        call = ToolCall("call_0", self.tool, {"operator": operator, "left": left, "right": right})
        said = Message("assistant", f"it is {last.content}")
        return Reply(Message("assistant", tool_calls=(call,)) if last.role == "user" else said, FinishReason.STOP)

    def close(self) -> None: ...


def test_tools_of_the_environment_run(types: Types, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caller = Caller()
    ar.register_policy("chat-caller")(lambda: caller)  # type: ignore[arg-type,return-value]
    out = tmp_path / "talks.jsonl"
    types("2 * 21", "/help", KeyboardInterrupt(), "//", "/quit")
    words = OF_THE_README.replace("runs/latest", "chat-caller").split()[1:]
    assert main([*words, f"out={out}"]) == 0
    shown = capsys.readouterr().out
    assert "it is 42" in shown and "/quit ends" in shown and "stored in" in shown
    (episode,) = read_episodes(out)
    said = [(m.role, m.content) for m in episode.messages if m.role != "system"]
    assert said[:4] == [("user", "2 * 21"), ("assistant", ""), ("tool", "42"), ("assistant", "it is 42")]
    assert episode.env == "calculator-v0" and episode.reward is None and episode.error is None
    assert len(episode.messages) == 1 + episode.turns + sum(step.messages for step in episode.steps) + (
        episode.messages[0].role == "system"
    )


@ar.register("chat-popping-v0", tasks=[{}])
class TakesArguments(ar.ToolEnv):
    @ar.tool
    def compute(self, operator: str, left: str, right: str) -> str:
        """Compute."""
        return f"{left} {operator} {right}"

    def reset(self, task, rng):
        return "hello"

    async def step(self, action):
        taken = action.tool_calls[0].arguments.pop("left")
        return ar.Step((ar.Message("tool", taken, tool_call_id="call_0"),))


def test_step_that_changes_arguments_leaves_the_call(types: Types, tmp_path: Path) -> None:
    ar.register_policy("chat-to-popping")(lambda: Caller())  # type: ignore[arg-type,return-value]
    types("2 * 21")
    assert main(["chat", "chat-to-popping", "env=chat-popping-v0", f"out={tmp_path / 'out'}"]) == 0
    (episode,) = read_episodes(tmp_path / "out")
    assert [(m.role, m.content) for m in episode.messages[1:3]] == [("assistant", ""), ("tool", "2")]
    assert episode.messages[1].tool_calls[0].arguments == {"operator": "*", "left": "2", "right": "21"}


def test_calls_that_do_not_run_are_answered(
    types: Types, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = fake_openai.called(("add", '{"n": 1}', "a"), ("add", "{", "b")).body
    called["choices"][0]["finish_reason"] = "length"

    def answer(body: fake_openai.Body) -> fake_openai.Answer:
        made = {call["id"] for m in body["messages"] for call in m.get("tool_calls", ())}
        if made - {m.get("tool_call_id") for m in body["messages"]}:
            return fake_openai.failed(400, "tool_calls must be followed by tool messages")
        return fake_openai.said("well") if made else fake_openai.Answer(called)

    monkeypatch.setenv("OPENAI_API_KEY", "k")
    types("hello", "and?")
    with fake_openai.FakeOpenAI(answer, key="k") as server:
        asked = [f"policy.base_url={server.url}", "policy.model=m", "env=calculator-v0", f"out={tmp_path / 'out'}"]
        assert main(["chat", "openai", *asked]) == 0
    assert "well" in capsys.readouterr().out
    (episode,) = read_episodes(tmp_path / "out")
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "tool", "user", "assistant"]
    assert [step.messages for step in episode.steps] == [3, 0]


def test_chat_streams_a_checkpoint(
    types: Types, talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "talks.jsonl"
    types("what is 3 + 4", "/reset", "hello")
    assert main(["chat", str(talker), "max_tokens=12", f"out={out}", "--tokens"]) == 0
    first, second = read_episodes(out)
    assert [m.content for m in first.messages if m.role == "user"] == ["what is 3 + 4"]
    assert [m.content for m in second.messages if m.role == "user"] == ["hello"]
    shown = capsys.readouterr().out
    reply = next(m for m in first.messages if m.role == "assistant")
    assert reply.content.split("\n")[0] in shown and shown.count("id:log-probability") == 2
    assert 0 < first.trajectories[0].sampled <= 12


def test_streaming_samples_the_same_tokens(talker: Path) -> None:
    policy, seen = ar.load(talker, context=128), list[int]()
    engine, params, stop = policy.engine, SamplingParams(max_tokens=11), frozenset[int]()
    ids = policy.renderer.prompt([Message("user", "what is 3 + 4")], ())
    whole = asyncio.run(engine.open(5).sample(ids, params, stop))
    streamed = asyncio.run(
        StreamingEngine(engine, lambda _, got: seen.append(len(got))).open(5).sample(ids, params, stop)
    )
    assert (streamed.token_ids, streamed.finish_reason) == (whole.token_ids, FinishReason.LENGTH)
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-5) and seen == [4, 8, 11]


def test_thought_that_the_prompt_opens_is_not_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer([])
    tokenizer.chat_template = THOUGHTS
    renderer = load_renderer(tokenizer, "template")
    screen = _Screen(TokenPolicy(Engine(tiny(), slots=1, max_len=64), renderer), tokens=False)
    before = renderer.prompt([Message("user", "3 + 4")], ())
    reply = tokenizer.encode("Let me add.\n</think>\n\nIt is 7.", add_special_tokens=False)
    for end in range(1, len(reply) + 1):
        screen.stream_tokens(before, reply[:end])
    screen.show(renderer.parse(reply, before))
    assert capsys.readouterr().out == "It is 7.\n"


def test_interrupt_ends_a_reply_only(types: Types, talker: Path, tmp_path: Path) -> None:
    out, real = tmp_path / "talks.jsonl", StreamingEngine.__dict__["open"]

    def interrupted(self: StreamingEngine, seed: int) -> object:
        shown = self.on_tokens

        def interrupt(before: Sequence[int], ids: Sequence[int]) -> None:
            shown(before, ids)
            if len(ids) == 4:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)

        self.on_tokens = interrupt
        session = real(self, seed)
        endless = session.sample
        session.sample = lambda ids, params, stop_ids: endless(ids, params, frozenset())  # none ends by itself before
        return session

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StreamingEngine, "open", interrupted)
        types("what is 3 + 4", "and 5 + 6")
        assert main(["chat", str(talker), "max_tokens=30", f"out={out}"]) == 0
    (episode,) = read_episodes(out)
    assert episode.turns == 2 and episode.trajectories[0].sampled == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["oracle", "env=calculator-v0"], "is a script of environments: give a model"),
        (["oracle"], "oracle is a script of environments: give a model"),
        (["demonstrator"], "demonstrator is a script of environments: give a model"),
        (["/no/such/model"], "/no/such/model"),
        (["oracle", "env=calculater-v0"], "Did you mean 'calculator-v0'?"),
        (["oracle", "temperatur=1"], "Did you mean 'temperature'?"),
    ],
)
def test_chat_refuses_what_is_no_model(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *words]) == 1
    assert said in capsys.readouterr().err


def test_full_context_begins_new_conversation(
    types: Types, talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "talks.jsonl"
    types("what is 3 + 4", "and " * 80, "hello")
    assert main(["chat", str(talker), "policy.context=64", "max_tokens=4", f"out={out}"]) == 0
    assert "the context is full, so a new conversation begins" in capsys.readouterr().out
    said = [[m.content for m in e.messages if m.role == "user"] for e in read_episodes(out)]
    assert said == [["what is 3 + 4", "and " * 80], ["hello"]]


def test_full_served_context_begins_new_conversation(
    types: Types, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: fake_openai.Body) -> fake_openai.Answer:
        if sum(len(m["content"]) for m in body["messages"]) > 64:
            return fake_openai.failed(400, "maximum context length is 16", code="context_length_exceeded")
        return fake_openai.said("well")

    monkeypatch.setenv("OPENAI_API_KEY", "k")
    types("how are you?", "and " * 80, "too " * 80, "hello")
    with fake_openai.FakeOpenAI(answer, key="k") as server:
        asked = [f"policy.base_url={server.url}", "policy.model=m", f"out={tmp_path / 'out'}"]
        assert main(["chat", "openai", *asked]) == 0
    assert capsys.readouterr().out.count("the context is full, so a new conversation begins") == 2
    said = [[m.content for m in e.messages if m.role != "system"] for e in read_episodes(tmp_path / "out")]
    assert said == [["how are you?", "well", "and " * 80], ["hello", "well"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_while_a_reply_is_shown_keeps_conversation(
    number: signal.Signals, types: Types, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ar.register_policy(f"chat-until-{number.name}")(lambda: Caller())  # type: ignore[arg-type,return-value]
    monkeypatch.setattr("agent_rl.cli.chat.print_message", lambda *_: signal.raise_signal(number))
    types("2 * 21")
    assert main(["chat", f"chat-until-{number.name}", "env=calculator-v0", f"out={tmp_path / 'out'}"]) == 0
    (episode,) = read_episodes(tmp_path / "out")
    assert episode.error is None and [m.role for m in episode.messages[-2:]] == ["user", "assistant"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_served_reply_keeps_conversation(
    number: signal.Signals, types: Types, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(body: fake_openai.Body) -> fake_openai.Answer:
        if body["messages"][-1]["content"] == "and you?":
            signal.pthread_kill(threading.main_thread().ident or 0, number)  # another thread's would not wake it
            time.sleep(0.5)
        return fake_openai.said("well")

    monkeypatch.setenv("OPENAI_API_KEY", "k")
    types("how are you?", "and you?", "never said")
    with fake_openai.FakeOpenAI(answer, key="k") as server:
        main(["chat", "openai", f"policy.base_url={server.url}", "policy.model=m", f"out={tmp_path / 'out'}"])
    (episode,) = read_episodes(tmp_path / "out")
    assert [m.content for m in episode.messages] == ["how are you?", "well", "and you?"]
