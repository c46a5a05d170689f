"""docs: their names of verl exist in verl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import verl
from pages import OF_VERL
from test_verl_page import TABLE
from verl.trainer.ppo import core_algos

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("name", TABLE)
def test_algorithms_page_names_exist_in_verl(name: str) -> None:
    advantage, objective, aggregation = (re.findall(r" = `([\w-]+)`", cell) for cell in TABLE[name][:3])
    assert all(core_algos.get_adv_estimator_fn(x) for x in advantage)
    assert all(core_algos.get_policy_loss_fn(x) for x in objective)
    assert set(aggregation) <= set(AGGREGATIONS)


def test_pages_names_of_verl_occur_in_it() -> None:
    files = [file for file in Path(verl.__file__).parent.rglob("*") if file.suffix in (".py", ".yaml")]
    text = "\n".join(file.read_text() for file in files)
    words = [re.split(r"[=.]", name)[-1 if "." in name else 0] for name in OF_VERL]
    assert [word for word in words if word not in text] == []
