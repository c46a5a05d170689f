"""Answers whose bodies come in parts: what they hold of a sandbox's memory, and what forged ones come to."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from agent_rl.sandboxes.agent.frames import MAX_BODY, PART, FrameError
from agent_rl.sandboxes.agent.streams import Parts
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.calls import FileAccessError
from agent_rl.sandboxes.client.parts import Body
from agent_rl.sandboxes.local.backend import LocalSandboxes
from tests.sandbox.backends import skip_if_refused


def test_parts_pass_a_stream_on_whole():
    sent = list[bytes]()
    parts = Parts(-1, sent.append)
    data = os.urandom(PART + PART // 2)
    for start in range(0, len(data), 10_000):
        parts.add(data[start : start + 10_000])
    assert len(sent) == 1 and len(sent[0]) >= PART
    assert b"".join((*sent, parts.take())) == data and parts.take() == b""


def test_body_joins_its_parts():
    body = Body()
    assert body.add({"part": True}, b"a" * PART) is None and body.add({"part": True}, b"b" * PART) is None
    assert body.add({"problem": None}, b"c") == b"a" * PART + b"b" * PART + b"c"
    assert Body().add({"part": 1}, b"alone") == b"alone"


@pytest.mark.parametrize("size", [0, 1, PART - 1])
def test_body_refuses_parts_too_small_to_be_honest(size):
    with pytest.raises(FrameError, match=f"{size} bytes after 0"):
        Body().add({"part": True}, bytes(size))


def test_body_refuses_more_than_an_answer_may_have():
    body, part = Body(), bytes(MAX_BODY // 4)
    for _ in range(4):
        assert body.add({"part": True}, part) is None
    with pytest.raises(FrameError, match="1 bytes after"):
        body.add({}, b"x")


def test_file_of_several_parts_is_read_back(box, run):
    data = os.urandom(5 * PART + 123)
    run(box.write_file("file", data))
    assert run(box.read_file("file")) == data
    with pytest.raises(FileAccessError, match="at most 9 are read"):
        run(box.read_file("file", max_bytes=9))


def test_bytes_of_calls_do_not_wait_for_the_collector(sandboxes, run):
    """What calls were given and brought is freed with them, and at the latest when the sandbox is closed."""

    async def use(data: bytes) -> bytes:
        sandbox = await sandboxes.open(lifetime=60.0)
        await sandbox.run_python("1")
        await sandbox.write_file("a", data)
        read = await sandbox.read_file("a")
        await sandbox.close()
        return read

    data = os.urandom(5000)
    held = sys.getrefcount(data)
    gc.disable()
    try:
        read = run(use(data))
        assert (sys.getrefcount(data), sys.getrefcount(read)) == (held, held)
    finally:
        gc.enable()


def test_snapshot_and_read_spare_an_interpreter_near_its_limit(run):
    limits = Limits(memory=128 << 20, processes=16, disk=8 << 20, files=256)
    fill = (
        "import os\nheld = [bytearray(b'x') * (1 << 20) for _ in range(85)]\n"
        "for path in ('file', '/tmp/file'): open(path, 'wb').write(os.urandom(7 << 20))"
    )

    async def main() -> None:
        local = LocalSandboxes(limits, tier="jail", require=())
        with skip_if_refused():
            box = await local.open()
        try:
            assert (await box.run_python(fill)).error is None
            assert len((await box.snapshot()).files) > 13 << 20
            assert len(await box.read_file("file")) == 7 << 20
            assert (await box.run_python("len(held)")).value == "85"
        finally:
            await local.close()

    run(main())
