"""Sandboxes of this machine: a zygote forks jails of namespaces, seccomp and cgroups, or Landlock domains.

Apart from `backend`, `lease` and `packages`, stdlib only, with relative imports only, like `agent`: the zygote loads
these files without agent_rl.
"""

from agent_rl.sandboxes.local.backend import LocalSandboxes

__all__ = ["LocalSandboxes"]
