"""agent_rl.gym.tasks: sources, streams, keys and seeds."""

import types

import pytest

from agent_rl.errors import ConfigError
from agent_rl.gym.tasks import TaskSource, TaskStream, episode_seed, task_key, world_seed

TASKS = [{"n": i} for i in range(7)]


def numbers(split: str, index: int) -> dict[str, object]:
    return {"split": split, "n": index}


def take(stream: TaskStream, start: int, stop: int) -> list[object]:
    return [stream.at(i)["n"] for i in range(start, stop)]


# Sources


def test_task_source_serves_tasks_in_place():
    source = TaskSource({"train": TASKS, "eval": TASKS[:2]})
    assert source.splits == ("train", "eval")
    assert source.size("eval") == 2
    assert source.get("train", 6) == {"n": 6}


def test_task_source_has_no_distinct_task_of_none_asked():
    for source in (TaskSource({"train": TASKS}), TaskSource(lambda split, index: {"n": index})):
        assert [len(source.distinct("train", n)) for n in (0, 1, 3)] == [0, 1, 3]


def test_task_source_reads_files_lazily(tmp_path):
    source = TaskSource({"train": "t.jsonl", "eval": tmp_path / "t.jsonl"}, base=tmp_path)
    (tmp_path / "t.jsonl").write_text('\ufeff{"n": 1}\n\n{"n": "\u2028"}\r\n{"n": 3}', encoding="utf-8")
    for split in source.splits:
        assert [source.get(split, i)["n"] for i in range(source.size(split))] == [1, "\u2028", 3]


def test_task_source_calls_a_function():
    source = TaskSource(numbers, splits=("easy", "hard"))
    assert source.splits == ("easy", "hard")
    assert source.size("hard") is None
    assert source.get("hard", 2**40) == {"split": "hard", "n": 2**40}


def test_task_source_without_tasks_numbers_them():
    source = TaskSource()
    assert source.splits == ("train", "eval")
    assert source.get("eval", 3) == {"split": "eval", "index": 3}


@pytest.mark.parametrize("source", [TaskSource({"train": TASKS, "eval": TASKS}), TaskSource(numbers)])
def test_task_source_suggests_for_unknown_splits(source):
    for use in (lambda: source.size("trian"), lambda: source.get("trian", 0), lambda: TaskStream(source, "trian")):
        with pytest.raises(
            ConfigError, match=r"no split 'trian'\. Did you mean 'train'\? The splits are: train, eval\."
        ):
            use()


@pytest.mark.parametrize(
    ("source", "index"), [(TaskSource({"train": TASKS}), 7), (TaskSource({"train": TASKS}), -1), (TaskSource(), -1)]
)
def test_task_source_refuses_missing_indices(source, index):
    with pytest.raises(IndexError, match=str(index)):
        source.get("train", index)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"n": 1}\n{"n": }\n', "t.jsonl:2: not JSON"),
        ('{"n": 1}\n\n[1]\n', r"t.jsonl:3: a list, not a JSON object: \[1\]"),
        ('{"n": NaN}\n', "t.jsonl:1: not JSON: NaN"),
    ],
)
def test_task_source_names_the_line_of_bad_json(tmp_path, text, complaint):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        TaskSource({"train": "t.jsonl"}, base=tmp_path).size("train")


