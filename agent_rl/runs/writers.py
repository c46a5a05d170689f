"""Writers: the rows of metrics.jsonl, sent on to TensorBoard, Weights & Biases or trackio.

Each writer is a function over rows; the file stays the truth. One that can't be opened, or fails later, is left out
from then on with one warning, and never ends the run: a curve is not worth a training.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from rich.markup import escape

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError
from agent_rl.runs.folder import warn

T = TypeVar("T")
WriterName: TypeAlias = Literal["tensorboard", "wandb", "trackio"]
Values: TypeAlias = Mapping[str, float]
Write: TypeAlias = Callable[[str, int, Values], object]
"""Takes the group that a row's curves are in, such as `train` or `eval/test/greedy`, its step, and its numbers by their
full names."""
PROJECT = "agent_rl"
"""What runs are filed under, unless the package's own environment variable says otherwise."""
SENT = "sent_metrics.json"
"""The last step that each of a run's writers has of each group: what it takes again after a kill is in their curves."""
LOGIN_SECONDS = 60
"""How long Weights & Biases may wait for somebody to log in at the terminal."""


def require_writers(names: Sequence[WriterName]) -> None:
    """Check that the packages are there, without importing them.

    Raises:
        ConfigError: if one is not.
    """
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"report_to={name} needs the package {name}: pip install 'agent-rl[writers]'")


class Writers:
    """The open writers of one run."""

    def __init__(
        self, names: Sequence[WriterName], folder: Path, settings: Mapping[str, JSON], say: Callable[[str], object]
    ) -> None:
        """Open writers; some show `settings` beside the curves, `say` prints what fails, with rich's markup."""
        self._folder, self._say = folder, say
        self._open: dict[WriterName, tuple[Write, ExitStack]] = {}
        for name in dict.fromkeys(names):
            stack = ExitStack()
            if write := self._tried(name, partial(stack.enter_context, _OPEN[name](folder, settings))):
                self._open[name] = write, stack
        self._sent = _sent_before(folder / SENT)

    def write(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        """Send a row's finite numbers to each writer whose curves are not beyond its step."""
        group = "/".join([kind, *(str(values[k]) for k in ("split", "sampling") if k in values)])
        if not self._open:
            return
        numbers = {
            name if kind == "train" else f"{group}/{name}": float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for name, (write, _) in list(self._open.items()):
            had = self._sent.get(group, -1)  # of all writers, in the file of an older version
            if step > self._sent.get(key := f"{name} {group}", had):
                self._tried(name, partial(write, group, step, numbers))
                if name in self._open:
                    self._sent[key] = step
        with suppress(OSError):  # a full disk doubles a point, at worst
            (self._folder / SENT).write_text(json.dumps(self._sent), encoding="utf-8")

    def close(self) -> None:
        """Finish what was begun."""
        for name, (_, stack) in list(self._open.items()):
            self._tried(name, stack.close)

    def _tried(self, name: WriterName, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception as error:  # of networks, accounts, disks and three packages
            self._open.pop(name, None)
            said = (str(error).strip().splitlines() or [""])[0][:200]
            failed = f"{name} gets no more metrics, {type(error).__name__}: {said}; metrics.jsonl has them all"
            warn(self._folder, failed, lambda text: self._say(escape(text)))
            return None


def _sent_before(file: Path) -> dict[str, int]:
    try:
        return {str(group): int(step) for group, step in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):  # none, or torn by a kill
        return {}


@contextmanager
def _tensorboard(folder: Path, config: Mapping[str, JSON]) -> Iterator[Write]:
    """Write event files into the folder's `tensorboard`; a resumed run adds one."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    events = EventFileWriter(str(folder / "tensorboard"))

    def write(group: str, step: int, values: Values) -> None:
        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=found)))
        events.flush()  # a kill loses nothing that metrics.jsonl has

    try:
        yield write
    finally:
        events.close()


@contextmanager
def _wandb(folder: Path, config: Mapping[str, JSON]) -> Iterator[Write]:
    """Log to a run of Weights & Biases whose id is kept in the folder, so that a resumed run continues its curves.

    Steps are a metric of each group: one number for all would have to grow with every row, and the warm start's and the
    training's both begin at 0.
    """
    import wandb

    file = folder / "wandb_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", folder.name),
        id=file.read_text(encoding="utf-8").strip(),
        resume="allow",
        dir=str(folder),
        config=dict(config),
        settings=wandb.Settings(console="off", login_timeout=LOGIN_SECONDS),
    )
    known = set[str]()

    def write(group: str, step: int, values: Values) -> None:
        axis = f"{group}/step"
        for name in values.keys() - known:
            run.define_metric(name, step_metric=axis)
        known.update(values)
        run.log({axis: step, **values})

    try:
        yield write
    finally:
        run.finish()


@contextmanager
def _trackio(folder: Path, config: Mapping[str, JSON]) -> Iterator[Write]:
    """Log to trackio's database under the folder's name; a resumed run continues the same one."""
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(project=project, name=folder.name, resume="allow", config=dict(config), embed=False)
    try:
        yield lambda group, step, values: run.log(dict(values), step=step)
    finally:
        trackio.finish()


_OPEN: Mapping[WriterName, Callable[[Path, Mapping[str, JSON]], AbstractContextManager[Write]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
