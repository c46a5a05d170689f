"""Hostile archives of a sandbox's files, and a process of its own that unpacks and packs them, one after the other.

It has the limits of `workplace` lowered, so that small archives reach them. What it says is a finding a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import stat
import sys
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

from agent_rl.sandboxes.agent import workplace
from agent_rl.sandboxes.agent.frames import write_all
from tests.sandbox.mutations import PARTS, mutated

CHILD = "from tests.sandbox import archives; archives.main()"
"""What the process runs."""
OUTSIDE = "/proc/self/cwd/../.."
"""The folder above those that are unpacked into, from where `workplace` works then: the same text in every run."""
MAX_UNPACKED, MAX_MEMBERS, MAX_PACKED = 1 << 18, 40, 1 << 16
PATIENCE = 3.0
"""Seconds of processor time that no archive may take."""
BLOCK = 512
KINDS: tuple[bytes, ...] = (tarfile.REGTYPE, tarfile.DIRTYPE) * 9
KINDS += (*(tarfile.SYMTYPE,) * 6, *(tarfile.LNKTYPE,) * 2)
KINDS += (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.AREGTYPE, b"?")
NUMBERS: tuple[bytes, ...] = (b"", b" ", b"-1", b"8", b"1e9", b"0000644\0", b"7777", b"7" * 11, b"\xff" * 12)
NUMBERS += (b"\xff" * 11 + b"\x85", b"\xff" + bytes(11), b"\x80" + b"\xff" * 11, b"\x80" + bytes(3) + b"\xff" * 8)
NUMBERS += (b"\x80" + bytes(10) + b"\7",)
"""Of a header: octal, or two's complement after a byte of its own."""
PAX_NUMBERS = ("0", "1", "-1", "0.3", "-0.5", "1e9", "1e999", "nan", "x", "", "9" * 30, "-" + "9" * 30, "9" * 5000)
PAX_WORDS = {
    "hdrcharset": ("BINARY", "x", "\0"),
    "GNU.sparse.map": ("0,1", "0,1,9,9", "5,-5,0,3", "9", "x", "1,99999999", ",".join("01" * 3000)),
    "GNU.sparse.major": ("1", "2"),
    "GNU.sparse.minor": ("0", "9"),
}
PAX_KEYS = ("path", "linkpath", "GNU.sparse.name", *PAX_WORDS)
PAX_KEYS += ("size", "mtime", "uid", "GNU.sparse.size", "GNU.sparse.realsize", "GNU.sparse.offset", "x")
DATA = (b"", b"x", b"text\n" * 200, bytes(3 * BLOCK), b"3\n0\n1\n9\n-9\n5\n5\n", b"1\n")
"""Of files; the last two are maps of sparse ones."""


def drawn(draw: random.Random, packed: bytes, outside: str) -> bytes:
    """Return a hostile archive: some honest one with mistakes in it, or members that nobody would pack."""
    data = zlib.decompress(packed) if draw.random() < 0.3 else _Members(draw, outside).drawn()
    if draw.random() < 0.4:
        data = _sealed(mutated(draw, data))
    again = zlib.compress(data, 1)
    return mutated(draw, again) if draw.random() < 0.2 else again


def _sealed(data: bytes) -> bytes:
    """Return an archive with the right sums in what looks like a header, so that its other mistakes are seen."""
    found = bytearray(data)
    for at in range(0, len(found) - BLOCK + 1, BLOCK):
        if found[at + 257 : at + 262] == b"ustar":
            found[at + 148 : at + 156] = b" " * 8
            found[at + 148 : at + 156] = b"%06o\0 " % sum(found[at : at + BLOCK])
    return bytes(found)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


