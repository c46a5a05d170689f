"""Leases and frames of remote environments; tests/adapters/test_remote.py has servers and clients."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from pydantic import TypeAdapter

import agent_rl as ar
from agent_rl.core.sandbox_loss import Cause, SandboxLoss, loss_told_by
from agent_rl.remote import wire
from agent_rl.remote.playing import EnvLease
from agent_rl.remote.server import Server
from agent_rl.sandboxes.remote import packing
from agent_rl.sandboxes.remote import wire as sandbox_wire
from agent_rl.sandboxes.snapshot import Call, Snapshot
from agent_rl.seeds import RngState, Stream, rng
from agent_rl.serving import frames
from agent_rl.serving.host import ServerSettings, problem
from agent_rl.serving.leases import Lease, Leases, Owner
from agent_rl.store.codec import dump_line
from tests.doubles import example_episode


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lease(owner: Owner, number: int) -> Lease:
    made = owner.leases[str(number)] = Lease(str(number), owner, 1.0)
    return made


def test_places_are_taken_in_order_and_freed_once() -> None:
    async def main() -> None:
        places, owner = Leases(2, 60), Owner()
        first, second, third, fourth = (lease(owner, n) for n in range(4))
        await places.take(first, 1)
        await places.take(second, 1)
        got: list[Lease] = []

        async def wait(one: Lease) -> None:
            await places.take(one, 60)
            got.append(one)

        waiting = [asyncio.create_task(wait(one)) for one in (third, fourth)]
        await asyncio.sleep(0)
        assert (places.taken, places.waiting) == (2, 2)
        assert places.drop(first) and not places.drop(first)
        assert places.taken == 2  # until it is closed
        places.free()
        await waiting[0]
        assert got == [third] and places.taken == 2
        with pytest.raises(ar.RemoteError, match="all 2 places are taken"):
            await places.take(lease(owner, 9), 0.001)
        waiting[1].cancel()
        await asyncio.wait(waiting)
        for one in (second, third):
            places.drop(one)
            places.free()
        assert (places.taken, places.waiting, places.opened, places.refused) == (0, 0, 3, 1)

    asyncio.run(main())


def test_places_survive_cancelled_and_late_clients() -> None:
    """However tasks are cancelled, all places come back."""

    async def main(chance: random.Random) -> None:
        places, owner = Leases(3, 60), Owner()

        async def client(number: int) -> None:
            one = lease(owner, number)
            try:
                await places.take(one, 0.001 if chance.random() < 0.2 else 60)
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                if places.drop(one):
                    places.free()

        tasks = [asyncio.create_task(client(n)) for n in range(40)]
        while not all(task.done() for task in tasks):
            chance.choice(tasks).cancel()
            assert places.taken <= 3
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (places.taken, places.waiting) == (0, 0)

    for seed in range(20):
        asyncio.run(main(random.Random(seed)))


def test_leases_run_out_only_while_idle() -> None:
    async def main() -> None:
        clock, owner = Clock(), Owner()
        places = Leases(2, 10, clock)
        one, other = lease(owner, 1), lease(owner, 2)
        await places.take(one, 1)
        await places.take(other, 1)
        clock.now = 9
        places.renew(other)
        clock.now = 11
        assert places.overdue() == [one]
        with places.working(one):
            assert places.overdue() == []
            with pytest.raises(ar.RemoteError, match="at work"):
                await owner.idle("1")
        other.until = 10
        assert places.overdue() == [other]
        with pytest.raises(ar.RemoteError, match="gone"):
            await owner.idle("3")

    asyncio.run(main())


def test_random_generators_continue_on_the_other_side() -> None:
    here = rng(Stream.ENVIRONMENT, 2**62)
    here.integers(10, dtype=np.uint32)
    here.spawn(2)
    frame = wire.Reset(op="reset", call=1, lease="x", task={}, rng=RngState.of(here))
    sent = wire.load_request(frames.dump(frame))
    assert isinstance(sent, wire.Reset)
    there = sent.rng.generator()
    assert here.integers(2**32, size=9).tolist() == there.integers(2**32, size=9).tolist()
    assert [g.random() for g in here.spawn(2)] == [g.random() for g in there.spawn(2)]
    with pytest.raises(TypeError, match="NumPy's default generator"):
        RngState.of(np.random.Generator(np.random.Philox(1)))


class DownError(ConnectionError, ar.InfrastructureError):
    """What only the server's side knows."""


LOST = SandboxLoss(Cause.BACKEND_GONE, "gone", {"status": -9})


