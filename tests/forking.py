"""A server that forks processes which have imported what they need."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest


def fork_server(*modules: str) -> ForkServerContext:
    """Return a context of processes that begin with modules imported; in one process, the first call's modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    with pytest.MonkeyPatch.context() as patch:  # without our path the server imports nothing, and says nothing
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context
