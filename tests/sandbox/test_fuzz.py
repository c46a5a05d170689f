"""A short run of `fuzz`, always of the same cases, and a fault that it has to find."""

from __future__ import annotations

import random

import pytest

from tests.sandbox import fuzz
from tests.sandbox.backends import skip_if_refused

CASES = {"frames": 2000, "answers": 1000, "calls": 2000, "paths": 50, "results": 50}


async def findings(target: str, seed: int = 7) -> list[str]:
    return [finding async for finding in fuzz.TARGETS[target][0](random.Random(seed), CASES[target])]


@pytest.mark.sandbox
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_fuzz_finds_nothing(run, target):
    with skip_if_refused():
        assert run(findings(target)) == []


@pytest.mark.sandbox
def test_fuzz_finds_a_reader_that_trusts_lengths(run, monkeypatch):
    monkeypatch.setattr(fuzz, "answer_from_body", lambda head, body: body[head["out"]])
    assert any("TypeError" in finding or "KeyError" in finding for finding in run(findings("frames")))
