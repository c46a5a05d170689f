"""Progress of a training run: a live display on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import io
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agent_rl.core.display import plural

_BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_EVERY = 5
"""Training steps between two plain lines."""
PLAIN_SECONDS = 10.0
"""Seconds between two plain lines of a phase."""


def sparkline(values: list[float], width: int = 40) -> str:
    """Return values in [0, 1] as a row of blocks, the last `width` of them."""
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(max(0.0, v) * len(_BLOCKS)))] for v in values[-width:])


def trend(values: list[float], window: int = 5) -> float | None:
    """Return how much the mean of the last `window` values lies above that of the `window` before, if all are known."""
    if len(values) < 2 * window or any(map(math.isnan, values[-2 * window :])):
        return None
    return sum(values[-window:]) / window - sum(values[-2 * window : -window]) / window


class Screen(Console):
    """A console that raises a `BrokenPipeError` as it is, where rich ends the process."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise


class _NotebookLive:
    """What `Progress` needs of rich's `Live`, in a notebook, where that one would need ipywidgets."""

    def start(self) -> None:
        """Make room for the display below the cell."""
        from IPython.display import HTML, display

        self._handle = display(HTML(), display_id=True)

    def update(self, renderable: RenderableType, *, refresh: bool = True) -> None:
        """Show something in place of what was shown."""
        from IPython.display import HTML

        console = Console(record=True, file=io.StringIO(), width=100, force_jupyter=False)
        console.print(renderable)
        code = '<pre style="line-height: 1.2">{code}</pre>'
        self._handle.update(HTML(console.export_html(inline_styles=True, code_format=code)))

    def stop(self) -> None:
        """Leave the display as it is."""


class Progress:
    """Shows one thing at a time; use it as a context manager.

    Where nobody reads what it shows any more (a pipe, a terminal or a disk is gone), the work goes on without it.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = self.console = console or Screen()
        self._live: Live | _NotebookLive | None = None
        if not console.quiet and (console.is_jupyter or console.is_terminal):
            self._live = _NotebookLive() if console.is_jupyter else Live(console=console, refresh_per_second=4)
        self._success: list[float] = []
        self._speed: deque[float] = deque(maxlen=5)
        self._started = time.monotonic()
        self._last_line = 0.0

    def __enter__(self) -> Progress:
        with self._shown():
            if self._live:
                self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._shown():
            if self._live:
                self._live.update(Text())
                self._live.stop()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.console.quiet, self._live = True, None
            with suppress(OSError):  # of a terminal that is gone
                print(f"the output can't be written any more ({error}); the work goes on without it", file=sys.stderr)

    def say(self, text: str) -> None:
        """Print a line that stays; rich markup works."""
        with self._shown():
            self.console.print(text, highlight=False, soft_wrap=True)

    def phase(self, name: str, step: int, of: int, detail: str) -> None:
        """Show how far a phase is; `step` counts from 0."""
        now = time.monotonic()
        if self._live:
            grid = Table.grid(padding=(0, 2))
            grid.add_row(Text(name, style="bold"), ProgressBar(of, step + 1, width=40), Text(detail))
            with self._shown():
                self._live.update(grid)
        elif now - self._last_line >= PLAIN_SECONDS or step + 1 == of:
            self._last_line = now
            self.say(f"  {escape(name)} {step + 1}/{of}  {escape(detail)}")

    def train_step(self, step: int, of: int, metrics: Mapping[str, float], dev: str) -> None:
        """Show a finished training step; `step` counts from 1."""
        # a step on stored episodes has no rollouts; one whose groups all agree has nothing to train on
        shown = self._rollout(metrics) if "rollout/success" in metrics else {}
        if "rewards/margins" in metrics:
            right = f"{metrics['rewards/accuracies']:6.1%} of {metrics['train/pairs']:.0f} the right way round"
            shown["pairs"] = f"{right}, margin {metrics['rewards/margins']:.2f}"
        elif not shown and "train/loss" in metrics:
            shown["cloned"] = f"{plural(round(metrics['train/samples']), 'row')}, loss {metrics['train/loss']:.3f}"
        shown["entropy"] = f"{metrics['train/entropy']:6.3f} nats" if "train/entropy" in metrics else ""
        shown["held out"] = dev
        if self._live:
            with self._shown():
                self._live.update(self._panel(step, of, shown), refresh=True)
        elif step % PLAIN_EVERY == 0 or step in (1, of):
            line = "  ".join(f"{name} {' '.join(value.split())}" for name, value in shown.items() if value)
            self.say(f"  step {step}/{of}  {escape(line)}")

    def _rollout(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """What the step's own episodes say."""
        self._success.append(metrics["rollout/success"])
        self._speed.append(metrics["perf/sampled_tokens_per_s"])
        rise = trend(self._success)
        arrow = "" if rise is None else f"{'▲' if rise >= 0 else '▼'} {abs(100 * rise):.0f} points in 5 steps"
        success = metrics["rollout/success"]
        return {
            "success": "unknown" if math.isnan(success) else f"{success:6.1%}  {arrow}",
            "reward": f"{metrics['rollout/reward']:6.3f}",
            "speed": f"{sum(self._speed) / len(self._speed):6.0f} sampled tokens/s",
            "per episode": f"{metrics['rollout/turns']:.2f} turns, {metrics['rollout/tool_calls']:.2f} tool calls, "
            f"{metrics['rollout/tool_errors']:.2f} tool errors",
        }

    def _panel(self, step: int, of: int, shown: Mapping[str, str]) -> Group:
        head = Table.grid(padding=(0, 2))
        spent = time.monotonic() - self._started
        head.add_row(Text(f"step {step}/{of}", style="bold"), ProgressBar(of, step, width=40), Text(f"{spent:.0f} s"))
        body = Table.grid(padding=(0, 2))
        for name, value in shown.items():
            body.add_row(Text(name, style="dim"), Text(value))
        return Group(head, body, Text(sparkline(self._success), style="green"))
