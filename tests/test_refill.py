"""Batches that dynamic sampling refills: which tasks they take."""

from itertools import pairwise
from pathlib import Path

import numpy as np

import agent_rl as ar
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.gym.mixture import load_environment
from tests.runs import config

SIZE = 10
REFILLED = {"filters": ["varied-groups"], "refill": {"max_rounds": 3, "oversampling": 2.0}}


@ar.register("refill/equal-v0", tasks={split: [{"n": n} for n in range(SIZE)] for split in ("train", "eval")})
class Equal(ar.Env):
    """All episodes earn the same, so that no group is kept and each batch is refilled as often as it may be."""

    def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        return str(task["n"])

    def step(self, action: ar.Message) -> ar.Step:
        return ar.Step(terminated=True)

    @ar.reward
    def success(self, episode: ar.Episode) -> bool:
        return False


def test_refilling_leaves_no_task_out(talker: Path, tmp_path: Path) -> None:
    in_order = {"shuffle": False}
    settings = config(tmp_path, env="refill/equal-v0", tasks=in_order, start_from=str(talker), algorithm=REFILLED)
    env = load_environment(settings, split="train", budget=settings.budget)
    trainer = Trainer(env, load_actor(talker, slots=8, context=256), settings)
    trainer.actor.engine.update_weights(0)
    taken = [[g.episodes[0].task["n"] for g in trainer.rollouts.sample(step).groups] for step in range(4)]
    assert all(len(batch) == 3 + 2 * 6 for batch in taken)
    own = [n for batch in taken for n in batch[:3]]
    assert all(later == (n + 1) % SIZE for n, later in pairwise(own))
    assert len({tuple(batch[3:]) for batch in taken}) > 1
