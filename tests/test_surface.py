"""What `import agent_rl` exports."""

import inspect
import pickle
import re

import pytest
from tree import run_python

import agent_rl as ar


def test_exported_names_exist_once() -> None:
    assert len(set(ar.__all__)) == len(ar.__all__)
    assert [name for name in ar.__all__ if not hasattr(ar, name)] == []
    with pytest.raises(AttributeError, match="No agent_rl attribute TaskStream"):
        ar.TaskStream  # noqa: B018


def test_import_leaves_torch_and_display_out() -> None:
    ran = run_python("-c", "import sys, agent_rl; print([m for m in ('torch', 'rich.console') if m in sys.modules])")
    assert ran.stdout.strip() == "[]", ran.stderr


@pytest.mark.parametrize("name", ["run", "evaluate", "train", "run_jobs", "make", "spec", "register"])
def test_types_in_public_signatures_are_exported(name: str) -> None:
    signature = inspect.signature(getattr(ar, name))
    annotations = [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]
    named = set(re.findall(r"\b[A-Z]\w+", " ".join(map(str, annotations))))
    outside = {"Callable", "Mapping", "None", "Path", "Sequence", "Iterable", "Iterator", "E"}
    aliases = {"EnvNames", "PolicyChoice", "TaskFunction", "TaskRows"}  # of exported names
    assert named - outside - aliases <= set(ar.__all__)


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(ar.ConfigError("no such key")))
    assert type(error) is ar.ConfigError and ar.ConfigError.__module__ == "agent_rl" and str(error) == "no such key"
