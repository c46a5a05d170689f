"""All files of a sandbox's folders as one stream, packed and unpacked by processes as confined as foreign code.

The stream is a tar archive under zlib: regular files, folders, links of both kinds, with modes and times. Both ends
hold it for hostile. Packing ends at limits, of the stream and of what it would unpack to; unpacking makes nothing but
in folders that it has made, and links to names last, so that it goes through none, and keeps the limits again. The host
only keeps the bytes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from .files import NotAFileError
from .frames import CHUNK, write_all

MAX_UNPACKED = 128 * 1024 * 1024
"""Bytes of the archive, at most."""
MAX_MEMBERS = 20_000
_PERMISSIONS, _MODE = 0o777, 0o7777
"""Of a mode: what a file is made with, and what it has in the end."""
Roots = Mapping[str, str]
"""The folders, by the name that each has in the archive."""


def roots(home: str) -> Roots:
    """Return the folders that code can write and that last: the one that it starts in, and that of temporary files."""
    return {"work": home, "tmp": os.environ.get("TMPDIR", "/tmp")}


def pack(folders: Roots, limit: int) -> None:
    """Write all that is in the folders to stdout, as at most `limit` bytes.

    The same files give the same bytes. What is neither file, folder nor link is left out.

    Raises:
        OSError: if a file can't be read, or there is too much.
    """
    stream = _Packing(limit)
    count = 0
    with tarfile.open(fileobj=stream, mode="w|", encoding="utf-8", errors="surrogateescape") as archive:  # type: ignore[call-overload]
        waiting = sorted(folders.items(), reverse=True)
        while waiting:
            name, path = waiting.pop()
            if name not in folders:
                _add(archive, name, path)
            if name in folders or stat.S_ISDIR(Path(path).lstat().st_mode):
                below = [(f"{name}/{entry}", f"{path}/{entry}") for entry in os.listdir(path)]  # noqa: PTH208
                count += len(below)
                if count > MAX_MEMBERS:
                    raise NotAFileError(f"there are more than {MAX_MEMBERS} files")
                waiting += sorted(below, reverse=True)
    stream.finish()


def _add(archive: tarfile.TarFile, name: str, path: str) -> None:
    about = archive.gettarinfo(path, name)
    if about is None or not (about.isreg() or about.isdir() or about.issym() or about.islnk()):
        return
    about.uid = about.gid = 0
    about.uname = about.gname = ""
    if not about.isreg():
        archive.addfile(about)
        return
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY), "rb") as file:  # noqa: PTH123
        archive.addfile(about, file)


class _Packing:
    """Compresses what it is given, to stdout."""

    def __init__(self, limit: int) -> None:
        self._left, self._unpacked = limit, MAX_UNPACKED
        self._compressor = zlib.compressobj(1)

    def write(self, data: bytes) -> int:
        self._unpacked -= len(data)
        if self._unpacked < 0:
            raise NotAFileError(f"the files have more than {MAX_UNPACKED} bytes")
        self._send(self._compressor.compress(data))
        return len(data)

    def finish(self) -> None:
        self._send(self._compressor.flush())

    def _send(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise NotAFileError("the files have more bytes than are kept, packed")
        write_all(1, data)


def unpack(folders: Roots) -> None:
    """Replace all that is in the folders by what stdin brings.

    Raises:
        OSError: if it is not from `pack`, or does not fit.
    """
    for folder in folders.values():
        _clear(folder)
    os.umask(0)
    try:
        with tarfile.open(fileobj=_Unpacking(), mode="r|", encoding="utf-8", errors="surrogateescape") as archive:  # type: ignore[call-overload]
            _Members(folders).extract_all(archive)
    except (tarfile.TarError, zlib.error, ValueError, OverflowError, IndexError, RecursionError) as error:
        raise NotAFileError(f"no packed files: {error}") from None


def _clear(folder: str) -> None:
    """Remove all that is in a folder, whatever its modes: step by step, as a path can be too long for the kernel."""
    _step_into(folder)
    above, waiting = list[str](), [_remove_files()]
    while waiting:
        if waiting[-1]:
            name = waiting[-1].pop()
            try:
                os.rmdir(name)  # noqa: PTH106
            except OSError:  # it isn't empty
                _step_into(name)
                above.append(name)
                waiting.append(_remove_files())
        else:
            waiting.pop()
            if above:
                os.chdir("..")
                os.rmdir(above.pop())  # noqa: PTH106


def _step_into(folder: str) -> None:
    """Go into a folder, and see to it that what is in there can be removed."""
    with contextlib.suppress(OSError):  # another user's
        os.chmod(folder, os.lstat(folder).st_mode & _MODE | stat.S_IRWXU)  # noqa: PTH101
    os.chdir(folder)


def _remove_files() -> list[str]:
    """Remove what is no folder from the one that we are in; return the names of the folders."""
    entries = list(os.scandir("."))
    folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name)  # noqa: PTH108
    return folders


class _Unpacking:
    """What stdin brings, without the compression."""

    def __init__(self) -> None:
        self._decompressor = zlib.decompressobj()
        self._total = 0
        self._has_ended = False

    def read(self, size: int) -> bytes:
        if self._has_ended:  # tarfile would go on for all that a header says
            raise NotAFileError("the packed files are cut off")
        found = b""
        while len(found) < size and not self._decompressor.eof:
            data = self._decompressor.unconsumed_tail or os.read(0, CHUNK)
            if not data:
                break
            found += self._decompressor.decompress(data, size - len(found))
        self._total += len(found)
        if self._total > MAX_UNPACKED:
            raise NotAFileError(f"the packed files have more than {MAX_UNPACKED} bytes")
        self._has_ended = not found
        return found


class _Members:
    """Makes the members of an archive, none of them outside the folders."""

    def __init__(self, folders: Roots) -> None:
        self._folders = dict(folders)
        """Where each folder is, by its name."""
        self._files: dict[str, str] = {}
        """Where each regular file is, by its name."""
        self._below: list[tuple[str, tarfile.TarInfo]] = []
        self._links: list[tuple[str, tarfile.TarInfo]] = []

    def extract_all(self, archive: tarfile.TarFile) -> None:
        size = 0
        for count, member in enumerate(archive, 1):
            size += max(0, member.size)
            if count > MAX_MEMBERS or size > MAX_UNPACKED:
                raise NotAFileError(f"there are more than {MAX_MEMBERS} packed files, or {MAX_UNPACKED} bytes of them")
            self._extract(archive, member, self._locate(member.name))
        for path, member in self._links:  # last: nothing is written through one
            os.symlink(member.linkname, path)  # noqa: PTH211
            os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)
        for path, member in reversed(self._below):
            _finish(path, member)

    def _locate(self, name: str) -> str:
        above, _, last = name.rpartition("/")
        if above not in self._folders or last in ("", ".", ".."):
            raise NotAFileError(f"{name!r:.200} is no name in a packed folder")
        return f"{self._folders[above]}/{last}"

    def _extract(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.isdir():
            os.mkdir(path, (member.mode & _PERMISSIONS) | stat.S_IRWXU)  # noqa: PTH102
            self._folders[member.name] = path
            self._below.append((path, member))
        elif member.issym():
            self._links.append((path, member))
        elif member.islnk():
            if member.linkname not in self._files:
                raise NotAFileError(f"{member.name!r:.200} is a link to no packed file")
            os.link(self._files[member.linkname], path, follow_symlinks=False)
        elif member.isreg():
            self._write(archive, member, path)
        else:
            raise NotAFileError(f"{member.name!r:.200} is no file, folder or link")

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        source = archive.extractfile(member)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(path, flags, (member.mode & _PERMISSIONS) | stat.S_IWUSR)
        while source is not None and (data := source.read(CHUNK)):
            if data.count(0) == len(data):  # what was a hole takes no room, either
                os.lseek(fd, len(data), os.SEEK_CUR)
            else:
                write_all(fd, data)
        os.ftruncate(fd, member.size)
        os.close(fd)
        _finish(path, member)
        self._files[member.name] = path


def _finish(path: str, member: tarfile.TarInfo) -> None:
    """Set a mode and times; where code may not, it could not have changed them, either."""
    os.chmod(path, member.mode & _MODE)  # noqa: PTH101
    os.utime(path, (member.mtime, member.mtime))
