"""Environments that are broken in one way each; `Vault` is the sound one that they are made from."""

from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import agent_rl as ar
from agent_rl.gym.tasks import TaskSource

E = TypeVar("E", bound=type[ar.Env])
CODES = [f"{7919 * (i + 3) % 9973:04d}" for i in range(24)]
ROWS = {
    "train": [{"box": i, "code": code} for i, code in enumerate(CODES[:16])],
    "eval": [{"box": i, "code": code} for i, code in enumerate(CODES[16:], 16)],
}
BROKEN: dict[str, tuple[ar.EnvSpec, str]] = {}
"""Each broken environment, and the name of the check that finds it."""
HELD: list[Any] = []
"""What the leaking environments leave behind; the tests free it."""


def spec_of(cls: type[ar.Env], rows: Any = None, budget: ar.Budget | None = None) -> ar.EnvSpec:
    return ar.EnvSpec("", cls.__name__.lower(), 0, cls, TaskSource(rows or ROWS), budget or ar.Budget(turns=6))


def broken(check: str, rows: Any = None, budget: ar.Budget | None = None) -> Callable[[E], E]:
    def add(cls: E) -> E:
        BROKEN[cls.__name__] = spec_of(cls, rows, budget), check
        return cls

    return add


def call(name: str, **arguments: ar.JSON) -> ar.Message:
    return ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", name, arguments),))


class Vault(ar.ToolEnv):
    """Look into a box, and say its number and code."""

    snapshot_attributes = ("looks",)

    def reset(self, task, rng):
        self.box, self.code, self.looks = task["box"], task["code"], 0
        return f"Which code is in box {self.box}?"

    @ar.tool(inline=True)
    def look(self, box: int) -> str:
        """Look into a box."""
        self.looks += 1
        return self.code if box == self.box else f"nothing, after {self.looks} looks"

    @ar.reward
    def correct(self, episode) -> bool:
        return episode.final_text == f"{self.box}: {self.code}"

    def oracle(self) -> Iterator[Any]:
        (found,) = yield call("look", box=self.box)
        yield f"{self.box}: {found.content}"


class Text(ar.Env):
    """Guess a number up to nine that is the same in the whole episode."""

    def reset(self, task, rng):
        self.code = task["code"]
        return "Which code?"

    def step(self, action):
        return ar.Step((ar.Message("user", "no"),), terminated=action.content == self.code)

    @ar.reward
    def correct(self, episode) -> bool:
        return episode.final_text == self.code

    def oracle(self):
        yield self.code


# --- instances that share state ---


@broken("isolation")
class Accumulates(Vault):
    """Remembers in a class attribute what it was asked."""

    asked: ClassVar[list[int]] = []

    def reset(self, task, rng):
        self.asked.append(task["box"])
        return f"{super().reset(task, rng)} You asked {len(self.asked)} times."


@broken("isolation")
class Overwrites(Vault):
    """Keeps the code in the class: the last instance to be reset decides."""

    snapshot_attributes = None

    def reset(self, task, rng):
        opening = super().reset(task, rng)
        Overwrites.secret = task["code"]
        return opening

    @ar.tool(inline=True)
    def look(self, box: int) -> str:
        """Look into a box."""
        return Overwrites.secret if box == self.box else "nothing"


# --- chance ---


@broken("global-random")
class GlobalRandom(Vault):
    def reset(self, task, rng):
        return f"{super().reset(task, rng)} ({random.random()})"


@broken("determinism")
class Clock(Vault):
    def reset(self, task, rng):
        return f"{super().reset(task, rng)} It is {time.perf_counter_ns()}."


@broken("determinism")
class UnsteadyState(Vault):
    def state_hash(self):
        return str(time.perf_counter_ns())

    snapshot_attributes = None


# --- rewards ---


@broken("reward")
class RewardNaN(Vault):
    @ar.reward
    def correct(self, episode) -> float:
        return math.nan


@broken("reward")
class RewardText(Vault):
    @ar.reward
    def correct(self, episode) -> Any:
        return "1.0"


@broken("reward")
class StepRewardInfinite(Text):
    def step(self, action):
        return ar.Step(reward=math.inf, terminated=True)


# --- the end ---


@broken("termination")
class NeverEnds(Text):
    def step(self, action):
        return ar.Step((ar.Message("user", "on"),))

    def oracle(self):
        while True:
            yield self.code


@broken("termination", budget=ar.Budget(turns=None))
class Endless(Text):
    """Ends for the oracle only, without a limit in turns."""


@broken("end")
class PaysTwice(Text):
    def step(self, action):
        return ar.Step(reward=float(action.content == self.code), terminated=True)


@broken("hang")
class Hangs(Vault):
    async def reset(self, task, rng):
        await asyncio.Event().wait()


# --- replies that break it ---


