"""Agent loop workers of verl on a pool of sandboxes: each process opens its own on both servers, and leaves none."""

from __future__ import annotations

import multiprocessing

from adapters.sandbox_servers import health, serve_command, wait_for

from agent_rl import Episode, SandboxedEnv, register, reward
from on_verl.test_agent_loop import Server, rows_of_dataset, run_loops

WORKERS, EPISODES, PLACES = 2, 8, 4


@register("pooled-v0", tasks=lambda split, index: {"number": index})
class Pooled(SandboxedEnv):
    """Earns 1 if its sandbox is its own to the end."""

    async def reset(self, task, rng):
        await self.open_sandbox()
        self.number = str(task["number"]).encode()
        await self.sandbox.write_file("task", self.number)
        return "say something"

    @reward
    async def kept(self, episode) -> float:
        value = (await self.sandbox.run_python("open('task').read(), 6 * 7")).value
        return float(value == str((self.number.decode(), 42)))


def work(urls: list[str]) -> list[tuple[float | None, str | None]]:
    """Run a worker's share of episodes, as `env_args.sandbox=remote env_args.sandbox_args.url=[...]` has it."""
    rows = rows_of_dataset("pooled-v0", "train", EPISODES)
    episodes: list[Episode] = run_loops("pooled-v0", rows, Server(), sandbox="remote", sandbox_args={"url": urls})
    return [(episode.reward, episode.error) for episode in episodes]


def test_agent_loop_workers_share_a_pool_of_sandboxes() -> None:
    """Sixteen episodes of two processes in eight places: who finds none waits."""
    words = ("--capacity", str(PLACES), "tier=jail")
    with serve_command(*words) as (_, one), serve_command(*words) as (_, two):
        with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
            ran = pool.map(work, [[one, two]] * WORKERS, chunksize=1)
        assert ran == [[(1.0, None)] * EPISODES] * WORKERS
        opened = [health(url)["opened"] for url in (one, two)]
        assert sum(opened) == WORKERS * EPISODES and min(opened) >= PLACES
        wait_for(lambda: health(one)["taken"] == health(two)["taken"] == 0, "all places")
