"""Snapshots of sandboxes: files exactly, variables by repeated calls; and what hostile files and archives come to."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import subprocess
import sys
import tarfile
import zlib

import pytest

from agent_rl.sandboxes.agent import workplace
from agent_rl.sandboxes.calls import Command, FileAccessError
from agent_rl.sandboxes.client.journal import MAX_CALLS, Journal
from agent_rl.sandboxes.snapshot import Call, Snapshot
from agent_rl.testing import FakeSandbox

FILL = r"""
mkdir -p 'a b/deep' empty; printf 'x\000y' > 'a b/deep/data'; : > empty.txt; printf hidden > .hidden
ln -s 'a b/deep/data' link; ln -s /etc/passwd outside; ln -s nowhere dangling; ln empty.txt twin.txt
printf t > "${TMPDIR:-/tmp}/scratch"; printf u > "$(printf 'no utf \377')"
head -c 500000 /dev/zero > zeros; printf end >> zeros
"""
LIST = r"""
find . -mindepth 1 | LC_ALL=C sort; readlink link outside dangling; cat 'a b/deep/data' zeros | cksum
cat "${TMPDIR:-/tmp}/scratch"; cat no*; stat -c %h empty.txt
"""


@pytest.fixture
def other(sandboxes, run):
    opened = run(sandboxes.open(lifetime=60))
    yield opened
    run(opened.close())


def needs_snapshots(box, run) -> None:
    try:
        run(box.snapshot())
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def supported(request):
    if "box" in request.fixturenames:
        needs_snapshots(request.getfixturevalue("box"), request.getfixturevalue("run"))


def test_restore_brings_every_kind_of_file_back(box, other, run):
    assert run(box.exec(["sh", "-ec", FILL])).stderr == ""
    snapshot = run(box.snapshot())
    run(other.write_file("stale/file", b"goes away"))
    assert run(other.restore(snapshot)) is None
    here, there = (run(place.exec(["sh", "-c", LIST])) for place in (box, other))
    assert there.stdout == here.stdout and "a b/deep/data" in here.stdout and "stale" not in there.stdout
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot


def test_snapshot_of_unchanged_files_is_the_same(box, run):
    run(box.exec(["sh", "-ec", FILL]))
    first, second = run(box.snapshot()), run(box.snapshot())
    assert first.files is second.files
    run(box.write_file("new", b""))
    assert run(box.snapshot()).digest != first.digest


def test_restore_repeats_the_calls_of_the_interpreter(box, other, run):
    run(box.write_file("numbers", b"1 2 3"))
    run(box.run_python("numbers = open('numbers').read().split(); total = 0"))
    run(box.run_python("total += len(numbers)\nraise ValueError('after it')"))
    run(box.exec(["sh", "-c", "echo 4 > numbers"]))
    run(box.run_python("class Thing: pass\nthing = Thing(); thing"))
    run(box.write_file("later", b"x"))
    assert run(other.restore(run(box.snapshot()))) is None
    for place in (box, other):
        assert run(place.run_python("total += 1; (total, numbers, open('numbers').read())")).value == (
            "(4, ['1', '2', '3'], '4\\n')"
        )
    assert run(other.read_file("later")) == b"x"
    assert run(box.snapshot()).calls == run(other.snapshot()).calls


def test_restored_sandbox_is_snapshot_again(box, sandboxes, run):
    async def chain() -> str | None:
        await box.run_python("x = 1")
        second, missing = await box.fork(sandboxes, lifetime=60)
        await second.exec(["sh", "-c", "echo 5 > file"])
        await second.run_python("x += int(open('file').read())")
        third, more = await second.fork(sandboxes, lifetime=60)
        assert (missing, more) == (None, None)
        value = (await third.run_python("x")).value
        await asyncio.gather(second.close(), third.close())
        return value

    assert run(chain()) == "6"
    assert run(box.run_python("x")).value == "1"


def test_restore_says_that_calls_of_chance_are_files_only(box, other, run):
    run(box.run_python("import os; x = os.urandom(8); x"))
    run(box.write_file("file", b"exact"))
    missing = run(other.restore(run(box.snapshot())))
    assert missing == "call 1 of 1 gave another result when it was repeated"
    assert run(other.read_file("file")) == b"exact"
    assert "NameError" in (run(other.run_python("x")).error or "")
    assert run(other.snapshot()).gap == missing


def test_restore_forgets_an_interpreter_that_ended(box, other, run):
    run(box.run_python("x = 1"))
    assert run(box.run_python("import os; os._exit(3)")).state_lost
    run(box.run_python("y = 2"))
    assert run(other.restore(run(box.snapshot()))) is None
    assert run(other.run_python("('x' in globals(), y)")).value == "(False, 2)"


def test_restore_after_a_cancelled_call_has_files_only(box, other, run):
    async def cancelled() -> None:
        try:
            async with asyncio.timeout(0.1):
                await box.run_python("x = 1\nwhile True: pass")
        except TimeoutError:
            await box.run_python("y = 2")

    run(cancelled())
    assert run(other.restore(run(box.snapshot()))) == "a call was cancelled"


@pytest.mark.parametrize("method", ["exec", "write_file"])
def test_restore_after_another_cancelled_call_has_files_only(method, box, other, run):
    async def cancelled() -> None:
        call = box.exec(["sleep", "9"]) if method == "exec" else box.write_file("f", b"x" * 2**20)
        task = asyncio.create_task(call)
        await asyncio.sleep(0.1 if method == "exec" else 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(cancelled())
    run(box.run_python("x = 1"))
    assert run(other.restore(run(box.snapshot()))) == "a call was cancelled"


def test_restored_interpreter_works_in_the_folder_it_was_in(box, other, run):
    run(box.run_python("import os; os.mkdir('p'); os.chdir('p'); open('a', 'w').write('1')"))
    assert run(other.restore(run(box.snapshot()))) is None
    assert run(other.run_python("(os.path.basename(os.getcwd()), open('a').read())")).value == "('p', '1')"


def test_restored_interpreter_shows_no_trace_of_it(box, other, run):
    run(box.run_python("def broken():\n    return 1 / 0"))
    assert run(other.restore(run(box.snapshot()))) is None
    for code in ("broken()", "1 / 0", "sorted(globals())"):
        here, there = run(box.run_python(code)), run(other.run_python(code))
        assert (here.error, here.value) == (there.error, there.value)


def test_restore_says_that_open_files_were_replaced(box, other, run):
    run(box.run_python("log = open('log', 'w'); kept = 1"))
    assert "holds files open" in run(other.restore(run(box.snapshot())))
    assert "NameError" in (run(other.run_python("kept")).error or "") and run(other.read_file("log")) == b""


def test_restore_says_that_processes_are_not_there(box, other, run):
    run(box.start(["sleep", "60"]))
    run(box.write_file("file", b"x"))
    assert run(other.restore(run(box.snapshot()))) == "a process was started there, which is not started again"
    assert run(other.read_file("file")) == b"x"


def test_restore_into_a_used_sandbox_has_files_only(box, other, run):
    run(other.run_python("mine = 1"))
    assert run(other.restore(run(box.snapshot()))) == "the interpreter of this sandbox has run other code"
    assert "NameError" in (run(other.run_python("mine")).error or "")


HARD_TO_REMOVE = {
    "folders that nobody may write to": (
        "import os\nos.makedirs('a/b'); open('a/b/f', 'w').close(); os.chmod('a/b', 0o555); os.chmod('a', 0o555)\n"
        "os.mkdir('c', 0); os.chmod('.', 0o500)"
    ),
    "long links": "import os\nfor n in range(50): os.symlink('x' * 4000, str(n))",
    "links to folders": "import os\nos.mkdir('a'); os.symlink('/tmp', 'a/b'); os.symlink('..', 'a/c')",
    "a deep tree": "import os\ntop = os.getcwd()\nfor _ in range(200): os.mkdir('d'); os.chdir('d')\nos.chdir(top)",
    "a path of 20 kB": "import os\nfor _ in range(200): os.mkdir('d' * 100); os.chdir('d' * 100)",
}


@pytest.mark.parametrize("name", HARD_TO_REMOVE)
def test_restore_replaces_files_that_are_hard_to_remove(name, box, other, run):
    run(box.write_file("file", b"x"))
    assert run(other.run_python(HARD_TO_REMOVE[name])).error is None
    run(other.restore(run(box.snapshot())))
    assert run(other.exec(["ls", "-A"])).stdout == "file\n"


@pytest.mark.parametrize("name", [name for name in HARD_TO_REMOVE if name != "a path of 20 kB"])
def test_restore_takes_what_snapshot_takes(name, box, other, run):
    code = HARD_TO_REMOVE[name].replace("os.mkdir('c', 0); ", "")
    assert run(box.run_python(code)).error is None
    assert run(other.restore(run(box.snapshot()))) is None  # over what its calls have made
    here, there = (run(place.exec(["sh", "-c", "find . | sort"])).stdout for place in (box, other))
    assert there == here and len(here.split()) > 3


# --- what code may do to keep its files from being packed, or to have more of them than fit ---

BOMBS = {
    "sparse": "for i in range(70):\n    with open(f'f{i}', 'wb') as file:\n        file.truncate(2 << 20)",
    "unreadable": "import os; os.close(os.open('secret', os.O_CREAT | os.O_WRONLY, 0))",
    "deep": "import os\nfor _ in range(240):\n    os.mkdir('d' * 100); os.chdir('d' * 100)",
}


@pytest.mark.parametrize("bomb", [pytest.param("sparse", marks=pytest.mark.sandbox), "unreadable", "deep"])
def test_snapshot_of_hostile_files_is_refused_not_fatal(bomb, box, run):
    assert run(box.run_python(BOMBS[bomb])).error is None
    with pytest.raises(FileAccessError):
        run(box.snapshot())
    assert run(box.exec(["echo", "alive"])).stdout == "alive\n"


def archive(*members: tuple[str, bytes, str, bytes]) -> bytes:
    """An archive of (name, type, link, data)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        for name, kind, link, data in members:
            about = tarfile.TarInfo(name)
            about.type, about.linkname, about.size, about.mode = kind, link, len(data), 0o644
            made.addfile(about, io.BytesIO(data))
    return file.getvalue()


