"""The processes inside a sandbox: the agent and the Python worker, and their protocol.

Stdlib only, with relative imports only, so that these files run in any interpreter that can see them, under whatever
name their parent package has there: a jail's zygote and a container's entry point load them without agent_rl.
"""
