"""`agent-rl sandbox doctor`: the guarantees of local sandboxes on this machine, with remedies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee
from agent_rl.sandboxes.local.backend import TIERS, LocalSandboxes, NoneWorksError

_CGROUP = (
    "a writable cgroup: run as root, under `systemd-run --user --scope -p Delegate=yes`, or, in a container, with "
    "/sys/fs/cgroup writable; or use docker"
)
TO_HAVE: Mapping[str, str] = {
    "jail": "allow user namespaces: by sysctl, user.max_user_namespaces above 0 and "
    "kernel.apparmor_restrict_unprivileged_userns=0; start a container with --security-opt seccomp=unconfined and "
    "--security-opt systempaths=unconfined",
    "landlock": "run Linux 6.12 or newer, with landlock in /sys/kernel/security/lsm; where root's interpreter can't be "
    "reached by others, run as another user, or give one that can: LocalSandboxes(python='/usr/bin/python3')",
}
"""What makes a kind of sandbox work."""
REFUSALS = (
    *("Operation not permitted", "Permission denied", "No space left", "Invalid argument", "Function not implemented"),
    *("Landlock", "another user", "need Linux", "does not start", "table of system calls"),
)
"""What the reason says where it is the machine that refuses."""
REMEDIES: Mapping[Guarantee, str] = {
    **dict.fromkeys(
        (Guarantee.FILES, Guarantee.NETWORK, Guarantee.SIGNALS, Guarantee.KILL_ALL),
        "allow user namespaces (sysctl user.max_user_namespaces), or Linux 6.12 with Landlock, or use docker",
    ),
    Guarantee.KERNEL: "a kernel with seccomp, on x86_64 or aarch64, or use docker",
    **dict.fromkeys((Guarantee.MEMORY, Guarantee.PROCESSES, Guarantee.CPU), _CGROUP),
    Guarantee.DISK: "allow user namespaces, so that sandboxes get file systems of a size of their own, or use docker",
}


def doctor(console: Console) -> int:
    """Print what is guaranteed; return 0 if all of it is, 1 if something is not."""
    kept = 0
    for tier in TIERS[:2]:
        found, reason = asyncio.run(_examine(tier))
        if found is None:
            advice = f"it is not needed: sandboxes here are of the kind {TIERS[0]}" if kept else remedy(tier, reason)
            console.print(f"{tier} does not work here: {reason}\n{advice}\n", highlight=False, markup=False)
            continue
        console.print(_table(tier, found))
        kept = max(kept, sum(mechanism is not None for mechanism in found.values()))
    if not kept:
        console.print("without them, use another backend, such as docker", highlight=False)
    return 0 if kept == len(Guarantee) else 1


def remedy(tier: str, reason: str) -> str:
    """Return what makes a kind of sandbox work, by the reason why it doesn't."""
    if any(sign in reason for sign in REFUSALS):
        return f"to have it, {TO_HAVE[tier]}"
    return "the kernel refuses nothing that it needs: this is a flaw of agent_rl's; report it with the text above"


async def _examine(tier: str) -> tuple[Capabilities | None, str]:
    sandboxes = LocalSandboxes(tier=tier, require=())
    try:
        return await sandboxes.capabilities(), ""
    except NoneWorksError as error:
        return None, "; ".join(error.refused.values())
    except SandboxError as error:
        return None, str(error)
    finally:
        await sandboxes.close()


def _table(tier: str, found: Capabilities) -> Table:
    table = Table(tier, "kept by", "what to do", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for guarantee in Guarantee:
        mechanism = found[guarantee]
        table.add_row(guarantee, mechanism or "[red]nothing[/red]", "" if mechanism else REMEDIES[guarantee])
    return table