REG, SYM, LNK = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE = {
    "up": archive(("work/../../escaped", REG, "", b"x")),
    "absolute": archive(("/tmp/escaped", REG, "", b"x")),
    "root": archive(("etc/escaped", REG, "", b"x")),
    "through a link": archive(("work/out", SYM, "/tmp", b""), ("work/out/escaped", REG, "", b"x")),
    "a link through a link": archive(("work/out", SYM, "/tmp", b""), ("work/out/escaped", SYM, "x", b"")),
    "over a link": archive(("work/out", SYM, "/tmp/escaped", b""), ("work/out", REG, "", b"x")),
    "link to a host's file": archive(("work/stolen", LNK, "/etc/passwd", b"")),
    "link up": archive(("work/stolen", LNK, "work/../../etc/passwd", b"")),
    "device": archive(("work/null", tarfile.CHRTYPE, "", b"")),
    "pipe": archive(("work/pipe", tarfile.FIFOTYPE, "", b"")),
    "cut": archive(("work/file", REG, "", b"x" * 9000))[:5000],
    "no archive": b"x" * 2000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_restore_refuses_hostile_archives(name, other, run):
    with pytest.raises(FileAccessError):
        run(other.restore(Snapshot(zlib.compress(HOSTILE[name]))))
    assert run(other.exec(["ls", "-A", "/tmp/escaped", "/etc/escaped"])).stdout == ""
    assert run(other.exec(["sh", "-c", "cat stolen 2> /dev/null | wc -c"])).stdout.strip() == "0"


TRUSTED = {
    "up": HOSTILE["up"],
    "through a link": archive(("work/out", SYM, "../..", b""), ("work/out/escaped", REG, "", b"x")),
}


@pytest.mark.parametrize("name", TRUSTED)
def test_hostile_archive_twin_escapes_a_trusting_reader(name, tmp_path):
    inside = tmp_path / "a" / "b"
    (inside / "work").mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(TRUSTED[name])) as trusted:
        trusted.extractall(inside, filter="fully_trusted")
    assert (tmp_path / "a" / "escaped").exists()


