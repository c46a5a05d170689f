"""Checkpoints that a kill cuts short: what is found afterwards is whole, and never older than what was found before."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoTokenizer

from agent_rl.backends.embedded import checkpoint, warm_checkpoint
from agent_rl.backends.embedded.checkpoint import STATE, _replaced, find_checkpoint
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.stages import WARM
from agent_rl.engines.model_files import written
from agent_rl.errors import CheckpointError
from agent_rl.rendering import train_tokenizer
from agent_rl.runs.folder import CONFIG, save_config
from agent_rl.view.progress import Progress
from tests.runs import assert_same_run, config

FILES = (STATE, "model.safetensors")
NEVER = 12
"""More changes of the disk than a checkpoint takes."""


class Killed(BaseException):
    """Nothing that anybody catches."""


class Disk:
    """Dies before its change number `dies_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda one, other: self.change() or rename(one, other))
        monkeypatch.setattr(checkpoint.shutil, "rmtree", self.remove)
        monkeypatch.setattr(checkpoint, "sync", lambda file: None)  # it takes most of the time

    def change(self) -> None:
        self.changes += 1
        if self.changes == self.dies_at:
            raise Killed

    def remove(self, folder: Path, ignore_errors: bool) -> None:
        for file in folder.iterdir() if folder.exists() else ():
            self.change()
            file.unlink()
        if folder.exists():
            folder.rmdir()

    def save(self, folder: Path, text: str, dies_at: int) -> bool:
        """Write a checkpoint; return whether that came to its end."""
        self.dies_at, self.changes = dies_at, 0
        try:
            with _replaced(folder) as new:
                new.mkdir()
                for name in FILES:
                    self.change()
                    (new / name).write_text(text)
        except Killed:
            return False
        return True


def found(folder: Path) -> int:
    """Return what a whole checkpoint says; 0 if there is none."""
    try:
        (text,) = {(find_checkpoint(folder) / name).read_text() for name in FILES}
    except CheckpointError:
        return 0
    return int(text)


def test_checkpoint_survives_kills_between_any_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        for kills in product((2, NEVER), range(1, 8), range(1, NEVER + 1)):
            folder, known = tmp_path / "-".join(map(str, kills)) / "checkpoint", 0
            folder.parent.mkdir()
            for text, dies_at in enumerate(kills, 1):
                ended = disk.save(folder, str(text), dies_at)
                assert known <= found(folder) <= text and disk.changes < NEVER, kills
                assert not ended or found(folder) == text, kills
                known = found(folder)
            assert disk.save(folder, "9", 0) and [p.name for p in folder.parent.iterdir()] == ["checkpoint"]


@contextmanager
def full(size: int = 4096) -> Iterator[None]:
    """Let no file grow beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_checkpoint_that_does_not_fit_keeps_the_one_before(tmp_path: Path, save: Callable[..., object]) -> None:
    folder = tmp_path / "checkpoint"
    for size in (9, 9999):
        fails = pytest.raises(CheckpointError, match=r"checkpoint\.new can't be written with \d+ MiB free, .*resume=")
        with full(), fails if size > 9 else nullcontext(), _replaced(folder) as new:
            new.mkdir()
            save({"a": torch.zeros(size)}, new / STATE)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]
    assert (find_checkpoint(folder) / STATE).stat().st_size < 4096


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "give the rights to write there, and continue the run"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), "give the rights to write there, and continue"),
        (OSError(errno.EROFS, "Read-only file system"), "let the file system be written to, and continue the run"),
        (OSError(errno.ENOSPC, "No space left on device"), "make room, and continue the run"),
        (ValueError("GenerationConfig is invalid"), "mend what it says, and continue the run"),
    ],
)
def test_written_names_the_way_out_of_the_error(error: Exception, way_out: str, tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=f"model can't be written.*: {way_out}") as raised,
        written(tmp_path / "model"),
    ):
        raise error
    assert ("MiB free" in str(raised.value)) == ("make room" in way_out)


def test_settings_that_do_not_fit_keep_those_before(tmp_path: Path) -> None:
    save_config(tmp_path, config(tmp_path))
    before = (tmp_path / CONFIG).read_bytes()
    with full(1024), pytest.raises(OSError, match="too large"):
        save_config(tmp_path, config(tmp_path, steps=9))
    assert (tmp_path / CONFIG).read_bytes() == before


def test_checkpoint_keeps_a_tokenizer_of_several_chat_templates(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some words"], 432)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    with _replaced(tmp_path / "checkpoint") as new:
        tokenizer.save_pretrained(new)
    again = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.sandbox
def test_run_resumes_where_its_first_checkpoint_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path, steps=1, eval={"n": 4, "dev_n": 4, "every": 0})
    whole, save = start_run(settings.model_copy(update={"name": "whole"}), Progress()).resolve(), torch.save

    def cut(value: object, file: Path) -> None:
        save(value, file)
        if file.name == STATE:
            shutil.copyfile("/dev/null", file)
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(warm_checkpoint, "SAVE_S", 0.0)
        patched.setattr(torch, "save", cut)
        start_run(settings, Progress())
    folder = (tmp_path / "runs" / "latest").resolve()
    assert (folder / WARM).exists() and (folder / "checkpoint.new" / STATE).exists()
    assert_same_run(resume_run(folder, Progress()), whole)