class _Members:
    """The members of one archive: most are where and what they could be, so that the others come to be read."""

    def __init__(self, draw: random.Random, outside: str) -> None:
        self._draw, self._outside = draw, outside
        self._folders, self._files, self._links = ["work", "tmp"], ["work/f"], ["work/l"]

    def drawn(self) -> bytes:
        """Return the archive."""
        count = self._draw.randrange(9) if self._draw.random() < 0.98 else MAX_MEMBERS + 2
        return b"".join(self._member() for _ in range(count)) + bytes(2 * BLOCK)

    def _member(self) -> bytes:
        draw = self._draw
        kind, name, link, data = draw.choice(KINDS), self._name(), "", b""
        if kind == tarfile.SYMTYPE:
            link = self._outside if draw.random() < 0.3 else self._name()
            self._links.append(name)
        elif kind == tarfile.LNKTYPE:
            link = draw.choice(self._files) if draw.random() < 0.8 else self._name()
        elif kind == tarfile.DIRTYPE:
            self._folders.append(name)
        elif kind == tarfile.REGTYPE:
            data = draw.choice(DATA) if draw.random() < 0.99 else bytes(MAX_UNPACKED)
            self._files.append(name)
            kind = tarfile.GNUTYPE_SPARSE if draw.random() < 0.05 else kind
        raw, to = (text.encode(errors="surrogatepass") for text in (name, link))
        before = self._long(b"L", raw) if len(raw) > 100 or draw.random() < 0.05 else b""
        before += self._long(b"K", to) if len(to) > 100 else b""
        before += self._pax() if draw.random() < 0.1 else b""
        return before + self._header(raw, kind, b"%o" % len(data), to) + _padded(data)

    def _name(self) -> str:
        """Return a name: four times of five one below a folder that is there."""
        draw = self._draw
        last = draw.choice("abcdefgh")
        name = f"{draw.choice(self._folders)}/{last}"
        if draw.random() < 0.8:
            return name
        above = draw.choice((*self._folders, *self._files, *self._links))
        return draw.choice(
            (
                above,
                f"{above}/{last}",
                f"{draw.choice(self._links)}/{last}",
                f"{above}/{draw.choice(PARTS)}{draw.choice(('', '/a'))}",
                f"{above}/{'../' * draw.randrange(1, 5)}{draw.choice(('kept', 'made'))}",
                f"{self._outside}/{draw.choice(('kept', 'made'))}",
                self._outside,
                "..",
                last,
                name + "/a" * 3000,
            )
        )

    def _header(self, name: bytes, kind: bytes, size: bytes, link: bytes = b"") -> bytes:
        draw = self._draw
        mode, user, mtime, device = (
            usual if draw.random() < 0.95 else draw.choice(NUMBERS) for usual in (b"755", b"0", b"14000000000", b"0")
        )
        size = size if draw.random() < 0.97 else draw.choice(NUMBERS)
        prefix = name if draw.random() < 0.01 else b""
        fields = [(name, 100), (mode, 8), (user, 8), (user, 8), (size, 12), (mtime, 12), (b"", 8), (kind, 1)]
        fields += [(link, 100), (b"ustar\x0000", 8), (b"", 64), (device, 8), (device, 8), (prefix, 167)]
        block = b"".join(value[:width].ljust(width, b"\0") for value, width in fields)
        if kind == tarfile.GNUTYPE_SPARSE:
            sparse = [draw.choice((b"0", b"1", b"1000", *NUMBERS))[:12].rjust(12, b"0") for _ in range(8)]
            block = block[:386] + b"".join(sparse) + draw.choice((b"\0", b"\1")) + draw.choice((size, *NUMBERS))
        return _sealed(block[:BLOCK].ljust(BLOCK, b"\0"))

    def _long(self, kind: bytes, name: bytes) -> bytes:
        """Return what has a name or a link that is too long for a header, sometimes after hundreds without any."""
        empty = self._header(b"././@LongLink", kind, b"0") * (350 if self._draw.random() < 0.02 else 0)
        return empty + self._header(b"././@LongLink", kind, b"%o" % len(name)) + _padded(name)

    def _pax(self) -> bytes:
        """Return what has any fields of a header as texts."""
        draw = self._draw
        records = b"".join(self._record(draw.choice(PAX_KEYS)) for _ in range(draw.randrange(1, 4)))
        kind = draw.choice((tarfile.XHDTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE))
        return self._header(b"pax", kind, b"%o" % len(records)) + _padded(records)

    def _record(self, key: str) -> bytes:
        draw = self._draw
        value = self._name() if key in PAX_KEYS[:3] else draw.choice(PAX_WORDS.get(key, PAX_NUMBERS))
        said = f" {key}={value}\n".encode(errors="surrogatepass")
        size = len(said) + len(str(len(said)))
        size += len(str(size)) - len(str(len(said)))
        return b"%d" % (size if draw.random() < 0.95 else draw.randrange(3 * size)) + said


async def unpacked(draw: random.Random, cases: int) -> AsyncIterator[str]:
    """Have a process unpack and pack hostile archives; yield what it finds."""
    with tempfile.TemporaryDirectory() as folder:
        given = (str(draw.getrandbits(64)), str(cases), folder)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, *given, cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        try:
            async for line in child.stdout:
                yield json.loads(line)
            if status := await child.wait():
                yield f"the process that unpacks ended with {status}"
        finally:
            if child.returncode is None:
                child.kill()


