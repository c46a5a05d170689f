"""What makes a sandbox of a Linux process: namespaces, Landlock, seccomp, cgroups, and the zygote that forks them.

Stdlib only, with relative imports only, like `inside`: the zygote loads these files without agent_rl.
"""
