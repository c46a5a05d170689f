"""A Docker engine, by way of the `docker` SDK: what we ask of it, and typed errors for when it fails.

Every call blocks; `backend.py` makes them in threads.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agent_rl.errors import ConfigError, SandboxError

if TYPE_CHECKING:
    from docker import APIClient

TIMEOUT = 60.0
"""Seconds that the engine has for an answer."""
_CONNECTIONS = 32


class Engine:
    """A Docker engine; it is reached when it is first needed."""

    def __init__(self, host: str | None = None) -> None:
        """Store the engine's address.

        Args:
            host: such as "unix:///var/run/docker.sock"; $DOCKER_HOST, or Docker's own default, if None.

        Raises:
            ConfigError: if it is an address whose streams can't be attached to from here.
        """
        self.host = host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        if not self.host.startswith(("unix://", "tcp://", "http://")):
            raise ConfigError(f"docker host '{self.host}': give a unix:// or tcp:// address; forward the others to one")
        self._api: APIClient | None = None

    @property
    def api(self) -> APIClient:
        """The SDK's client."""
        if self._api is None:
            from docker import APIClient

            if self.host.startswith("unix://"):
                _connect(self.host).close()  # the SDK leaves a failed connection's socket open
            self._api = APIClient(self.host, timeout=TIMEOUT, max_pool_size=_CONNECTIONS)
        return self._api

    def create(self, image: str, argv: list[str] | None, host_config: Mapping[str, object], **config: object) -> str:
        """Create a container that reads its stdin until we are gone; return its id.

        Args:
            image: its name.
            argv: what it runs; what the image or `config` says if None.
            host_config: as Docker's API names things.
            config: as the SDK does.
        """
        program = {} if argv is None else {"entrypoint": argv, "command": []}
        with self._asked(f"create a container of {image}"):
            created = self.api.create_container(
                image, stdin_open=True, host_config=dict(host_config), **program, **config
            )
            return str(created["Id"])

    def start(self, container: str, first: bytes = b"") -> socket.socket:
        """Start a container; return its stdin, stdout and stderr as one non-blocking socket, in Docker's framing.

        Args:
            container: its id.
            first: what it finds on its stdin. It is on its way before the engine is done, which goes on to do much
                after the program has begun.
        """
        with self._asked("start a container"):
            stream = _upgrade(self.host, f"/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1")
            try:
                stream.setblocking(False)
                sent = stream.send(first)
                self.api.start(container)
                return _begin(stream, first[sent:])
            except BaseException:
                stream.close()
                raise

    def join(self, container: str, argv: list[str], user: str, first: bytes) -> socket.socket:
        """Start another program in a container that runs, by another user; return its streams as `start` does.

        It has what the container's first process may do, and no more: no capabilities, the same filter and limits.
        """
        with self._asked("start a program in a container"):
            made = self.api.exec_create(container, argv, stdin=True, user=user, workdir="/")["Id"]
            stream = _upgrade(self.host, f"/exec/{made}/start", b'{"Detach": false, "Tty": false}')
            try:
                return _begin(stream, first)
            except BaseException:
                stream.close()
                raise

    def close(self) -> None:
        """Close the connections."""
        if self._api is not None:
            self._api.close()

    def remove(self, container: str) -> None:
        """End and remove a container; one that is gone already is nothing."""
        with self._asked("remove a container"):
            from docker.errors import APIError

            try:
                self.api.remove_container(container, force=True, v=True)
            except APIError as error:
                if error.status_code not in (404, 409):  # gone, or going
                    raise

    def runtimes(self) -> list[str]:
        """Return the names of what it can run containers by."""
        with self._asked("name its runtimes"):
            return sorted(self.api.info().get("Runtimes") or ())

    def has_selinux(self) -> bool:
        """Whether it labels what containers may read, for SELinux."""
        with self._asked("name its security options"):
            return any("selinux" in option for option in self.api.info().get("SecurityOptions") or ())

    def is_podman(self) -> bool:
        """Whether it is Podman's service, which speaks Docker's API, too."""
        with self._asked("say what it is"):
            return any("podman" in str(part.get("Name")).lower() for part in self.api.version().get("Components") or ())

    def state(self, container: str) -> dict[str, Any]:
        """Return how a container is; empty if it is gone."""
        with self._asked("inspect a container"):
            from docker.errors import NotFound

            try:
                return cast("dict[str, Any]", self.api.inspect_container(container)["State"])
            except NotFound:
                return {}

    def ending(self, container: str) -> dict[str, int]:
        """Return how a container ended, as `SandboxLoss.evidence` has it; less if the engine remembers no more.

        Of its events it keeps the last 256. It reports a kill for memory at the container's own limit; on cgroup v2,
        as it can't tell them apart, one for the host's memory, too.
        """
        found: dict[str, int] = {}
        with self._asked("list the events of a container"):
            wanted = {"container": container, "event": ["die", "oom"]}
            for event in self.api.events(since=1, until=int(time.time()) + 1, filters=wanted, decode=True):
                if event["Action"] == "die":
                    code = int(event["Actor"]["Attributes"]["exitCode"])
                    return found | {"status": 128 - code if code > 128 else code}
                found = dict.fromkeys(("oom_kills", "limit_hits"), found.get("oom_kills", 0) + 1)
        return found

    def labelled(self, label: str) -> dict[str, dict[str, str]]:
        """Return the labels of every container, running or not, that has this one; by id."""
        with self._asked("list the containers"):
            found = self.api.containers(all=True, filters={"label": label})
            return {str(container["Id"]): dict(container["Labels"]) for container in found}

    def import_image(self, file: Path, tag: str) -> str:
        """Make an image of a tar file; return its id."""
        repository, _, version = tag.partition(":")
        with self._asked(f"import {file} as {tag}"):
            self.api.import_image_from_file(str(file), repository=repository, tag=version or "latest")
            return cast(str, self.api.inspect_image(tag)["Id"])

    def build_image(self, context: Path | str, tag: str, *, timeout: float = TIMEOUT) -> dict[str, object]:
        """Build an image, unless there is one of that tag; return its configuration.

        Args:
            context: a folder with a Dockerfile, or a Dockerfile's text, which copies no files.
            tag: the image's name.
            timeout: seconds that a step may say nothing.
        """
        with self._asked(f"build {tag}"):
            if not self.api.images(tag):
                text = io.BytesIO(context.encode()) if isinstance(context, str) else None
                path = None if text else str(context)
                told: list[str] = []
                for line in self.api.build(
                    path, fileobj=text, tag=tag, rm=True, forcerm=True, decode=True, timeout=int(timeout)
                ):
                    told.append(str(line.get("error") or line.get("stream") or "").strip())
                    if "error" in line:
                        raise SandboxError(f"the image {tag} could not be built: {' | '.join(told[-5:])}")
            return dict(cast("dict[str, object]", self.api.inspect_image(tag)["Config"]))

    def has_image(self, name: str) -> bool:
        """Whether there is an image of that name."""
        with self._asked(f"look for {name}"):
            return bool(self.api.images(name))

    def pull_image(self, name: str) -> None:
        """Get an image from its registry, with the credentials that `docker login` has left here."""
        with self._asked(f"pull {name}"):
            for line in self.api.pull(name, stream=True, decode=True):
                if "error" in line:
                    raise OSError(line["error"])

    def tag_image(self, name: str, tag: str) -> None:
        """Give an image another name, or the same: its `LastTagTime` is now."""
        repository, _, version = tag.rpartition(":")
        with self._asked(f"tag {name}"):
            self.api.tag(name, repository, version, force=True)

    def about_image(self, name: str) -> dict[str, Any]:
        """Return what the engine knows of an image."""
        with self._asked(f"inspect {name}"):
            return cast("dict[str, Any]", self.api.inspect_image(name))

    def image_files(self, image: str, paths: Sequence[str], labels: Mapping[str, str]) -> dict[str, bytes]:
        """Return files of an image, by a container that is never started; one that is missing is empty.

        Args:
            image: its name.
            paths: of files, or of symbolic links to them.
            labels: of the container.
        """
        container = self.create(image, ["true"], {"NetworkMode": "none"}, labels=dict(labels))
        try:
            return {path: self._file(container, path) for path in paths}
        finally:
            self.remove(container)

    def _file(self, container: str, path: str) -> bytes:
        with self._asked(f"read {path} of a container"):
            from docker.errors import NotFound

            try:
                packed, about = self.api.get_archive(container, path)
                data = b"".join(packed)
                if about["linkTarget"]:
                    data = b"".join(self.api.get_archive(container, about["linkTarget"])[0])
            except NotFound:
                return b""
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                first = tar.next()
                file = None if first is None else tar.extractfile(first)
                return b"" if file is None else file.read()

    def image_tags(self, prefix: str) -> list[str]:
        """Return the names of images that begin so."""
        with self._asked("list the images"):
            names = [tag for image in self.api.images() for tag in image["RepoTags"] or ()]
        return [name for name in names if name.startswith(prefix)]

    def image_bytes(self) -> int:
        """Return the bytes of all images; layers that several have count once."""
        with self._asked("measure its images"):
            return int(self.api.df()["LayersSize"])

    def remove_image(self, name: str) -> list[str]:
        """Remove an image under all its names, unless a container has it; return the names.

        Raises:
            SandboxError: if one has.
        """
        with self._asked(f"remove {name}"):
            about = self.api.inspect_image(name)
            if self.api.containers(all=True, filters={"ancestor": about["Id"]}):
                raise OSError("a container is made of it")
            for tag in about["RepoTags"]:
                self.api.remove_image(tag)
            return list(about["RepoTags"])

    @contextlib.contextmanager
    def _asked(self, wish: str) -> Iterator[None]:
        """Turn the engine's failures into ours."""
        try:
            from docker.errors import DockerException, ImageNotFound
            from requests.exceptions import RequestException
        except ImportError:
            raise ConfigError("the docker sandbox needs the SDK: pip install 'agent-rl[docker]'") from None
        try:
            yield
        except ImageNotFound as error:
            hint = "make one with `agent-rl sandbox build-image`, or build sandboxes/docker/Dockerfile"
            raise SandboxError(f"can't {wish}: {error.explanation or error}; {hint}") from error
        except (DockerException, RequestException, OSError) as error:
            raise SandboxError(f"the Docker engine at {self.host} could not {wish}: {error}") from error


