"""Where a model lies: a folder in Hugging Face's format, a name on its hub, or a GGUF file; found without torch."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from agent_rl.errors import CheckpointError, in_brief

ADAPTER, BASE = "adapter_config.json", "base"
"""The file that says what an adapter was trained on, and the folder beside the checkpoint that may hold it."""
CONFIG = "config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""What a name on the hub looks like: `organisation/model`."""
HUB_TIMEOUT = 10.0
"""Seconds that the hub has to answer."""
RESUME = "{mend}, and continue the run with agent-rl train resume=FOLDER"
"""The way out where a run can't write."""
_MENDS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give the rights to write there"),
    errno.EROFS: "let the file system be written to",
}
"""What to do first, by the system's error; about all others, make room."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""The system's error in one of safetensors'."""
REMEMBERED = 60.0
"""Seconds for which its answer holds: a run asks when its settings are checked, for its memory, and when it loads."""
_answers: dict[str, tuple[float, str]] = {}
"""When the hub was asked about a name, and the problem."""


def is_gguf(name: str | Path) -> bool:
    """Return whether a name is that of a GGUF file."""
    return str(name).endswith(".gguf")


def is_hub_id(name: str | Path) -> bool:
    """Return whether a name can only be one on the hub: it looks like one, and its first part is no folder here."""
    return bool(HUB_ID.fullmatch(str(name))) and not is_gguf(name) and not Path(name).parent.exists()


def load_options(name: str | Path) -> dict[str, str | bool]:
    """Return the arguments with which transformers' `from_pretrained` loads a model, its name or folder among them.

    The hub is asked whether it has the model; where it can't be reached, what was downloaded before serves.

    Raises:
        CheckpointError: if there is no such model, or what reads it is missing.
    """
    if is_gguf(name):
        file = Path(name)
        if not file.is_file():
            raise CheckpointError(f"no model in '{name}': there is no such file; give the path of a .gguf file")
        if find_spec("gguf") is None:
            raise CheckpointError(f"'{name}' is read by the package gguf: pip install 'agent-rl[gguf]'")
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    options: dict[str, str | bool] = {"pretrained_model_name_or_path": str(name)}
    if is_hub_id(name) and (problem := _hub_problem(str(name))):
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(str(name), CONFIG), str):
            raise CheckpointError(
                f"no model in '{name}': there is no such folder here, and as a name on Hugging Face's hub it can't be "
                f"had: {problem}"
            )
        options["local_files_only"] = True
    return options


def _hub_problem(name: str) -> str:
    """Return why a model can't be downloaded; nothing if it can."""
    asked, problem = _answers.get(name, (-math.inf, ""))
    if time.monotonic() - asked < REMEMBERED:
        return problem
    problem = _ask_hub(name)
    _answers[name] = time.monotonic(), problem
    return problem


def _ask_hub(name: str) -> str:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=HUB_TIMEOUT)  # without the five retries of a download
    except Exception as error:  # of the hub's client, of HTTP and of the network
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


def base_model(folder: str | Path) -> str | None:
    """Return the folder or name of the model that a folder's adapter was trained on; None if it holds no adapter.

    Raises:
        CheckpointError: if it doesn't say so, or that folder is gone.
    """
    file = Path(folder) / ADAPTER
    if not file.exists():
        return None
    try:
        name = str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: it names no base_model_name_or_path; take another one") from error
    moved = Path(folder).resolve().parent / BASE
    if Path(name).is_absolute() and not Path(name).exists():
        if not moved.exists():
            raise CheckpointError(
                f"the adapter in '{folder}' was trained on '{name}', which is gone: put that model back, or its new "
                f"place into base_model_name_or_path in {file}"
            )
        return str(moved)
    return name


def share_weights(folder: Path) -> None:
    """Give a folder's weights the rights that its other files have: safetensors lets only their owner read them."""
    for file in folder.glob("*.safetensors"):
        shutil.copymode(next(folder.glob("*config.json")), file)


def require_model(folder: str | Path) -> None:
    """Check that there is a model: in a folder, which may hold an adapter and name its model, on the hub or in a file.

    Raises:
        CheckpointError: if there is none, or its config.json can't be read.
    """
    if (base := base_model(folder)) is not None:
        folder = base
    load_options(folder)
    if is_gguf(folder) or is_hub_id(folder):
        return
    file = Path(folder) / CONFIG
    if not file.exists():
        raise CheckpointError(
            f"no model in '{folder}': it has no config.json; give the folder of a run's checkpoint or of a model in "
            "Hugging Face's format, a .gguf file, or a name on the hub such as org/model"
        )
    try:
        is_config = isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except ValueError:
        is_config = False
    if not is_config:
        raise CheckpointError(f"{file} is damaged: it is no JSON object; take another checkpoint")


@contextmanager
def written(path: Path, way_out: str = RESUME) -> Iterator[None]:
    """Remove a model or a state that can't be written, and say why: torch and safetensors name no full disk.

    Args:
        path: the file or folder.
        way_out: with `{mend}` where it says what to do first.

    Raises:
        CheckpointError: with what they said, the space that is left unless something else is wrong, and the way out.
    """
    try:
        yield
    except Exception as error:
        found = _OS_ERROR.search(str(error))
        number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        mend, room = _MENDS.get(number or 0), ""
        if isinstance(error, TypeError | ValueError | LookupError | AttributeError):
            mend = "mend what it says"  # of the model or its settings, not of the disk
        if mend is None:
            free = shutil.disk_usage(next(filter(Path.exists, path.parents))).free >> 20
            mend, room = "make room", f" with {free} MiB free"
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} can't be written{room}, {type(error).__name__}: {in_brief(error)}; what was written before is "
            f"whole: {way_out.format(mend=mend)}"
        ) from error
