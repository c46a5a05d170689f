"""Figures that code leaves open come back as PNG files: few, small, and nothing that only says it is one."""

from __future__ import annotations

import struct

import pytest

from agent_rl.core.images import Image
from agent_rl.sandboxes.agent.frames import FrameError
from agent_rl.sandboxes.agent.plots import MAX_PLOTS, MOST, answer_from_body, answer_to_body
from agent_rl.sandboxes.calls import PythonResult
from agent_rl.tools.python import described

STAND_IN = r"""
import struct
open_figures = {}
class Figure:
    def __init__(self, width, height, extra):
        self.head, self.extra = struct.pack(">II", width, height), extra
    def savefig(self, file, format):
        assert format == "png"
        file.write(b"\x89PNG\r\n\x1a\n" + bytes(4) + b"IHDR" + self.head + bytes(self.extra))
def draw(width=640, height=480, extra=0):
    open_figures[len(open_figures) + 1] = Figure(width, height, extra)
def get_fignums():
    return list(open_figures)
def figure(number):
    return open_figures[number]
def close(which):
    assert which == "all"
    open_figures.clear()
"""


@pytest.fixture
def drawing(backend, box, run):
    """A sandbox with a stand-in for matplotlib."""
    if backend.name == "e2b-jupyter":
        pytest.skip("plots are not taken out of E2B's Jupyter kernel")
    run(box.write_file("matplotlib/__init__.py", b""))
    run(box.write_file("matplotlib/pyplot.py", STAND_IN.encode()))
    return box


def test_open_figures_come_back_as_plots(drawing, run):
    result = run(drawing.run_python("import matplotlib.pyplot as plt; plt.draw(); plt.draw(320, 200); 'drawn'"))
    assert [Image(plot).size for plot in result.plots] == [(640, 480), (320, 200)]
    assert described(result) == "'drawn'\n[plot 1: 640x480 png]\n[plot 2: 320x200 png]"
    assert run(drawing.run_python("plt.draw(); raise ValueError('after it')")).plots != ()
    assert run(drawing.run_python("'closed'")).plots == ()


def test_plots_are_bounded_in_number_and_bytes(drawing, run):
    result = run(drawing.run_python("import matplotlib.pyplot as plt\nfor _ in range(9): plt.draw()"))
    assert len(result.plots) == MOST and "plots left out" in result.stderr
    result = run(drawing.run_python(f"plt.draw(extra={MAX_PLOTS}); plt.draw(extra=9)"))
    assert [len(plot) for plot in result.plots] == [33] and "plot left out" in result.stderr
    assert run(drawing.run_python("plt.draw(extra=10**9)")).plots == ()
    assert run(drawing.run_python("plt.get_fignums()")).value == "[]"


@pytest.mark.parametrize("size", [(0, 5), (4097, 5), (2**31, 2**31)])
def test_plots_of_too_many_pixels_are_dropped(size, drawing, run):
    code = f"import matplotlib.pyplot as plt; plt.draw(*{size}); plt.draw()"
    assert [Image(plot).size for plot in run(drawing.run_python(code)).plots] == [(640, 480)]


def test_plots_of_hostile_figures_are_no_way_out(drawing, run):
    hostile = "plt.Figure.savefig = lambda *_, **__: exec('raise SystemExit')"
    result = run(drawing.run_python(f"import matplotlib.pyplot as plt; plt.draw()\n{hostile}\n7"))
    assert (result.value, result.plots, result.state_lost) == ("7", (), False) and "SystemExit" in result.stderr
    result = run(drawing.run_python("plt.Figure.savefig = lambda *_, **__: iter(int, 1).__class__\nplt.draw(); 8"))
    assert (result.value, result.plots) == ("8", ())


def test_code_without_matplotlib_imports_none(box, run):
    assert run(box.run_python("import os, sys; 'matplotlib' in sys.modules, os.environ.get('MPLBACKEND')")).value in (
        "(False, 'Agg')",
        "(False, None)",  # in a kernel of E2B's
    )


@pytest.mark.parametrize("sizes", [[1] * (MOST + 1), [-1], [3], ["1"], [True], 7, {"a": 1}, [MAX_PLOTS + 1], [2**70]])
def test_answer_with_impossible_plots_is_refused(sizes):
    with pytest.raises(FrameError, match="plots="):
        answer_from_body({"value": None, "error": None, "plots": sizes}, b"xx")


def test_answer_carries_plots_beside_output_and_texts():
    head = {"value": "é", "error": None}
    packed = answer_to_body(head, b"output", [b"one", b"", b"three"])
    assert answer_from_body(*packed) == ({**head, "plots": [b"one", b"", b"three"]}, b"output")


def test_described_counts_plots_after_the_text():
    plot = b"\x89PNG\r\n\x1a\n" + bytes(4) + b"IHDR" + struct.pack(">II", 2, 3)
    assert described(PythonResult("said\n", "", plots=(plot,))) == "said\n[plot 1: 2x3 png]"