def _begin(stream: socket.socket, first: bytes) -> socket.socket:
    """Send a program what it finds on its stdin; return the stream, which does not block then."""
    stream.settimeout(TIMEOUT)
    with contextlib.suppress(ConnectionError):  # it has ended: what it said of that is still to be read
        stream.sendall(first)
    stream.setblocking(False)
    return stream


def _upgrade(host: str, what: str, body: bytes = b"") -> socket.socket:
    """Return a connection that has become a program's streams; the SDK's own is closed only when it is collected."""
    stream = _connect(host)
    try:
        about = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
        head = f"POST {what} HTTP/1.1\r\nHost: docker\r\n{about}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        stream.sendall(head.encode() + body)
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):  # no further: what follows is the container's
            answer += stream.recv(1) or b"\r\n\r\n"
        if answer.split(b" ")[1:2] != [b"101"]:
            raise ConnectionError(f"it answered {answer[:200]!r}")
    except BaseException:
        stream.close()
        raise
    return stream


def _connect(host: str) -> socket.socket:
    """Return a connection to the engine."""
    scheme, _, address = host.partition("://")
    if scheme != "unix":
        name, _, port = address.rstrip("/").rpartition(":")
        return socket.create_connection((name, int(port)), timeout=TIMEOUT)
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.settimeout(TIMEOUT)
        stream.connect(address)
    except BaseException:
        stream.close()
        raise
    return stream
