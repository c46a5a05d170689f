"""The zygote's entry point: run as a file, it loads these folders without agent_rl, which would import much more."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    del sys.path[0]  # this folder: what is in it is no library
    here = Path(__file__).parent
    for name, folder in (("sandboxes", here.parent), ("sandboxes.local", here)):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(folder)]
    importlib.import_module("sandboxes.local.zygote").main()
