"""Figures that code left open, as PNG files: taken in the interpreter, and carried in its answer beside the texts.

An answer's body is `plots | output, where there is any | texts`, with their lengths in the head.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from .frames import FrameError, Head, texts_from_body, texts_to_body

MOST = 4
"""Plots of a call, at most."""
MAX_PLOTS = 1024 * 1024
"""Bytes of all plots of a call, at most."""
TEXTS = ("value", "error")
"""Of an answer."""


def take() -> list[bytes]:
    """Return the figures of matplotlib that are open, and close them; say on stderr which are left out.

    Where nothing has imported matplotlib, there are none.
    """
    pyplot = sys.modules.get("matplotlib.pyplot")
    plots: list[bytes] = []
    if pyplot is None:
        return plots
    try:
        _save(pyplot, plots)
    except BaseException as error:  # of foreign code, as all that is called here may be, `print` included
        with contextlib.suppress(BaseException):
            print(f"[plot left out: {type(error).__name__}]", file=sys.stderr)
    with contextlib.suppress(BaseException):
        pyplot.close("all")
    return plots


def _save(pyplot: Any, plots: list[bytes]) -> None:
    for count, number in enumerate(pyplot.get_fignums(), 1):
        if count > MOST:
            print(f"[plots left out: a call returns {MOST} at most]", file=sys.stderr)
            break
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png")
        size = len(file.getvalue())
        if sum(map(len, plots)) + size > MAX_PLOTS:
            print(f"[plot left out: {size} bytes; a call returns {MAX_PLOTS} at most]", file=sys.stderr)
        else:
            plots.append(file.getvalue())


def answer_to_body(head: Head, body: bytes, plots: list[bytes]) -> tuple[Head, bytes]:
    """Move an answer's texts into its body, and the plots; their lengths are in the head."""
    return texts_to_body({**head, "plots": [len(plot) for plot in plots]}, b"".join((*plots, body)), TEXTS)


def answer_from_body(head: Head, body: bytes) -> tuple[Head, bytes]:
    """Undo `answer_to_body`: `plots` of the head are then their bytes, which anybody may have made.

    Raises:
        FrameError: if the body is too short for what the head says, or that is more than any answer has.
    """
    head, body = texts_from_body(head, body, TEXTS)
    sizes = head.get("plots", [])
    if not isinstance(sizes, list) or len(sizes) > MOST or not all(type(n) is int and n >= 0 for n in sizes):
        raise FrameError(f"an answer has plots={sizes!r:.100}")
    if sum(sizes) > min(len(body), MAX_PLOTS):
        raise FrameError(f"an answer of {len(body)} bytes has plots={sizes!r:.100}")
    plots = []
    for size in sizes:
        plots.append(body[:size])
        body = body[size:]
    return {**head, "plots": plots}, body
