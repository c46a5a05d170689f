"""What the command line prints about an exception: at most three lines."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

from agent_rl.errors import AgentRLError

LONGEST = 1000
"""Characters of a message."""
_ELSEWHERE = "write elsewhere with runs_dir=FOLDER or out=FILE"
_RESUMED_ELSEWHERE = "copy the folder elsewhere, and resume the copy"
"""Of what is resumed, which takes neither of these settings."""
_REMEDIES = {
    errno.ENOSPC: "free some space, or {elsewhere}",
    errno.EDQUOT: "free some space, or {elsewhere}",
    errno.EACCES: "give the rights, or {elsewhere}",
    errno.EROFS: "{elsewhere}",
    errno.ENOTDIR: "a part of the path is a file: name a folder",
    errno.EISDIR: "name a file",
    errno.EEXIST: "a file has this name: choose another",
    errno.ENOENT: "check the path",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def describe(error: BaseException, *, resumes: bool = False) -> str:
    """Return what went wrong and the way out; `--traceback` is named for what is no mistake of the command line.

    Args:
        error: what was raised.
        resumes: whether the command continues a run or a rollout.
    """
    if isinstance(error, AgentRLError):
        return _short(str(error))
    if isinstance(error, ModuleNotFoundError) and not f"{error.name}.".startswith("agent_rl."):
        return f"no module '{error.name}': pip install it; torch and all that training needs: pip install -e '.[train]'"
    if isinstance(error, FileNotFoundError) and _is_cwd_gone():
        return "the working directory is no longer there: cd to one that is, or into the new one of its name"
    if isinstance(error, OSError) and error.strerror:
        remedy = _REMEDIES.get(error.errno or 0, "--traceback shows where")
        remedy = remedy.format(elsewhere=_RESUMED_ELSEWHERE if resumes else _ELSEWHERE)
        return _short(f"{error.filename or 'a file'}: {error.strerror}; {remedy}")
    said = _short(f"{type(error).__name__}: {error}".rstrip(": "), lines=1)
    return (
        f"{said} ({_place(error)})\nUnless that file is yours, it is a defect of agent-rl; --traceback shows all of it."
    )


def _is_cwd_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _short(message: str, lines: int = 3) -> str:
    kept = [line.rstrip() for line in message.splitlines() if line.strip()][:lines]
    text = "\n".join(kept)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "no place known"
