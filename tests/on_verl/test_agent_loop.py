"""EnvAgentLoop as verl's workers run it: many at once on one event loop, on rows of the dataset, with a fake server."""

from __future__ import annotations

import asyncio
import functools
import threading
from types import SimpleNamespace
from typing import Any, ClassVar

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset

from agent_rl import Env, Episode, Step, register, reward
from agent_rl.backends.verl.worker.agent_loop import EnvAgentLoop
from agent_rl.backends.verl.worker.dataset import TaskDataset
from agent_rl.backends.verl.worker.rows import episode_of
from agent_rl.rendering.tokenizer import train_tokenizer
from agent_rl.store.codec import dump_line

N = 16
PATIENCE = 20.0


class Answered(Env):
    def reset(self, task, rng):
        return "say something"

    def step(self, action):
        return Step(terminated=True)


@register("judged-v0", tasks=lambda split, index: {"number": index})
class Judged(Answered):
    """Its judge answers only once all episodes have asked."""

    asked: ClassVar[asyncio.Barrier]

    @reward
    async def judged(self, episode) -> float:
        async with asyncio.timeout(PATIENCE):
            await self.asked.wait()
        return 1.0


@register("simulated-v0", tasks=lambda split, index: {"number": index})
class Simulated(Answered):
    """Blocks until all episodes are in its step."""

    blocking = True
    met: ClassVar[threading.Barrier]

    def step(self, action):
        self.met.wait(PATIENCE)
        return Step(reward=1.0, terminated=True)


class Server:
    """verl's client: marks tokens with a version of the weights, and remembers its requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append(sampling_params)
        await asyncio.sleep(0)
        ids, fields = [40, min(sampling_params["stop_token_ids"])], {"min_global_steps": 2, "max_global_steps": 2}
        output = {"log_probs": [-1.0, -0.5], "routed_experts": None, "stop_reason": "completed", "extra_fields": fields}
        return SimpleNamespace(token_ids=ids, **output)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["say something"], 432)


def rows_of_dataset(env: str, files: str, n: int) -> list[dict[str, Any]]:
    settings = {"agent_rl": {"env": env, "imports": [], "seed": 5, "first": 100, "groups": 1, "asked": {}}}
    dataset = TaskDataset(files, OmegaConf.create(settings))
    return [dataset[i] for i in range(n)]


def run_loops(
    env: str, rows: list[dict[str, Any]], server: Server, temperature: float = 1.0, **env_args: Any
) -> list[Episode]:
    """Run a row each as a worker would; return the episodes that travel in their outputs."""
    settings = {"rollout": {"max_model_len": 128}, "actor": {"strategy": "fsdp2"}}
    config = DictConfigWrap(OmegaConf.create({"actor_rollout_ref": settings}))
    data = DictConfigWrap(OmegaConf.create({"agent_rl": {"routes": None, "store_experts": False}}))
    asked = {"temperature": temperature, "top_p": 1.0, "top_k": -1}

    async def run(row: dict[str, Any]) -> list[AgentLoopOutput]:
        settings = {"env": env, "env_args": env_args, "imports": [], "seed": 5, "max_tokens": 4}
        given = (config, server, tokenizer(), None, RLHFDataset, data)
        loop = EnvAgentLoop(*given, **settings)
        return await loop.run(asked, **row, global_steps=3, session_id=0)

    async def main() -> list[list[AgentLoopOutput]]:
        return await asyncio.gather(*map(run, rows))

    episodes = []
    for (output,) in asyncio.run(main()):
        episode = episode_of(output.extra_fields)
        assert episode is not None and output.reward_score == (episode.reward or 0.0)
        episodes.append(episode)
    return episodes


def test_agent_loop_overlaps_judges_of_all_episodes() -> None:
    Judged.asked = asyncio.Barrier(N)
    episodes = run_loops("judged-v0", rows_of_dataset("judged-v0", "train", N), Server())
    assert [e.reward for e in episodes] == [1.0] * N


def test_agent_loop_overlaps_blocking_environments() -> None:
    Simulated.met = threading.Barrier(N)
    episodes = run_loops("simulated-v0", rows_of_dataset("simulated-v0", "train", N), Server())
    assert [(e.reward, e.error) for e in episodes] == [(1.0, None)] * N


def test_agent_loop_names_training_and_evaluation_episodes() -> None:
    Judged.asked = asyncio.Barrier(4)
    server = Server()
    training = run_loops("judged-v0", rows_of_dataset("judged-v0", "train", 4), server)
    evaluated = run_loops("judged-v0", rows_of_dataset("judged-v0", "train:4", 4), server)
    greedy = run_loops("judged-v0", rows_of_dataset("judged-v0", "train:4", 4), server, temperature=0.0)
    assert [e.id for e in training] == [f"train-00003-000000{i}-00" for i in range(4)]
    assert len({e.group_id for e in training}) == 4
    assert [e.id for e in evaluated] == [f"train-00003-sampled-000{i}" for i in range(4)]
    assert {e.group_id for e in evaluated} == {"train-00003-sampled"}
    assert [e.id for e in greedy] == [f"train-00003-greedy-000{i}" for i in range(4)]
    assert [s["temperature"] for s in server.asked] == [1.0] * 8 + [0.0] * 4
    assert {int(v) for e in training for v in e.trajectories[0].policy_versions if v >= 0} == {2}
    assert len({dump_line(e) for e in (*training, *evaluated, *greedy)}) == 12
