"""The pool of warm sandboxes, over a backend that only counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from agent_rl.concurrency import AsyncOnce
from agent_rl.core.sandbox_loss import Cause
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits, Sandbox
from agent_rl.sandboxes.calls import PythonResult
from agent_rl.sandboxes.pool import WarmPool
from agent_rl.testing import FakeSandboxes


class Counted:
    """A sandbox without effects."""

    loss = None

    def __init__(self, backend: Counting, owner: str, lifetime: float) -> None:
        self.backend, self.owner, self.lifetime = backend, owner, lifetime
        self.closed = self.dead = False
        self.calls: list[str] = []

    async def run_python(self, code: str, **options: object) -> PythonResult:
        if self.dead or self.closed:
            raise SandboxError("dead")
        self.calls.append(code)
        return PythonResult("", "", value=code)

    async def close(self) -> None:
        await asyncio.sleep(0)
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True

    def __getattr__(self, name: str) -> object:
        raise NotImplementedError(name)


class Counting:
    """A backend that records its calls."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.made: list[Counted] = []
        self.seconds = seconds
        self.fails = self.closed = False
        self.most = 0

    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> Sandbox:
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise SandboxError("none to be had")
        self.made.append(Counted(self, owner, lifetime))
        self.most = max(self.most, len(self.open_now))
        return self.made[-1]  # type: ignore[return-value]

    @property
    def open_now(self) -> list[Counted]:
        return [sandbox for sandbox in self.made if not sandbox.closed]

    async def capabilities(self) -> Capabilities:
        return dict.fromkeys(Guarantee)

    async def close(self) -> None:
        self.closed = True


def pooled(
    use: Callable[[WarmPool, Counting], Awaitable[None]], backend: Counting | None = None, **options: int
) -> None:
    """Use a pool, and check that closing it leaves nothing."""
    backend = backend or Counting()

    async def main() -> None:
        pool = WarmPool(backend, **{"warm": 2, **options})
        await use(pool, backend)
        await pool.close()
        assert backend.closed and not backend.open_now
        with pytest.raises(SandboxError, match="closed"):
            await pool.open()

    asyncio.run(main())


def test_warm_pool_hands_out_warm_sandboxes() -> None:
    async def use(pool: WarmPool, backend: Counting) -> None:
        await pool.fill()
        assert pool.ready == 2 and [s.owner for s in backend.made] == ["warm", "warm"]
        lease = await pool.open(owner="me")
        assert (await lease.run_python("x")).value == "x"
        assert [s.calls for s in backend.made[:2]] == [["", "", "x"], [""]]  # warmed up, asked after, used
        await pool.fill()
        assert pool.ready == 2 and len(backend.made) == 3

    pooled(use)


def test_pooled_sandbox_passes_every_call() -> None:
    async def use() -> None:
        fakes = FakeSandboxes()
        held = await WarmPool(fakes, warm=1).open()
        await held.write_file("a", b"data")
        assert await held.read_file("a") == b"data"
        assert (await held.exec(["ls"])).returncode == 0 and (await held.run_python("x")).error is None
        await held.close()
        assert fakes.opened[0].calls == ["ls", "x"] and fakes.opened[0].closed

    asyncio.run(use())


def test_warm_pool_reuses_no_sandbox() -> None:
    async def use(pool: WarmPool, backend: Counting) -> None:
        for _ in range(5):
            lease = await pool.open()
            await lease.run_python("secret")
            await lease.close()
            await lease.close()
        assert max(s.calls.count("secret") for s in backend.made) == 1
        assert all(s.closed for s in backend.made if "secret" in s.calls)

    pooled(use)


def test_warm_pool_discards_dead_sandboxes() -> None:
    async def use(pool: WarmPool, backend: Counting) -> None:
        await pool.fill()
        for sandbox in backend.made:
            sandbox.dead = True
        lease = await pool.open()
        assert (await lease.run_python("x")).value == "x"
        assert all(s.closed for s in backend.made[:2])

    pooled(use)


def test_warm_pool_bounds_open_sandboxes() -> None:
    async def use(pool: WarmPool, backend: Counting) -> None:
        async def episode() -> None:
            lease = await pool.open()
            await asyncio.sleep(0.001)
            await lease.close()

        await asyncio.wait_for(asyncio.gather(*(episode() for _ in range(30))), 60)
        assert 1 <= backend.most <= 3

    pooled(use, Counting(0.001), most=3)


def test_warm_pool_opens_own_sandboxes_for_other_limits() -> None:
    async def use(pool: WarmPool, backend: Counting) -> None:
        await pool.fill()
        await asyncio.wait_for(pool.open(limits=Limits(memory=1)), 60)  # though the warm ones fill the pool
        assert len(backend.made) == 3 and backend.made[0].closed

    pooled(use, most=2)


