"""docs/metrics.md: it has every name that runs write, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tree import SOURCES

from agent_rl.backends.embedded.run import start_run
from agent_rl.config import load_config
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.judge.run import CALLS, RUBRICS, read_rubrics
from agent_rl.rollout.evaluation import rollout_metrics
from agent_rl.runs.metrics import read_metrics
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.doubles import example_episode
from tests.judged_env import judging
from tests.luck_env import LUCK
from tests.metrics_page import COMMON, EMBEDDED, ON_VERL, SECTIONS, names_in, pattern, undocumented
from tests.runs import SMALL, config

MOE = {"architecture": "qwen3_moe", "experts": 4, "experts_per_token": 2, "expert_intermediate": 16}
ALL_PARTS = {
    "proximal": "recompute",
    "kl": {"where": "loss", "coefficient": 0.01},
    "negative_mask": {"name": "opsm", "delta": 0.1},
    "entropy": 0.001,
}
ON_STORED = {"name": "dpo", "advantage": "best-against-worst", "objective": "dpo", "aggregation": "token-sum"}


@pytest.fixture(scope="module")
def judged(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run whose episodes a model judges."""
    folder = tmp_path_factory.mktemp("judged")
    changes = {"env": "judged/sums-v0", "start_from": str(talker), "eval": {"n": 1, "dev_n": 1, "every": 0}, "steps": 1}
    with judging(folder) as (_, judge):
        yield start_run(config(folder, judge=judge, **changes), Progress())


