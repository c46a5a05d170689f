"""`agent-rl chat`: talk to a model in the terminal, with an environment's tools if one is given."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pydantic import Field, JsonValue
from rich.console import Console
from rich.text import Text

from agent_rl.cli.config_text import list_settings
from agent_rl.cli.settings import settings_of
from agent_rl.config import load_config
from agent_rl.core.episode import StopReason
from agent_rl.core.messages import Message
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import load_all_once, spec
from agent_rl.gym.tasks import TRAIN
from agent_rl.policy.base import AnyPolicy, Conversation, EnvPolicy
from agent_rl.policy.by_name import POLICIES, SCRIPTS, SamplingSettings, model_folder, open_policy, sampling_params
from agent_rl.policy.human import QuitError
from agent_rl.policy.token import TokenPolicy
from agent_rl.runs.chat import ALONE, ResetError, StreamingEngine, Terminal, chat, chat_job
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.shards import episode_file
from agent_rl.view.conversation import clean
from agent_rl.view.text import folded_clean, print_message

HELP = "/reset begins anew, /quit or Ctrl-D ends; Ctrl-C ends a reply. //text says a text that begins with /."
EXAMPLES = f"""
at the prompt:
  {HELP}

examples:
  agent-rl chat runs/latest
  agent-rl chat runs/latest env=calculator-v0 temperature=0.5      the model's tool calls really run
  agent-rl chat model.gguf out=talks.jsonl --tokens
  agent-rl chat openai policy.model=MODEL env=search-v0"""


class ChatSettings(SamplingSettings):
    """Whom to talk to, and where."""

    env: str | None = None
    """The id of a registered environment whose tools the model may call; null for none."""
    env_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    imports: list[str] = Field(default_factory=list)
    """Files that register environments and policies; --import adds one."""
    split: str = TRAIN
    """Of the task whose world the tools are in; its question is not asked."""
    task: int = Field(0, ge=0)
    """Which of the split."""
    seed: int = Field(0, ge=0)
    """Of the environment's random numbers, and of what the model samples."""
    out: str | None = None
    """An episode file to store each conversation in; null stores nothing."""


def chat_help() -> str:
    """Return the settings and what can be typed, for `--help`."""
    return f"\n\nsettings:\n{list_settings(ChatSettings(), without={'policy.name'})}\n{EXAMPLES}"


def talk(arguments: argparse.Namespace) -> int:
    """Hold conversations until the person quits.

    Raises:
        ConfigError: if the policy is a script, or there is no such environment.
        CheckpointError: if there is no such model.
    """
    name = arguments.checkpoint
    if name not in POLICIES:  # a folder, a run, a file or a name that the loader of models knows
        name, own = "checkpoint", {"policy.folder": str(model_folder(name))}
    else:
        own = {}
    settings = load_config(None, ChatSettings, settings={"policy.name": name, **own, **settings_of(arguments)})
    load_all_once(settings.imports)
    env = ALONE if settings.env is None else spec(settings.env)
    env.check_arguments(settings.env_args)
    params = sampling_params(settings.policy, settings.temperature, settings.max_tokens)
    no_model = ConfigError(f"{arguments.checkpoint} is a script of environments: give a model to talk to")
    if name in SCRIPTS:  # before an environment without one is refused
        raise no_model
    with open_policy(settings.policy, params, env) as policy:
        if isinstance(policy, EnvPolicy):
            raise no_model
        _talk(policy, settings, arguments.tokens)
    return 0


def _talk(policy: AnyPolicy, settings: ChatSettings, tokens: bool) -> None:
    screen = _Screen(policy, tokens)
    env = ALONE if settings.env is None else spec(settings.env)
    has_quit, number = False, 0
    with screen.interrupts():
        while not has_quit:
            job = chat_job(env, dict(settings.env_args), settings.split, settings.task, settings.seed + number)
            episode, has_quit = chat(job, screen.policy, screen.terminal)
            number += 1
            if episode.error is not None:
                screen.say(f"{episode.error.type}: {episode.error.message}")
                has_quit = True
            elif episode.stop_reason is StopReason.TOKENS:
                screen.say("the context is full, so a new conversation begins; policy.context=N holds more")
            if settings.out is not None and episode.turns:
                out = episode_file(settings.out)
                out.parent.mkdir(parents=True, exist_ok=True)
                with EpisodeWriter(out) as writer:
                    writer.write(episode)
                screen.say(f"stored in {out}")