def test_warm_pool_asks_for_the_backends_own_limits_and_lifetimes() -> None:
    asked: list[tuple[Limits | None, float]] = []

    class Asked(Counting):
        async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> Sandbox:
            asked.append((limits, lifetime))
            return await super().open(owner=owner, limits=limits, lifetime=lifetime)

    async def use(pool: WarmPool, backend: Counting) -> None:
        await pool.fill()
        assert asked == [(None, 7200)]
        await pool.open(lifetime=9000.0)
        await pool.open(limits=Limits(cpus=2.0))
        assert (None, 9000.0) in asked and (Limits(cpus=2.0), 3600.0) in asked

    pooled(use, Asked(), warm=1)


def test_warm_pool_lease_ends_with_its_lifetime() -> None:
    async def use(pool: WarmPool, backend: Counting) -> None:
        lease = await pool.open(lifetime=0.3)
        await lease.run_python("x")
        await asyncio.sleep(0.4)
        with pytest.raises(SandboxError, match="lifetime"):
            await lease.run_python("x")
        assert backend.made[0].closed
        assert lease.loss is not None and lease.loss.cause is Cause.LIFETIME and lease.loss.evidence["lifetime"] == 0.3

    pooled(use)


def test_warm_pool_reports_backend_failures(caplog: pytest.LogCaptureFixture) -> None:
    async def use(pool: WarmPool, backend: Counting) -> None:
        backend.fails = True
        with pytest.raises(SandboxError, match="none to be had"):
            await pool.fill()
        with pytest.raises(SandboxError, match="none to be had"):
            await pool.open()
        backend.fails = False
        await pool.open()

    pooled(use)
    assert "no warm sandbox could be opened: none to be had" in caplog.messages


def test_warm_pool_open_cancelled_frees_its_place() -> None:
    async def use(pool: WarmPool, backend: Counting) -> None:
        held = await pool.open()
        waiting = [asyncio.create_task(pool.open()) for _ in range(3)]
        await asyncio.sleep(0.01)
        for task in waiting[:2]:
            task.cancel()
        await held.close()
        await asyncio.wait_for(waiting[2], 60)

    pooled(use, warm=1, most=1)


def test_warm_pool_serves_successive_event_loops() -> None:
    backend = Counting()
    pool = WarmPool(backend, warm=2)
    asyncio.run(pool.fill())
    for _ in range(2):
        assert asyncio.run(asyncio.wait_for(pool.open(), 60)) is not None
    loop = asyncio.new_event_loop()
    loop.run_until_complete(pool.open())
    loop.close()  # in the middle of filling up
    asyncio.run(asyncio.wait_for(pool.fill(), 60))
    assert pool.ready == 2
    asyncio.run(pool.close())
    assert not backend.open_now


def test_warm_pool_failed_open_lets_others_try() -> None:
    async def use(pool: WarmPool, backend: Counting) -> None:
        backend.fails = True
        opens = asyncio.gather(*(pool.open() for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in await asyncio.wait_for(opens, 5)] == [SandboxError] * 3

    pooled(use, Counting(seconds=0.01), warm=1, most=1)


def test_warm_pool_serves_threads_at_once() -> None:
    backend, ended = Counting(seconds=1e-4), list[None]()
    pool = WarmPool(backend, warm=1, most=2)

    async def use() -> None:
        for _ in range(30):
            sandbox = await pool.open()
            await asyncio.sleep(1e-4)
            await sandbox.close()
        ended.append(None)

    threads = [threading.Thread(target=lambda: asyncio.run(use()), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(ended) == len(threads)


@pytest.mark.parametrize("options", [{"warm": 0}, {"warm": 5, "most": 4}, {"lifetime": 0, "warm": 1}])
def test_warm_pool_refuses_meaningless_options(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        WarmPool(Counting(), **options)


def test_once_computes_a_result_one_time() -> None:
    tries: list[int] = []

    async def find_out() -> int:
        tries.append(len(tries))
        await asyncio.sleep(0.01)
        if len(tries) == 1:
            raise SandboxError("not now")
        return len(tries)

    once = AsyncOnce(find_out)

    async def ask() -> list[int]:
        impatient = asyncio.create_task(once.get())
        await asyncio.sleep(0)
        impatient.cancel()
        return await asyncio.gather(once.get(), once.get())

    with pytest.raises(SandboxError, match="not now"):
        asyncio.run(ask())
    assert asyncio.run(ask()) == asyncio.run(ask()) == [2, 2]
    assert len(tries) == 2
