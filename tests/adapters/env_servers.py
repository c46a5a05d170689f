"""A server of environments for tests, in a thread, and an environment that does what its task says."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractContextManager

import numpy as np

import agent_rl as ar
from agent_rl.remote.server import serving
from agent_rl.serving.host import ServerSettings
from tests.adapters.sandbox_servers import in_thread

PATIENCE = 60.0
PICTURE = ar.Image.of(np.zeros((2, 3), np.uint8))
CALL = ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", "act", {"text": "x"}),))


@ar.register("remote-tests/odd-v0", tasks={"train": [{"do": "nothing"}], "eval": [{"do": "nothing"}]})
class Odd(ar.ToolEnv):
    """Does what its task says."""

    closed = 0
    gate = threading.Event()

    def __init__(self, name: str = "", size: int = 1) -> None:
        self.name, self.size, self.do = name, size, ""

    def reset(self, task, rng):
        self.do = task["do"]
        self.act_out("reset")
        return f"{self.name}{self.size}{rng.integers(2**40)}{[g.random() for g in rng.spawn(2)]}"

    def act_out(self, where: str) -> None:
        if self.do == f"raise in {where}":
            raise ValueError(f"broken in {where}")
        if self.do == f"lose in {where}":
            raise ar.SandboxError("the sandbox is gone")
        if self.do == f"exit in {where}":
            raise SystemExit(3)

    @ar.tool
    async def act(self, text: str) -> str:
        """Say a text again.

        Args:
            text: what to say.
        """
        if self.do == "wait":
            await asyncio.sleep(600)
        return text

    def on_answer(self, action):
        self.act_out("step")
        if self.do == "show":
            return ar.Step((ar.Message("user", parts=["look", PICTURE]),), terminated=True)
        return ar.Step((ar.Message("user", action.content),), terminated=True)

    @ar.reward
    def scored(self, episode):
        self.act_out("score")
        return None if self.do == "not scored" else len(episode.messages) / 3

    @ar.group_reward(weight=0.5)
    def rank(self, group) -> list[float]:
        return [float(i) for i, _ in enumerate(group.episodes)]

    def close(self) -> None:
        type(self).closed += 1
        if self.do == "hang in close":
            self.gate.wait(PATIENCE)
        self.act_out("close")

    def oracle(self):
        yield CALL
        yield "done"


def served(*envs: str, **settings: object) -> AbstractContextManager[str]:
    return in_thread(serving([ar.spec(env) for env in envs], ServerSettings(port=0, **settings)))


def jobs(id: str, *tasks: ar.Task, samples: int = 1, **env_args: ar.JSON) -> list[ar.Job]:
    return [
        ar.Job(ar.spec(id), task, 5 + i, group_id=str(task), env_args=env_args)
        for task in tasks
        for i in range(samples)
    ]
