"""The bar of replays: a thousand recorded episodes of each deterministic environment, live and from the cassette.

An episode that runs code in a sandbox takes half a second, and one that searches WordNet a twentieth: CI plays fewer of
them, and AGENT_RL_BAR=1000 all.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.envs.wordnet_corpus import corpus_folder
from agent_rl.gym.budget import Budget
from agent_rl.replay.result import Status
from agent_rl.replay.run import MODES
from agent_rl.store.episodes import read_episodes
from tests.recorded import DETERMINISTIC, SANDBOXED, recorded, stored

EPISODES, ASKED = 1000, int(os.environ.get("AGENT_RL_BAR", "0"))
OF_SANDBOXED, OF_CORPUS = ASKED or 24, ASKED or 200
CORPUS = ("wordnet-v0", "research-wordnet-v0")
BUDGETS = (None, Budget(turns=2), Budget(turns=8, tool_calls=1))


@pytest.mark.sandbox
@pytest.mark.parametrize("env", [*DETERMINISTIC, *SANDBOXED, *CORPUS])
def test_replay_of_many_episodes_is_the_same(env: str, tmp_path: Path) -> None:
    if env in CORPUS and not (corpus_folder() / "tasks.jsonl").is_file():
        pytest.skip("WordNet's corpus is not built here")
    n = OF_SANDBOXED if env in SANDBOXED else OF_CORPUS if env in CORPUS else EPISODES
    folder = stored(tmp_path, recorded(env, n, BUDGETS))
    endings = {episode.stop_reason for episode in read_episodes(folder)}
    assert {"done", "turns"} <= endings
    for mode in MODES:
        found = ar.verify(folder, mode=mode, workers=2)
        assert found.counts == {Status.SAME: n}, (mode, [e.problem for e in found.found[:3]])