def bomb(members: int, size: int) -> bytes:
    """A snapshot of 1 MiB of zeros in each of so many files, which say that they have `size` bytes."""
    packer, zeros = zlib.compressobj(9), b"\0" * (1 << 20)
    packed = b""
    for n in range(members):
        header = tarfile.TarInfo(f"work/{n}")
        header.size = size
        packed += packer.compress(header.tobuf()) + packer.compress(zeros)
    return packed + packer.compress(b"\0" * 1024) + packer.flush()


def holes(size: int) -> bytes:
    """A snapshot of a file of so many bytes, none of which is there, and a folder of as many less than none."""
    folder, file = tarfile.TarInfo("work/a"), tarfile.TarInfo("work/b")
    folder.type, folder.pax_headers = tarfile.DIRTYPE, {"size": str(-size)}
    file.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(size)}
    return zlib.compress(folder.tobuf() + file.tobuf() + bytes(1024))


@pytest.mark.parametrize(
    "packed",
    [
        bomb(1, 2 * workplace.MAX_UNPACKED),
        pytest.param(bomb(129, 1 << 20), marks=pytest.mark.sandbox),
        holes(1 << 60),
    ],
    ids=["one large", "many", "holes"],
)
def test_restore_bounds_what_an_archive_unpacks_to(packed, other, run):
    assert len(packed) < 1 << 18
    with pytest.raises(FileAccessError, match="more than"):
        run(other.restore(Snapshot(packed)))
    assert run(other.exec(["echo", "alive"])).stdout == "alive\n"


