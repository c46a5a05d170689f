"""A graded function's call, as a program: `grading` runs this text by `python3 -c` beside the graded files.

It answers on the descriptor that was stdout, so that nothing that the function prints is part of the answer.
"""

import importlib
import json
import os
import sys


def main() -> None:
    """Read a module, a function and its arguments from stdin; write what it returns, as JSON."""
    out = os.dup(1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109
    function = getattr(importlib.import_module(request["module"]), request["function"])
    value = function(*request["args"])
    os.write(out, json.dumps(value).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