@pytest.fixture(scope="module")
def rows(talker: Path, judged: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The rows of small runs; together they have every feature that writes metrics."""
    folder = tmp_path_factory.mktemp("metrics")
    start = {"start_from": str(talker), "eval": {"n": 2, "dev_n": 2, "every": 1}, "steps": 1}

    def run(name: str, **changes: object) -> Path:
        return start_run(config(folder / name, **(start | changes)), Progress())

    def preset(name: str) -> dict[str, object]:
        return load_config("backend/embedded", type(config(folder)), [f"algorithm={name}"]).algorithm.model_dump()

    again = {"groups": 8, "samples": 4, "slots": 16, "max_tokens": 24, "retry_temperature": 2.0}
    rounded = {"groups": 4, "samples": 4, "slots": 16, "max_tokens": 24, "weights": "int4"}
    ahead = {"mode": "one_step_off", "max_staleness": 1}
    model = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 16} | MOE
    parts = run("parts", algorithm=ALL_PARTS, precision={"autocast": "float16"})
    runs = [
        judged,
        parts,
        run("ppo", algorithm=preset("ppo")),
        run("vineppo", algorithm=preset("vineppo") | {"vine": {"continuations": 2, "max_episodes": 8}}),
        run("remax", algorithm=preset("remax"), steps=2, **{"async": ahead}),
        run("dapo", algorithm=preset("dapo"), updates={"minibatches": 2}),
        run("m2po", algorithm=preset("m2po")),
        run("again", env=LUCK, rollout=again),
        run(
            "moe",
            algorithm=preset("icepop") | {"routing": {"replay": "R3"}},
            start_from=None,
            warm_start=SMALL["warm_start"],
            model=model,
            rollout=rounded,
        ),
        run("dpo", algorithm=ON_STORED, episodes=str(parts)),
    ]
    return [row for path in runs for row in read_metrics(path / "metrics.jsonl")]


def test_judged_run_leaves_out_what_is_unjudged(judged: Path) -> None:
    (row,) = (row for row in read_metrics(judged / "metrics.jsonl") if row["kind"] == "train")
    step = [e for e in read_episodes(judged / "episodes.jsonl") if e.origin.purpose == "train"]
    expected = rollout_metrics(step, str(judged.parent.parent / "prices.yaml"))
    found = {name: value for name, value in expected.items() if name.startswith("judge/")}
    assert {name: row[name] for name in found} == found and found["judge/calls"] and "judge/cost" in found
    assert row["rollout/kept"] == sum(e.reward is not None for e in step) / len(step)
    assert len(read_rubrics(judged / RUBRICS)) == 2 and (judged / CALLS).exists()


@pytest.mark.sandbox
def test_metrics_page_has_every_written_name(rows: list[dict[str, object]]) -> None:
    written = {name for row in rows if row["kind"] == "train" for name in row} - COMMON
    assert len(written) > 80
    assert undocumented(written, EMBEDDED) == []


@pytest.mark.sandbox
def test_metrics_page_has_no_other_embedded_name(rows: list[dict[str, object]]) -> None:
    lost = replace(example_episode("lost"), sandbox_loss=SandboxLoss(Cause.MEMORY))
    written = {name for row in [*rows, rollout_metrics([lost])] for name in row}
    assert [name for name in EMBEDDED if not any(pattern(name).fullmatch(one) for one in written)] == []


@pytest.mark.sandbox
def test_metrics_page_has_the_fields_of_rows(rows: list[dict[str, object]]) -> None:
    table = dict(re.findall(r"^\| (`.+?`) \| (`.+?`) \|", SECTIONS["Rows"], re.MULTILINE))
    fields = {
        kind: set(re.findall(r"`(\w+)`", cells))
        for kinds, cells in table.items()
        for kind in re.findall(r"`(\w+)`", kinds)
    }
    found = {str(row["kind"]): row.keys() - COMMON for row in rows if row["kind"] != "train"}
    assert found == fields


NAME = re.compile(r"[a-z_]+(/[a-z_]+)+[a-z]")


def names_in_code(tree: ast.AST, prefixes: tuple[str, ...]) -> set[str]:
    """Every string that begins as a metric does, or is a key and has the form of one."""
    nodes = list(ast.walk(tree))
    strings = [n for n in nodes if isinstance(n, ast.Constant) and str(n.value).startswith(prefixes)]
    keys = [key for n in nodes if isinstance(n, ast.Dict) for key in n.keys]
    keys += [n.slice for n in nodes if isinstance(n, ast.Subscript)]
    found = [n.value for n in [*strings, *keys] if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {name for name in found if NAME.fullmatch(name) and not name.startswith("image/")}  # a media type


def test_metrics_page_has_every_name_in_the_code() -> None:
    prefixes = tuple({f"{name.split('/')[0]}/" for name in [*EMBEDDED, *names_in("On verl: ours")]})
    files = [file for module, file in SOURCES.items() if not module.startswith("agent_rl.sandboxes")]
    found = set().union(*(names_in_code(ast.parse(file.read_text()), prefixes) for file in files))
    names = {f"actor/{name}" if name.startswith("agent_rl/") else name for name in found}  # verl puts the worker first
    assert len(names) > 60
    assert undocumented(names, [*EMBEDDED, *ON_VERL]) == []


def test_names_in_code_finds_new_prefixes() -> None:
    code = "metrics['new/one'] = 1\nreturn_ = {'new/two': 2}\nx = ['rollout/three', 'a/path']"
    assert names_in_code(ast.parse(code), ("rollout/",)) == {"new/one", "new/two", "rollout/three"}


def test_metrics_page_names_losses_alike_on_backends() -> None:
    ours = names_in("On verl: ours")
    pairs = re.findall(r"^\| `actor/agent_rl/(\w+)` \| `train/(\w+)`", SECTIONS["On verl: ours"], re.MULTILINE)
    assert len(pairs) == len(ours) and all(one == other for one, other in pairs)
    assert {f"train/{other}" for _, other in pairs} <= set(EMBEDDED)


def test_metrics_page_has_no_name_twice() -> None:
    names = [*EMBEDDED, *ON_VERL]
    assert len(set(names)) == len(names)


def test_metrics_page_gives_unit_meaning_and_range() -> None:
    for title in SECTIONS:
        if not title.startswith(("Rows", "On verl")):
            table = [line for line in SECTIONS[title].splitlines() if line.startswith("| `")]
            assert table and all(len([cell for cell in re.split(r" ?\| ?", line) if cell]) == 4 for line in table), (
                title
            )


@pytest.mark.parametrize(
    ("name", "written", "same"),
    [
        ("mismatch/turn_N", "mismatch/turn_8+", True),
        ("val-core/ENV/SPLIT/NAME", "val-core/a-v0/test/reward/mean@1", True),
        ("rollout/kept", "rollout/kept_", False),
        ("logps/chosen", "logps/rejected", False),
    ],
)
def test_pattern_matches_its_names_only(name: str, written: str, same: bool) -> None:
    assert (pattern(name).fullmatch(written) is not None) == same
