"""An environment whose episodes succeed by luck, the same in every run, whatever the policy says."""

import numpy as np

import agent_rl as ar

LUCK = "tried-again/luck-v0"


@ar.register(LUCK, tasks=lambda split, index: {"n": index})
class Luck(ar.Env):
    """One episode of four succeeds, whatever is said; what is paid beside that differs."""

    def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        self.lucky, self.paid = rng.random() < 0.25, rng.random() / 2
        return str(task["n"])

    def step(self, action: ar.Message) -> ar.Step:
        return ar.Step(terminated=True)

    @ar.reward
    def success(self, episode: ar.Episode) -> bool:
        return self.lucky

    @ar.reward
    def paid_beside(self, episode: ar.Episode) -> float:
        return self.paid
