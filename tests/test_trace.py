"""The functions that one update enters: the reading list for plain GRPO."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import pytest

from agent_rl.algorithms import Experience
from agent_rl.backends.embedded.run import start_run
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.view.progress import Progress
from tests.runs import config
from tests.tree import ROOT

OFF = ("critic", "value.py", "routes.py", "balance.py", "agreement.py", "sequence.py", "pairwise.py", "corrections.py")
"""Files of features that plain GRPO does not have."""


def entered(call: Callable[[], object]) -> set[tuple[str, str]]:
    """Return the file and name of every function of ours that a call enters."""
    seen: set[tuple[str, str]] = set()
    ours = str(ROOT / "agent_rl")

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ours) and not code.co_qualname.endswith(">"):
            seen.add((code.co_filename.removeprefix(ours), code.co_qualname))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_grpo_update_enters_few_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, updates = Trainer.update, list[set[tuple[str, str]]]()

    def traced(self: Trainer, x: Experience, hot: Sequence[int]) -> dict[str, float]:
        result: list[dict[str, float]] = []
        updates.append(entered(lambda: result.append(real(self, x, hot))))
        return result[0]

    monkeypatch.setattr(Trainer, "update", traced)
    start_run(config(tmp_path, steps=4), Progress())
    seen = {place for place in max(updates, key=len) if "test_" not in place[1]}
    files = {file for file, _ in seen}
    print(len(seen), "functions in", len(files), "files:", *sorted(seen), sep="\n")
    assert any(name == "Trainer._accumulate" for _, name in seen), "no update had anything to learn"
    # 13 and a file for common tokens, 1 and a file for processes, 20 and five files for flat rows and mini-batches, a
    # file for the loss of a micro-batch, 1 for the step's temperature, a file for what the rows score before the update
    assert len(seen) <= 86 and len(files) <= 23
    assert not [file for file in files if any(part in file for part in OFF)]