def test_restore_ends_with_an_archive_that_says_more(other, run):
    file = tarfile.TarInfo("work/a")
    file.size = 1 << 60
    empty = tarfile.TarInfo.create_pax_global_header({"GNU.sparse.realsize": "0"})
    with pytest.raises(FileAccessError, match="cut off"):
        run(other.restore(Snapshot(zlib.compress(empty + file.tobuf(tarfile.GNU_FORMAT)))))


def test_bomb_twin_fits_where_it_is_not_too_large(other, run):
    assert run(other.restore(Snapshot(bomb(1, 1 << 20)))) is None
    assert run(other.exec(["sh", "-c", "wc -c < 0"])).stdout.strip() == str(1 << 20)


def test_unpack_makes_the_modes_that_were_packed(tmp_path):
    """By the files alone: in a Landlock sandbox, no code can change a mode."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / "run.sh").write_text("#!/bin/sh\n")
    (here / "run.sh").chmod(0o4751)
    (here / "shared").mkdir()
    (here / "shared").chmod(0o1777)
    (here / "link").symlink_to("run.sh")
    for name in ("run.sh", "shared", "link"):
        os.utime(here / name, (1_600_000_000, 1_600_000_000), follow_symlinks=False)
    code = "import sys; from agent_rl.sandboxes.agent import workplace; workplace.{}({{'work': sys.argv[1]}}{})"
    packed = b""
    for run, folder in (("pack", here), ("unpack", there)):
        argv = [sys.executable, "-c", code.format(run, ", 1 << 20" if run == "pack" else ""), str(folder)]
        packed = subprocess.run(argv, input=packed, capture_output=True, check=True).stdout
    for name, mode in (("run.sh", 0o4751), ("shared", 0o1777), ("link", 0o777)):
        made = (there / name).lstat()
        assert (made.st_mode & 0o7777, made.st_mtime) == (mode, 1_600_000_000)


def test_journal_gives_up_beyond_its_limits():
    journal = Journal()
    for _ in range(MAX_CALLS + 1):
        journal.add(Call("run_python", {"code": "1"}, ""), 1, 0.0)
    taken = journal.taken(b"")
    assert taken.calls == () and taken.has_variables and "too many" in (taken.gap or "")


def test_journal_repeats_no_users_where_there_are_none():
    command = Command(("true",), b"", "/work", {}, 5.0, 0, user="tests")
    calls = (Call("run_command", {"command": command}, ""), Call("run_python", {"code": "1"}, ""))
    sandbox = FakeSandbox()
    said = asyncio.run(Journal().repeat(Snapshot(b"", calls, True, None), sandbox))
    assert (
        said is not None and said.startswith("call 1 of 2 was one of user tests, and a sandbox") and not sandbox.calls
    )
