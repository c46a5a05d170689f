"""bfcl/...: the multi-turn half of the Berkeley Function Calling Leaderboard, from PyPI's `bfcl-eval`.

Task: a row of its data and the calls that solve it. A user asks for two to seven things in turn; the next one comes
after an answer without a call. Tools: its own stateful APIs (files, trading, travel, a car, tickets, messages), with
their JSON schemas. In `miss_func` a tool is described later, by the user; in `miss_param` an argument is.
Reward: `solved`, by bfcl-eval's checker: after each turn the state is what its own calls lead to, and their results
have all been seen. More than 20 messages with calls in a turn end the episode, unsolved.

Split: `eval`, 200 tasks in each category. bfcl-eval keeps every instance in its module, under a name; each episode has
names of its own, which `close` removes.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, Message, Step, Task, ToolCall, ToolErrorKind
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.tool import ToolSpec

try:
    import bfcl_eval
    from bfcl_eval.constants.default_prompts import (
        DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING as MORE_FUNCTIONS,
    )
    from bfcl_eval.constants.default_prompts import MAXIMUM_STEP_LIMIT
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
except ModuleNotFoundError as error:
    command = "pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0"
    raise ConfigError(f"bfcl/... needs {error.name}: {command} (its other requirements are models')") from error

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
DATA = Path(bfcl_eval.__file__).with_name("data")
LARGEST = {"exponent": 1000, "precision": 1000, "decimal_places": 1000}
"""Of arguments that a number's size grows with: beyond these, Python would compute for hours."""
_numbers = itertools.count()


def rows(category: str) -> Iterator[Task]:
    """Yield the tasks of a category, each with the calls of every turn that solve it."""
    questions, answers = (
        [json.loads(line) for line in (DATA / folder / f"BFCL_v4_{category}.json").read_text("utf-8").splitlines()]
        for folder in (".", "possible_answer")
    )
    solutions = {answer["id"]: answer["ground_truth"] for answer in answers}
    for question in questions:
        yield {**question, "ground_truth": solutions[question["id"]]}


