"""Runtimes with a kernel of their own: gVisor (`runsc`), and Kata's, which starts a small machine for each container.

The engine has to know them: `dockerd --add-runtime runsc=/usr/bin/runsc`, or "runtimes" in its daemon.json.
Firecracker is no runtime of Docker's by itself: Kata starts its machines where Kata's configuration says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.docker.engine import Engine

OVERHEAD = 128 * 1024 * 1024
"""Bytes of memory that such a kernel takes itself; the container's cgroup counts them."""
THREADS = 512
"""Threads and processes of the host that it needs, on top of those in the container."""


def with_runtime(runtime: str | None, config: Mapping[str, object]) -> Mapping[str, object]:
    """Return a container's host configuration for a runtime, or the same for the engine's own."""
    if runtime is None:
        return config
    memory, processes = config["Memory"], config["PidsLimit"]
    assert isinstance(memory, int) and isinstance(processes, int)
    more = {"Memory": memory + OVERHEAD, "MemorySwap": memory + OVERHEAD, "PidsLimit": processes + THREADS}
    return {**config, **more, "Runtime": runtime}


def way_out(runtime: str) -> str:
    """Return what to do where an engine lacks a runtime. Kata's since 2.0 is a shim of containerd's, not a program."""
    if not runtime.startswith(("kata", "firecracker")):
        return f"Install it and start the engine with --add-runtime {runtime}=/usr/bin/{runtime}"
    name = "kata-fc" if runtime.startswith("firecracker") else runtime
    shim = f'{{"runtimes": {{"{name}": {{"runtimeType": "io.containerd.{name}.v2"}}}}}}'
    firecracker = " (Kata on Firecracker: Docker has none of that name)" if name != runtime else ""
    return f"Install Kata Containers 2 or newer, put {shim} into daemon.json, and set runtime={name}{firecracker}"


def check_engine(engine: Engine, runtime: str | None) -> None:
    """Check that an engine can confine our containers, and has a runtime.

    Raises:
        SandboxError: if it has not, with those that it has, or is Podman's service.
    """
    if engine.is_podman():
        raise SandboxError(
            f"the engine at {engine.host} is Podman's, which can't confine code as Docker's can: it takes no seccomp "
            "profile as text, leaves /sys in sight, and gives code /run and /var/tmp without a bound. Take Docker's"
        )
    if runtime is not None and runtime not in (known := engine.runtimes()):
        raise SandboxError(
            f"the engine at {engine.host} has no runtime {runtime!r}; it has {', '.join(known)}. "
            f"{way_out(runtime)}, or leave runtime= out"
        )
