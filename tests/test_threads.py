"""How many threads torch gets, and how they wait."""

import os

import pytest
import torch

from agent_rl.cli import main
from agent_rl.engines.embedded.threads import ONE_THREAD, threads_restored, use_threads


def _model(parameters: int) -> torch.nn.Module:
    return torch.nn.Linear(parameters, 1, bias=False, device="meta")


@pytest.mark.parametrize(
    ("parameters", "wanted", "expected"), [(ONE_THREAD - 1, 0, 1), (ONE_THREAD, 0, 3), (8, 2, 2), (ONE_THREAD, 2, 2)]
)
def test_use_threads_goes_by_size_of_model(parameters: int, wanted: int, expected: int) -> None:
    with threads_restored():
        torch.set_num_threads(3)
        assert use_threads(_model(parameters), wanted) == torch.get_num_threads() == expected


def test_threads_are_restored_after_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), threads_restored():
        use_threads(_model(8), before + 1)
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_command_line_lets_threads_sleep_unless_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, expected in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", given)
        with pytest.raises(SystemExit):
            main(["--version"])
        assert os.environ["OMP_WAIT_POLICY"] == expected
