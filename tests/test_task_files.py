"""agent_rl.gym.task_files: tasks from files, saved data sets and iterables."""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import agent_rl as ar
from agent_rl.gym import task_files
from agent_rl.gym.task_files import TaskRows
from agent_rl.gym.tasks import TaskSource
from tests.doubles import Silent

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]


class Rows:
    """A data set that is no sequence, as `datasets.Dataset` is none."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., object]) -> None:
    """Put a module with some functions where a library would be."""
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def all_of(tasks: object, split: str = "train", base: Path | None = None) -> list[ar.Task]:
    source = TaskSource(tasks, base=base)
    splits = ("train", "eval") if source.holds_out else (split,)  # those that are held out were read, too
    found = {str(task): task for name in splits for task in source.distinct(name, len(ROWS))}
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), Rows(), iter(ROWS)], ids=["list", "tuple", "data set", "iterator"])
@pytest.mark.parametrize("shape", [lambda rows: rows, lambda rows: {"train": rows}], ids=["bare", "in a split"])
def test_task_source_takes_any_rows(rows: Iterable[ar.Task], shape: Callable[[TaskRows], object]) -> None:
    assert all_of(shape(rows if not isinstance(rows, Iterator) else (row for row in ROWS))) == ROWS


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tasks.jsonl", '{"question": "0 + 1?", "answer": "1"}\n'),
        ("tasks.json", '[{"question": "0 + 1?", "answer": "1"}]'),
        ("tasks.csv", '\ufeffquestion,answer\r\n"0 + 1?",1\r\n'),
    ],
)
def test_task_source_reads_text_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert all_of(name, base=tmp_path) == all_of(tmp_path / name) == all_of({"train": tmp_path / name}) == ROWS[:1]


def test_task_source_reads_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks.parquet").touch()
    opened: list[Path] = []

    def read_table(file: Path) -> SimpleNamespace:
        opened.append(file)
        return SimpleNamespace(to_pylist=lambda: ROWS)

    stand_in(monkeypatch, "pyarrow", parquet=SimpleNamespace(read_table=read_table))
    assert all_of("tasks.parquet", base=tmp_path) == ROWS and opened == [tmp_path / "tasks.parquet"]


def test_task_source_reads_saved_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one", "several", "several/train", "several/eval"):
        (tmp_path / folder).mkdir()
    (tmp_path / "several" / "dataset_dict.json").write_text('{"splits": ["train", "eval"]}')
    stand_in(monkeypatch, "datasets", load_from_disk=lambda folder: [{"from": Path(folder).name}])
    assert all_of("one", base=tmp_path) == [{"from": "one"}]
    assert all_of("several", "eval", base=tmp_path) == [{"from": "eval"}]
    assert all_of({"train": "several"}, base=tmp_path) == [{"from": "train"}]
    assert TaskSource("several", base=tmp_path).splits == ("train", "eval")


@pytest.mark.parametrize(("name", "library"), [("tasks.parquet", "pyarrow"), ("folder", "datasets")])
def test_task_source_names_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "tasks.parquet").touch()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ar.ConfigError, match=f"needs {library}: pip install {library}"):
        all_of(name, base=tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("tasks.csv", "a,b\n1,2\n3\n", r"tasks.csv:3: not as many fields as the header has"),
        ("tasks.csv", "a,b\n1,2,3\n", r"tasks.csv:2: not as many fields as the header has"),
        ("tasks.csv", "a,b\n", "is empty"),
        ("tasks.csv", "a,b,a\n1,2,3\n", "tasks.csv: two columns are called 'a'; rename one"),
        ("tasks.json", "[]", "is empty"),
        ("tasks.json", '{"a": 1}', "tasks.json: a dict, not a list of JSON objects"),
        ("tasks.json", "[1]", "task 0 of split 'train' is 1, not a dict"),
        ("tasks.json", "[NaN]", "tasks.json: not JSON: NaN is no JSON number"),
        ("tasks.jsonl", f'["a{"é" * 60}"]', "tasks.jsonl:1: a list, not a JSON object"),
        ("tasks.txt", "", "is no task file: give .jsonl, .json, .csv, .parquet, a folder of Dataset.save_to_disk"),
    ],
)
def test_task_source_refuses_bad_files(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ar.ConfigError, match=complaint):
        all_of(name, base=tmp_path)


def test_environment_is_registered_with_a_data_set() -> None:
    ar.register("rows-v0", tasks=Rows())(type("WithRows", (Silent,), {}))
    assert ar.spec("rows-v0").tasks.get("train", 1) in ROWS


def test_endless_generator_gives_its_first_tasks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task_files, "MOST_UNCOUNTED", 50)
    source = TaskSource({"index": index} for index in itertools.count())
    found = [*source.distinct("train", 99), *source.distinct("eval", 99)]
    assert sorted(task["index"] for task in found) == [*range(50)]
    assert "its first 50 tasks are taken" in caplog.text
    caplog.clear()
    assert TaskSource({"index": index} for index in range(50)).size("train") == source.size("train")
    assert not caplog.text
