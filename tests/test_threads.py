"""How many threads torch gets, how they wait, and what else of torch is the whole process's."""

import os

import pytest
import torch

from agent_rl.cli import main
from agent_rl.engines.embedded.threads import ONE_THREAD, threads_restored, torch_as_it_starts, use_threads


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


def test_torch_of_a_notebook_changes_no_run_nor_is_changed() -> None:
    def found() -> tuple[torch.dtype, str, bool]:
        made = torch.tensor([0.1], requires_grad=True) * 1.0
        return made.dtype, made.device.type, made.requires_grad

    threads = torch.get_num_threads()
    with threads_restored(), torch.device("meta"), torch.inference_mode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            with pytest.raises(RuntimeError), torch_as_it_starts():
                assert found() == (torch.float32, "cpu", True)
                use_threads(_model(8), threads + 1)
                raise RuntimeError
            assert found() == (torch.bfloat16, "meta", False)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.get_num_threads() == threads


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