@broken("fuzz")
class TrustsArguments(Vault):
    """Reads an argument before it was checked."""

    async def step(self, action):
        for made in action.tool_calls:
            assert made.arguments["box"] != "x"
        return await super().step(action)


@broken("fuzz")
class ToolBreaksEpisode(Vault):
    @ar.tool(inline=True)
    def look(self, box: int) -> str:
        """Look into a box."""
        if box < 0:
            raise ar.InfrastructureError("no box below 0")
        return self.code if box == self.box else "nothing"


@broken("step")
class TrustsText(Text):
    def step(self, action):
        return ar.Step(terminated=int(action.content) == int(self.code))


# --- what is left behind ---


def leaky(name: str, hold: Callable[[], Any]) -> None:
    def reset(self: Any, task: Any, rng: Any) -> str:
        self.held = hold()
        HELD.append(self.held)
        return Vault.reset(self, task, rng)

    broken("leak")(type(name, (Vault,), {"reset": reset, "__module__": __name__}))


def thread() -> threading.Event:
    ended = threading.Event()
    threading.Thread(target=ended.wait, daemon=True, name="left-behind").start()
    return ended


async def sleep() -> None:
    await asyncio.Event().wait()


leaky("LeaksFile", lambda: Path(os.devnull).open())  # noqa: SIM115
leaky("LeaksProcess", lambda: subprocess.Popen(["cat"], stdin=subprocess.PIPE))
leaky("LeaksThread", thread)
leaky("LeaksTask", lambda: asyncio.ensure_future(sleep()))
leaky("LeaksTemporaryFile", lambda: tempfile.NamedTemporaryFile(delete=False))  # noqa: SIM115


@broken("close")
class CloseFails(Vault):
    def close(self):
        raise OSError("already closed")


# --- tasks ---


@broken("splits", rows={"train": ROWS["train"], "eval": ROWS["train"][:4]})
class SplitsOverlap(Vault):
    pass


OWN_ROWS = [dict(row, times=0) for row in ROWS["train"]]


@broken("tasks", rows={"train": OWN_ROWS, "eval": ROWS["eval"]})
class ChangesTasks(Vault):
    def reset(self, task, rng):
        if task["box"] < len(OWN_ROWS):
            OWN_ROWS[task["box"]]["times"] = 1
        return super().reset(task, rng)


@broken("reset")
class ResetFails(Vault):
    def reset(self, task, rng):
        raise LookupError(f"no box {task['box']}")


# --- what is scored ---


@broken("oracle")
class OracleFails(Vault):
    def oracle(self):
        yield self.code if self.box else "0"


@broken("oracle")
class OracleStops(Vault):
    def oracle(self):
        yield call("look", box=self.box)


@broken("floor")
class NothingPasses(Vault):
    """Compares a state that nothing changes."""

    @ar.reward
    def correct(self, episode) -> bool:
        return not any(m.tool_error for m in episode.messages)

    @ar.reward(weight=9)
    def answered(self, episode) -> bool:
        return episode.final_text == f"{self.box}: {self.code}"


@broken(
    "floor", rows={name: [dict(row, code=str(i // 5)) for i, row in enumerate(rows)] for name, rows in ROWS.items()}
)
class ConstantPasses(Text):
    pass


@broken("gap")
class NoGap(Vault):
    @ar.reward(weight=9)
    def talks(self, episode) -> bool:
        return True


# --- snapshots ---


@broken("snapshot")
class SnapshotMisses(Vault):
    snapshot_attributes = ()

    def state_hash(self):
        return str(self.looks)


@broken("snapshot")
class SnapshotShares(Vault):
    """Gives its own list away, which changes later."""

    def reset(self, task, rng):
        self.looked = []
        return super().reset(task, rng)

    def snapshot(self):
        return self.looked

    def restore(self, snapshot):
        self.looked = snapshot

    def state_hash(self):
        return ",".join(map(str, self.looked))

    @ar.tool(inline=True)
    def look(self, box: int) -> str:
        """Look into a box."""
        self.looked.append(box)
        return self.code if box == self.box else "nothing"


# --- schemas and observations ---


@broken("schema")
class SchemaInvalid(Text):
    @property
    def tools(self):
        return (ar.ToolSpec("look", "Look.", {"type": "object", "properties": {"box": {"type": "int"}}}),)


@broken("observation")
class HalfCharacter(Vault):
    def reset(self, task, rng):
        return f"{super().reset(task, rng)} \ud83d"


@broken("observation")
class NoOpening(Vault):
    def reset(self, task, rng):
        super().reset(task, rng)
        return ()


@broken("observation")
class ObservesNumber(Vault):
    def reset(self, task, rng):
        super().reset(task, rng)
        return 7


@broken("observation")
class SpeaksAsAssistant(Text):
    def step(self, action):
        right = action.content == self.code
        return ar.Step(() if right else (ar.Message("assistant", "no"),), terminated=right)
