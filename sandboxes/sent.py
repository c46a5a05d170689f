"""The agent, sent to where it runs: an entry point that reads its source from stdin.

So any container or microVM that has a python3 will do, and the agent there is always of our own version.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from agent_rl.sandboxes import inside
from agent_rl.sandboxes.base import WORK

ENTRY = """\
import ctypes, importlib.util, json, os, pwd, signal, struct, sys

def take(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit("the host is gone")
    return data

class Sent:
    def find_spec(self, name, path=None, target=None):
        if name in sources:
            return importlib.util.spec_from_loader(name, self, is_package="." not in name)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(sources[module.__name__], module.__name__, "exec"), module.__dict__)

def confine():
    if user:
        entry = pwd.getpwnam(user)
        os.setgroups([])
        os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
        os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
        ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # no_new_privs: sudo gives nothing

home, user, lifetime, sources = json.loads(take(*struct.unpack(">I", take(4))))
sys.meta_path.append(Sent())
from inside.agent import Agent
requests, replies, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1)
agent = Agent(requests, replies, home=home, confine=confine)
signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, lifetime)
agent.serve()
"""
"""For `python3 -c`; the agent ends when its stdin does, and when its lifetime is over."""


def greeting(lifetime: float, user: str = "") -> bytes:
    """Return what `ENTRY` reads first: the agent's source, and how it shall live.

    Args:
        lifetime: seconds until it ends.
        user: who runs the code, if not the agent's own user.
    """
    files = Path(inside.__file__).parent.glob("*.py")
    sources = {f"inside.{file.stem}".removesuffix(".__init__"): file.read_text() for file in files}
    text = json.dumps((WORK, user, lifetime, sources)).encode()
    return struct.pack(">I", len(text)) + text