class _Leave(KeyboardInterrupt):
    """A signal to quit; no `Exception`, which what it interrupts would take for its own."""


class _Screen:
    """What the person sees, and types."""

    def __init__(self, policy: AnyPolicy, tokens: bool) -> None:
        self.console, self.tokens = Console(highlight=False), tokens
        self.terminal = Terminal(self.ask, self.show, self.say, self.replied)
        self.stream: StreamingEngine | None = None
        self.policy, self._printed, self._is_asking, self._told = policy, "", False, False
        if isinstance(policy, TokenPolicy):
            from agent_rl.engines.embedded.engine import Engine

            if isinstance(policy.engine, Engine):
                self.stream = StreamingEngine(policy.engine, self.stream_tokens)
                self._renderer = policy.renderer
                self.policy = replace(policy, engine=self.stream)

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Let Ctrl-C end the reply under way; at the prompt, and where replies come whole, it interrupts.

        A closed terminal and SIGTERM quit, so that the conversation is stored.
        """

        def interrupt(*_: object) -> None:
            if self._is_asking or self.stream is None or self.stream.stopped:
                raise KeyboardInterrupt
            self.stream.stopped = True

        def leave(*_: object) -> None:
            raise _Leave

        handlers = {signal.SIGINT: interrupt, signal.SIGTERM: leave, signal.SIGHUP: leave}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask(self) -> str:
        """Read what the person says."""
        if not self._told:
            self.say(HELP)
            self._told = True
        while True:
            self._is_asking = True
            try:
                text = input("you> ")
            except EOFError:
                self.console.print()
                raise QuitError from None
            except _Leave:
                raise QuitError from None
            except KeyboardInterrupt:
                self.say("\n/quit ends")
                continue
            finally:
                self._is_asking = False
            if self.stream is not None:
                self.stream.stopped = False
            command = text.strip()
            if command == "/quit":
                raise QuitError
            if command == "/reset":
                raise ResetError
            if command.startswith("/") and not command.startswith("//"):
                self.say(HELP)
            elif command:
                return text.replace("//", "/", 1) if command.startswith("//") else text

    def stream_tokens(self, before: Sequence[int], ids: Sequence[int]) -> None:
        """Print what is new of a reply; some prompts open its thought."""
        said = self._renderer.parse(ids, before).content
        if said.startswith(self._printed) and said != self._printed and "\ufffd" not in said[-1:]:
            self.console.print(Text(clean(said[len(self._printed) :])), end="")
            self._printed = said

    def show(self, message: Message) -> None:
        """Print a message; of a reply only what was not streamed."""
        if message.role == "assistant" and self._printed:
            self.console.print(Text(clean(message.content.removeprefix(self._printed))))
            message, self._printed = replace(message, content="", reasoning=""), ""
            if not message.tool_calls:
                return
        print_message(message, self.console, folded_clean)

    def say(self, text: str) -> None:
        """Print a note."""
        self.console.print(Text(clean(text), style="dim"))

    def replied(self, conversation: Conversation) -> None:
        """Print the ids that were sampled last with their log-probabilities, if asked to."""
        if not self.tokens or not conversation.trajectories:
            return
        trajectory = conversation.trajectories[-1]
        last = trajectory.spans[-1].turn
        places = [i for s in trajectory.spans if s.turn == last for i in range(s.start, s.stop)]
        ids, logprobs, mask = trajectory.token_ids, trajectory.logprobs, trajectory.loss_mask
        shown = " ".join(f"{ids[i]}:{logprobs[i]:.2f}" for i in places if mask[i])
        self.say(f"{len(ids)} tokens of context; id:log-probability of this reply: {shown}")