class MultiTurn(Env):
    """Berkeley's function calling in several turns, with its own tools and its own checker."""

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Make the task's instances; return the first request."""
        self.row = cast(dict[str, Any], task)
        self.name = f"agent_rl_{next(_numbers)}"
        self.turn = self.steps = 0
        self.called: list[list[list[str]]] = [[]]
        """Of each turn, the calls of each message, as the Python that bfcl-eval runs."""
        self.over = False
        self.docs = {doc["name"]: doc for name in self.row["involved_classes"] for doc in documents(name)}
        later = [name for names in self.row.get("missed_function", {}).values() for name in names]
        self.specs = tuple(specify(doc) for name, doc in self.docs.items() if name not in later)
        return self.ask()

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools known from the start."""
        return self.specs

    def ask(self) -> str:
        """Return the turn's request; without one, it describes the tools that were missing."""
        if added := self.row.get("missed_function", {}).get(str(self.turn)):
            return str(MORE_FUNCTIONS.format(functions=json.dumps([self.docs[name] for name in added])))
        return "\n".join(message["content"] for message in self.row["question"][self.turn])

    def step(self, action: Message) -> Step:
        """Make the calls, in order; without any, begin the next turn."""
        if action.tool_calls:
            self.called[-1].append([])
            answers = tuple(self.answer(call) for call in action.tool_calls)
            self.steps += 1
            return Step(answers, truncated=self.steps > MAXIMUM_STEP_LIMIT)
        self.turn, self.steps = self.turn + 1, 0
        self.over = self.turn == len(self.row["question"])
        if self.over:
            return Step(terminated=True)
        self.called.append([])
        return Step((Message("user", self.ask()),))

    def answer(self, call: ToolCall) -> Message:
        """Make a call of any function of the task's APIs, also of one that is described later."""
        doc = self.docs.get(call.name)
        wrong = doc and [name for name in call.arguments if name not in doc["parameters"]["properties"]]
        large = [name for name, most in LARGEST.items() if _exceeds(call.arguments.get(name), most)]
        kind = ToolErrorKind.BAD_ARGUMENTS
        if call.error is not None:
            kind, problem = ToolErrorKind.MALFORMED, call.error
        elif doc is None:
            kind, problem = ToolErrorKind.UNKNOWN_TOOL, f"name '{call.name}' is not defined"
        elif wrong or large:
            problem = f"unexpected argument '{wrong[0]}'" if wrong else f"'{large[0]}' is too large"
        else:
            code = f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
            self.called[-1][-1].append(code)
            return Message("tool", self.execute([code])[0], tool_call_id=call.id, name=call.name)
        said = f"Error during execution: {problem}"
        return Message("tool", said, tool_call_id=call.id, name=call.name, tool_error=kind)

    def execute(self, code: Sequence[str]) -> list[str]:
        """Run calls on the episode's instances, which are made at first use."""
        return cast(
            list[str],
            multi_turn_utils.execute_multi_turn_func_call(
                list(code),
                self.row["initial_config"],
                self.row["involved_classes"],
                self.name,
                self.row["id"],
                long_context="long_context" in self.row["id"],
            )[0],
        )

    def close(self) -> None:
        """Remove the episode's instances from bfcl-eval's module."""
        for name in [name for name in vars(multi_turn_utils) if name.startswith(f"{self.name}_")]:
            delattr(multi_turn_utils, name)

    @reward
    def solved(self, episode: Episode) -> bool:
        """Whether bfcl-eval's checker accepts all turns."""
        if not self.over:
            return False
        turns = [[step for step in turn if step] for turn in self.called]
        result = multi_turn_checker(turns, self.row["ground_truth"], self.row, "", f"{self.name}_checked")
        return bool(result["valid"])

    def state_hash(self) -> str:
        """Return the calls so far, of which the state follows."""
        return json.dumps(self.called)

    def oracle(self) -> Script:
        """Make the published calls: one a message, or as many as it takes to make them all."""
        for code in self.row["ground_truth"]:
            calls = [self.parse(line, f"call_{number}") for number, line in enumerate(code)]
            while calls:
                most = math.ceil(len(calls) / (MAXIMUM_STEP_LIMIT - self.steps))
                yield Message("assistant", tool_calls=tuple(calls[:most]))
                del calls[:most]
            yield "Done."

    def parse(self, code: str, id: str) -> ToolCall:
        """Return a line of Python as a call; positional arguments get their names."""
        call = cast(ast.Call, ast.parse(code, mode="eval").body)
        name = cast(ast.Name, call.func).id
        names = [*list(self.docs[name]["parameters"]["properties"])[: len(call.args)], *(k.arg for k in call.keywords)]
        values = [ast.literal_eval(value) for value in (*call.args, *(k.value for k in call.keywords))]
        return ToolCall(id, name, dict(zip(cast(list[str], names), values, strict=True)))


def documents(class_name: str) -> list[dict[str, Any]]:
    """Return what bfcl-eval says of an API's functions."""
    file = DATA / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def specify(doc: Mapping[str, Any]) -> ToolSpec:
    """Return a function's description with a JSON schema of its parameters."""
    return ToolSpec(doc["name"], doc["description"], cast("dict[str, JSON]", _as_schema(doc["parameters"])))


def _as_schema(found: object) -> object:
    """Return a description with the names of types that JSON Schema has."""
    if isinstance(found, list):
        return [_as_schema(value) for value in found]
    if not isinstance(found, dict):
        return found
    return {
        key: GORILLA_TO_OPENAPI.get(value, value) if key == "type" and isinstance(value, str) else _as_schema(value)
        for key, value in found.items()
    }


def _exceeds(value: object, most: int) -> bool:
    return isinstance(value, int | float) and abs(value) > most


for category in CATEGORIES:
    register(f"bfcl/{category}-v0", tasks={"eval": rows(category)}, budget=Budget(turns=160))(MultiTurn)