def test_task_source_names_the_line_of_bad_bytes(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'{"n": 1}\n{"n": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl:2"):
        TaskSource({"train": "t.jsonl"}, base=tmp_path).get("train", 0)


def test_task_source_names_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl can't be read: No such file"):
        TaskSource({"train": "gone.jsonl"}, base=tmp_path).size("train")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: TaskSource({}), "no splits"),
        (lambda: TaskSource(numbers, splits=()), "no splits"),
        (lambda: TaskSource({"train": TASKS}, splits=("train",)), "splits="),
        (lambda: TaskSource(3), "tasks=3 are no tasks: give rows, a file, a mapping of splits, or a function"),
        (lambda: TaskSource({"train": []}).size("train"), "'train' has no tasks"),
        (lambda: TaskSource({"train": [{}, 3]}).size("train"), "task 1 of split 'train' is 3"),
        (lambda: TaskSource({"train": TASKS}).size("train") and TaskStream(TaskSource(), "train", -1), "seed=-1"),
    ],
)
def test_task_source_refuses_contradicting_arguments(make, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_task_source_requires_mappings_from_functions():
    with pytest.raises(TypeError, match=r"returned None for \('train', 4\)"):
        TaskSource(lambda split, index: None).get("train", 4)


@pytest.mark.parametrize(
    "make", [lambda rows: {"train": rows, "eval": rows}, lambda rows: lambda _, index: rows[index]]
)
def test_tasks_are_played_as_files_give_them_back(make):
    rows = [{"at": (1, (2,)), "of": types.MappingProxyType({"n": range(2)})}, {"board": {1: "x"}}]
    source = TaskSource(make(rows))
    assert source.get("train", 0) == {"at": [1, [2]], "of": {"n": [0, 1]}}
    with pytest.raises(ConfigError, match="a task has the key 1, which would come back from a file as text"):
        source.get("train", 1)


# Streams


def test_task_stream_serves_tasks_once_an_epoch():
    stream = TaskStream(TaskSource({"train": TASKS, "eval": TASKS}), "train", seed=1)
    epochs = [take(stream, 7 * e, 7 * e + 7) for e in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_task_stream_depends_on_the_position_only():
    source = TaskSource({"train": TASKS})
    forwards = take(TaskStream(source, "train", 3), 0, 30)
    again = TaskStream(source, "train", 3)
    assert [again.at(i)["n"] for i in reversed(range(30))] == forwards[::-1]
    assert forwards != take(TaskStream(source, "train", 4), 0, 30)


def test_task_stream_seeds_share_no_endless_task():
    source = TaskSource(numbers)
    assert take(TaskStream(source, "train", 0), 0, 3) == [0, 1, 2]
    assert take(TaskStream(source, "train", 2), 0, 2) == [2**33, 2**33 + 1]


def test_task_stream_refuses_negative_positions():
    with pytest.raises(IndexError, match="-1"):
        TaskStream(TaskSource({"train": TASKS}), "train").at(-1)


# Keys and seeds


def test_task_key_depends_on_the_content():
    key = task_key({"a": 1, "b": [1, {"c": None}]})
    assert key == task_key({"b": (1, types.MappingProxyType({"c": None})), "a": 1})
    assert len(key) == 16
    assert int(key, 16) >= 0
    assert len({key, task_key({"a": 1, "b": [1, {"c": 0}]}), task_key({"a": 1.0, "b": [1, {"c": None}]})}) == 3
    assert len({task_key({"x": float(x)}) for x in ("nan", "inf", "-inf", "nan")}) == 3  # as episode files have them


def test_task_key_is_stable_between_versions():
    assert task_key({"question": "2+2?", "é": 1}) == "9d1ea8af8e42c8f3"
    assert episode_seed(0, {"question": "2+2?"}, 0) == 2822067484114116481


@pytest.mark.parametrize("value", [{1, 2}, object()], ids=lambda value: type(value).__name__)
def test_task_key_refuses_unserialisable_values(value):
    with pytest.raises(ConfigError, match="holds what JSON can't"):
        task_key({"value": value})


def test_episode_seeds_differ_by_every_part():
    seeds = {episode_seed(run, {"n": n}, sample) for run in range(5) for n in range(5) for sample in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**60


def test_world_seed_is_the_tasks_number_however_written():
    assert [world_seed({"seed": given}) for given in (5, "5", 5.0)] == [5, 5, 5]
    hashed = [world_seed({"n": 1, **given}) for given in ({}, {"seed": None}, {"seed": ""})]
    assert len({*hashed}) == 3 and min(hashed) >= 2**10
    with pytest.raises(ConfigError, match="the seed 'five': give a whole number"):
        world_seed({"seed": "five"})
