"""A short run of `fuzz`, always of the same cases, and faults that it has to find; tests/adapters has `wire`'s."""

from __future__ import annotations

import random

import pytest

from tests.sandbox import archives, fuzz
from tests.sandbox.backends import skip_if_refused

CASES = {"frames": 2000, "answers": 1000, "calls": 2000, "paths": 50, "results": 50, "archives": 2000, "wire": 1000}


async def findings(target: str, seed: int = 7) -> list[str]:
    return [finding async for finding in fuzz.TARGETS[target][0](random.Random(seed), CASES[target])]


@pytest.mark.sandbox
@pytest.mark.parametrize("target", sorted(fuzz.TARGETS.keys() - {"wire"}))
def test_fuzz_finds_nothing(run, target):
    with skip_if_refused():
        assert run(findings(target)) == []


@pytest.mark.sandbox
def test_fuzz_finds_a_reader_that_trusts_lengths(run, monkeypatch):
    monkeypatch.setattr(fuzz, "answer_from_body", lambda head, body: body[head["out"]])
    assert any("TypeError" in finding or "KeyError" in finding for finding in run(findings("frames")))


TRUSTING = """
from agent_rl.sandboxes.agent import workplace
workplace._Members._locate = lambda self, name: f"{self._folders['work']}/../{name}"
"""


@pytest.mark.sandbox
def test_fuzz_finds_an_unpacking_that_trusts_names(run, monkeypatch):
    monkeypatch.setattr(archives, "CHILD", TRUSTING + archives.CHILD)
    with skip_if_refused():
        assert any("unpack changed what is outside" in finding for finding in run(findings("archives")))