@pytest.mark.parametrize(
    ("raised", "known"),
    [
        (ValueError("why"), ValueError),
        (KeyError("why"), KeyError),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), UnicodeDecodeError),
        (ar.SandboxError("why", LOST), ar.SandboxError),
        (DownError("why"), ar.InfrastructureError),
        (ExceptionGroup("why", [ValueError()]), Exception),
        (SystemExit(3), Exception),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
def test_errors_are_on_the_other_side_what_they_were(raised: BaseException, known: type[Exception]) -> None:
    error = frames.load(TypeAdapter(frames.Problem), frames.dump(problem(raised))).error()
    assert (type(error).__name__, str(error)) == (type(raised).__name__, str(raised)) and isinstance(error, known)
    assert loss_told_by(error) == loss_told_by(raised)


def test_frames_have_a_limit_and_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ar.Message("assistant", "x" * 100, tool_calls=(ar.ToolCall("c", "t", {"n": float("nan"), "s": "\ud800"}),))
    frame = wire.Act(op="step", call=3, lease="x", action=said)
    data = frames.dump(frame)
    sent = wire.load_request(data)
    assert frames.call_of(data) == 3 and isinstance(sent, wire.Act)
    assert sent.action.tool_calls[0].arguments["s"] == "\ud800" and sent.action.content == said.content
    with pytest.raises(ar.RemoteError, match=r"lease: Field required"):
        wire.load_request(data.replace(b'"lease"', b'"leese"'))
    monkeypatch.setattr(frames, "MAX_BYTES", 100)
    with pytest.raises(ar.RemoteError, match="too large: at most 100"):
        frames.dump(frame)


@pytest.mark.parametrize("name", ["\0", "\ud800", "", "a b"])
def test_problems_of_impossible_classes_are_raised_as_others(name: str) -> None:
    error = frames.Problem(type=name, message="why", kind="OSError").error()
    assert isinstance(error, OSError) and str(error) == "why"


def test_surrogates_of_snapshots_survive_the_wire() -> None:
    snapshot = Snapshot(b"x", (Call("write_file", {"path": "\udcff", "data": b""}, ""),))
    frame = sandbox_wire.Restore(op="restore", call=1, lease="a", snapshot=packing.pack_snapshot(snapshot))
    sent = sandbox_wire.load_request(frames.dump(frame))
    assert isinstance(sent, sandbox_wire.Restore) and packing.unpack_snapshot(sent.snapshot) == snapshot


@pytest.mark.parametrize("counts", [b'"capacity":0', b'"capacity":-1', b'"taken":-1'])
def test_replies_of_no_places_are_refused(counts: bytes) -> None:
    with pytest.raises(ar.RemoteError, match="can't be read"):
        sandbox_wire.load_reply(b'{"call":1,%s}' % counts)


class SlowUser:
    async def reply(self, messages: object) -> str:
        await asyncio.sleep(60 if messages else 0)
        return "hello"


class Talk(ar.DialogueEnv):
    """Its user takes a minute."""

    async def reset(self, task: ar.Task, rng: np.random.Generator) -> tuple[ar.Message, ...]:
        self.user = SlowUser()
        return await self.open_dialogue()

    @ar.reward
    def fine(self, episode: ar.Episode) -> bool:
        return True


def test_server_scores_no_dialogue_whose_user_was_late() -> None:
    ar.register("remote-parts/talk-v0", tasks=[{}])(Talk)
    talk: Owner[EnvLease] = Owner()
    server = Server([ar.spec("remote-parts/talk-v0")], ServerSettings())
    episode = dump_line(example_episode("e")).decode()

    async def ask(request: frames.Request) -> wire.Reply:
        return await server.reply(talk, frames.dump(request))

    async def main() -> None:
        await ask(wire.Open(op="open", call=1, lease="a", env="remote-parts/talk-v0", env_args={}))
        start = RngState.of(rng(Stream.ENVIRONMENT, 0))
        await ask(wire.Reset(op="reset", call=4, lease="a", task={}, rng=start))
        said = ar.Message("assistant", "hi")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(wire.Act(op="step", call=2, lease="a", action=said)), 0.01)
        answer = await ask(wire.Score(op="score", call=3, lease="a", episode=episode, seconds=None))
        assert answer.error is not None and answer.error.type == "UserError"
        assert "while the simulated user was asked" in answer.error.message

    asyncio.run(main())


def test_address_without_websockets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "find_spec", lambda name: None)
    with pytest.raises(ar.ConfigError, match=r"pip install 'agent-rl\[serve\]'"):
        ar.spec("http://127.0.0.1:1/shop-v0")