def main() -> None:
    """Be that process."""
    seed, cases, folder = sys.argv[1:]
    workplace.MAX_UNPACKED, workplace.MAX_MEMBERS = MAX_UNPACKED, MAX_MEMBERS
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _be_late)
    says, parent = os.dup(1), os.getppid()
    os.umask(0)
    for fd in (0, 1):
        os.dup2(os.memfd_create("fuzz"), fd)
    bench, draw = _Bench(folder), random.Random(int(seed))
    honest = bench.honest()
    for case in range(int(cases)):
        if os.getppid() != parent:  # which was killed
            return
        for finding in bench.tried(drawn(draw, honest, OUTSIDE)):
            write_all(says, f"{json.dumps(f'case {case}: {finding}'[:2000])}\n".encode())


class _LateError(BaseException):
    """An archive took too long."""


def _be_late(*_: object) -> None:
    raise _LateError


class _Bench:
    """Two folders to unpack into and to pack, below others that nothing may change."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._inside = self._folder / "inside"
        self._roots = {name: str(self._inside / name) for name in ("work", "tmp")}
        for root in self._roots.values():
            Path(root).mkdir(parents=True)
        for above in (self._folder, self._inside):
            (above / "kept").write_text("kept")
        self._first_free = os.dup(0)
        """The descriptor from which on what a case has left open is closed, as by the end of a process."""
        os.close(self._first_free)
        self._outside = self._look_outside()

    def honest(self) -> bytes:
        """Return an archive of some files of every kind that is packed."""
        work, tmp = map(Path, self._roots.values())
        for folder in (work / "a", work / "a" / "b", tmp / ("long" * 50), work / "\udcff"):
            folder.mkdir()
        (work / "f").write_text("text\n" * 99)
        (work / "a" / "hard").hardlink_to(work / "f")
        (work / "a" / "b" / "soft").symlink_to("../" * 40 + "kept")
        (tmp / "zeros").write_bytes(bytes(9999))
        (tmp / ("long" * 50) / ("long" * 50)).write_text("x")
        for path in (*work.rglob("*"), *tmp.rglob("*")):
            os.utime(path, (1e9, 1e9), follow_symlinks=False)
        return self._call(partial(workplace.pack, self._roots, MAX_PACKED))[0]

    def tried(self, files: bytes) -> Iterator[str]:
        """Unpack an archive, and pack what then lies there; yield what should not be."""
        error = self._call(partial(workplace.unpack, self._roots), files)[1]
        yield from self._complaints("unpack", error)
        if error is None:
            yield from self._too_much()
        packed, refused = self._call(partial(workplace.pack, self._roots, MAX_PACKED))
        yield from self._complaints("pack", refused)
        if error is None and refused is None:
            error = self._call(partial(workplace.unpack, self._roots), packed)[1]
            again = self._call(partial(workplace.pack, self._roots, MAX_PACKED))
            if again != (packed, None):
                yield f"what was packed is another one, unpacked and packed again: {error!r}, {again[1]!r}"

    def _call(self, run: Callable[[], None], given: bytes = b"") -> tuple[bytes, BaseException | None]:
        """Run a function with these bytes on its stdin; return those that it wrote, and what it raised."""
        for fd, data in ((0, given), (1, b"")):
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        signal.setitimer(signal.ITIMER_PROF, PATIENCE)
        signal.alarm(int(40 * PATIENCE))
        raised = None
        try:
            run()
        except (Exception, _LateError) as error:
            raised = error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
        os.chdir(self._folder)
        os.closerange(self._first_free, self._first_free + 9)
        return os.pread(1, 2 * MAX_PACKED, 0), raised

    def _complaints(self, what: str, error: BaseException | None) -> Iterator[str]:
        if error is not None and not isinstance(error, OSError):
            yield f"{what}: {error!r}"
        outside = self._look_outside()
        if outside != self._outside:
            yield f"{what} changed what is outside: {sorted(outside ^ self._outside)}"
            self._outside = outside

    def _too_much(self) -> Iterator[str]:
        """Complain of more files and bytes than were to be unpacked."""
        paths = (f"{at}/{name}" for root in self._roots.values() for at, _, names in os.walk(root) for name in names)
        found = [os.lstat(path) for path in paths]
        size = sum({status.st_ino: status.st_size for status in found if stat.S_ISREG(status.st_mode)}.values())
        if size > MAX_UNPACKED or len(found) > MAX_MEMBERS:
            yield f"{len(found)} files of {size} bytes were unpacked"

    def _look_outside(self) -> set[tuple[object, ...]]:
        found = set[tuple[object, ...]]()
        for above in (self._folder, self._inside):
            for entry in os.scandir(above):
                status = entry.stat(follow_symlinks=False)
                is_folder = stat.S_ISDIR(status.st_mode)  # its time changes with what is in it
                about = () if is_folder else (status.st_size, status.st_nlink, status.st_mtime_ns)
                found.add((entry.path, status.st_mode, *about))
        return found
