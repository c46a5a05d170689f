"""`ar.train` in a notebook: a kernel whose event loop is running."""

import json
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree import ROOT

from tests.runs import SMALL

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")


class Kernel:
    """A running kernel, and the outputs of one cell at a time."""

    def __init__(self, manager: "jupyter_client.KernelManager") -> None:
        self.manager, self.client = manager, manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, interrupt_at: str | None = None) -> list[dict[str, object]]:
        """Run a cell and return its outputs; interrupt it when an output has a text."""
        self.client.execute(code)
        outputs = []
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=120)
            except queue.Empty:
                pytest.fail(f"the cell did not end: {outputs[-3:]}")
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return outputs
            if kind in ("stream", "display_data", "update_display_data", "error"):
                outputs.append({"kind": kind, **content})
                if interrupt_at is not None and interrupt_at in json.dumps(content):
                    self.manager.interrupt_kernel()
                    interrupt_at = None


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT))
    try:
        kernel = Kernel(manager)
        yield kernel
        kernel.client.stop_channels()
    finally:
        manager.shutdown_kernel(now=True)
        manager.context.destroy()


def settings(tmp_path: Path, **changes: object) -> str:
    return repr(SMALL | {"runs_dir": str(tmp_path)} | changes)


@pytest.mark.sandbox
def test_train_in_a_notebook_shows_its_progress(kernel: Kernel, tmp_path: Path) -> None:
    code = (
        f"import agent_rl as ar\nrun = ar.train(**{settings(tmp_path)})\nprint(len(run.metrics), run.folder.exists())"
    )
    outputs = kernel.run(code)
    assert not [o for o in outputs if o["kind"] == "error"], outputs[-1]
    shown = [json.dumps(o["data"]) for o in outputs if o["kind"] == "update_display_data"]
    assert any("step 4/4" in text for text in shown) and any("cloning" in text for text in shown)
    assert any("Evaluation before RL" in json.dumps(o) for o in outputs)
    assert "True" in str(outputs[-1])


def test_environment_of_a_notebook_can_be_defined_again(kernel: Kernel) -> None:
    """A change of the class's name, too."""
    cell = "import agent_rl as ar\n@ar.register('mine-v0')\nclass {}(ar.Env):\n    pass\n"
    assert kernel.run(cell.format("Mine")) == []
    (said,) = kernel.run(cell.format("Renamed"))
    assert said["text"] == "environment 'mine-v0' is replaced by the Renamed just defined\n"


@pytest.mark.sandbox
def test_interrupt_in_a_notebook_stops_after_the_step(kernel: Kernel, tmp_path: Path) -> None:
    chosen = settings(tmp_path, steps=400, eval={"n": 4, "dev_n": 2, "every": 0})
    outputs = kernel.run(f"import agent_rl as ar\nrun = ar.train(**{chosen})", interrupt_at="step 2/400")
    (error,) = (o for o in outputs if o["kind"] == "error")
    assert error["ename"] == "Interrupted" and "continue with: agent-rl train resume=" in str(error["evalue"])
    folder = (tmp_path / "latest").resolve()
    again = kernel.run(f"run = ar.train(resume={str(folder)!r}, steps=5, progress=False)\nprint(run.summary['steps'])")
    assert [o["kind"] for o in again] == ["stream"] and "5" in str(again[0]["text"])
