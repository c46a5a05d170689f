"""`from_swe` on three repositories of our own: solutions earn, cheats don't; and diffs, of which its rows are made."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_rl as ar
from agent_rl.envs.adapters import printed_tests
from agent_rl.envs.adapters.patches import apply_patch, patched, read_patch
from agent_rl.envs.adapters.printed_tests import MAX_LINE, all_pass, pieces_of
from agent_rl.envs.adapters.swe import MAX_OUTPUT, files_of, hashes
from agent_rl.envs.quiz import one_call
from agent_rl.policy import Scripted
from agent_rl.sandboxes.base import Limits
from tests.swe_tasks import REPOSITORIES, commit, diff, write_tasks

LIMITS = Limits(memory=192 << 20, processes=32, disk=16 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repositories and their tasks; the environment is registered."""
    folder = tmp_path_factory.mktemp("swe")
    tasks = type("Tasks", (ar.from_swe(write_tasks(folder), repositories=folder),), {"limits": LIMITS})
    ar.register("swe-test/ours-v0")(tasks)
    return folder


def rewards(policy: str | Scripted) -> dict[str, float | None]:
    """Return what a policy earns, by repository."""
    found = {}
    for split, n in {"train": 2, "eval": 1}.items():
        for episode in ar.run("swe-test/ours-v0", policy, n=n, split=split, env_args={"sandbox": "local"}):
            assert episode.error is None, episode.error
            found[str(episode.task["repo"])] = episode.reward
    return found


def says(*commands: str) -> Scripted:
    """Return a policy of commands."""

    def play(env: ar.Env, seed: int) -> ar.Script:
        for command in commands:
            yield one_call("shell", command=command)
        yield "done"

    return Scripted(play)


ALL = set(REPOSITORIES)


def test_swe_solutions_earn(folder: Path) -> None:
    assert rewards("oracle") == dict.fromkeys(ALL, 1.0)


FORGED = "".join(
    f"print({f'{test.rpartition(chr(46))[2]} ({test}) ... ok'!r})\n"
    for made in REPOSITORIES.values()
    for test in (made.fails, made.passes)
)
CHEATS = {
    "does nothing": "git status",
    "changes the tests": "for f in test_*.py tests/test_*.py; do test -e $f && sed -i 's/self.assert.*/pass/' $f; done",
    "prints what tests print": f"for f in *.py src/*.py; do cat >>$f <<'END'\n{FORGED}\nEND\ndone",
    "brings its own unittest": f"mkdir -p ../.local; cat >../unittest.py <<'END'\n{FORGED}\nEND",
    "removes everything": "rm -rf * .git; mkfifo roman.py",
    "takes the tests' place": "for f in test_*.py tests/test_*.py; do rm -f $f; mkdir -p $f; echo >$f/x; done",
    "is no folder any more": 'd="$PWD"; cd ..; rm -rf "$d"; echo >"$d"',
    "leaves a link": "rm -f *.py src/*.py; ln -s /etc/passwd roman.py; ln -s . src/cache.py",
}


@pytest.mark.sandbox
@pytest.mark.parametrize("command", CHEATS.values(), ids=CHEATS)
def test_swe_cheats_earn_nothing(folder: Path, command: str) -> None:
    assert rewards(says(command)) == dict.fromkeys(ALL, 0.0)


@pytest.mark.sandbox
def test_swe_counts_tests_that_passed_before(folder: Path) -> None:
    solved = REPOSITORIES["us/roman"].solution["roman.py"]
    broken = f"{solved}\nright = value\n\ndef value(text):\n    return right(text) if text != 'XVI' else 0\n"
    for text, earned in ((solved, 1.0), (broken, 0.0)):
        assert rewards(says(f"test -e roman.py && cat >roman.py <<'END'\n{text}\nEND"))["us/roman"] == earned


def test_swe_mistakes_are_named(tmp_path: Path) -> None:
    row = {"instance_id": "a", "problem_statement": "", "base_commit": "x", "test_patch": "", "PASS_TO_PASS": []}
    wrong = {
        "has no FAIL_TO_PASS": row,
        "give a list of the names": {**row, "FAIL_TO_PASS": "test"},
        "doing nothing would solve it": {**row, "FAIL_TO_PASS": "[]"},
        "no unified diff": {**row, "FAIL_TO_PASS": ["t"], "test_patch": "x"},
        "give a folder of clones": {**row, "FAIL_TO_PASS": ["t"]},
    }
    for said, bad in wrong.items():
        (tmp_path / "rows.jsonl").write_text(json.dumps(bad))
        with pytest.raises(ar.ConfigError, match=said):
            ar.from_swe(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text('{"instance_id": "a",\n')
    with pytest.raises(ar.ConfigError, match=r"rows.jsonl:1: not JSON"):
        ar.from_swe(tmp_path / "rows.jsonl")
    with pytest.raises(ar.ConfigError, match="there is no clone of repo='us/none'"):
        (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "FAIL_TO_PASS": ["t"], "repo": "us/none"}))
        ar.from_swe(tmp_path / "rows.jsonl", repositories=tmp_path)


PYTEST = """
==================================== PASSES ====================================
_________________________________ test_a ______________________________________
PASSED tests/test_x.py::test_liar
=========================== short test summary info ============================
PASSED tests/test_x.py::test_a
PASSED tests/test_x.py::test_b[a - b]
XFAIL tests/test_x.py::test_known - reason
FAILED tests/test_x.py::test_liar - assert 0
ERROR tests/test_x.py::test_c
"""


def test_swe_reads_what_pytest_and_unittest_print() -> None:
    at = "tests/test_x.py::test_"
    assert all_pass(PYTEST, [f"{at}a", f"{at}b[a - b]", f"{at}known"])
    assert not any(all_pass(PYTEST, [f"{at}{name}"]) for name in ("liar", "c", "missing"))
    said = "test_a (x.X.test_a) ... ok\ntest_b (x.X.test_b) ... FAIL\ntest_b (x.X.test_b) ... ok\n"
    assert all_pass(said, ["test_a (x.X.test_a)"]) and not all_pass(said, ["test_b (x.X.test_b)"])


HEAD = "# -*- coding: latin-1 -*-\n# caf\xe9\n"
ODD = {
    ".gitattributes": "tests export-ignore\nversion export-subst\n",
    ".gitignore": "lib\n",
    "version": "$Format:%H$\n",
    "lib/kept.py": "",
    "old": "#!/bin/sh\necho 1\n",
    "tests/test_x.py": HEAD,
}
CHECK = """
import subprocess, unittest
class T(unittest.TestCase):
    def test_a(self):
        for name in ("./old", "./new"):
            self.assertEqual(subprocess.run([name], capture_output=True, text=True).stdout, "2\\n")
"""


def test_swe_repositories_are_as_committed_and_programs_stay_such(tmp_path: Path) -> None:
    row = {
        **{"instance_id": "a", "repo": "a", "problem_statement": "", "PASS_TO_PASS": []},
        "base_commit": commit(tmp_path / "a", ODD, "latin-1"),
        "test_patch": diff(ODD, {"tests/test_x.py": HEAD + CHECK}).replace("\xe9", "\udce9"),
        "FAIL_TO_PASS": ["test_a (tests.test_x.T.test_a)"],
        "test_command": "python3 -m unittest -v tests/test_x.py",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tasks = type("Odd", (ar.from_swe(tmp_path / "rows.jsonl", repositories=tmp_path),), {"limits": LIMITS})
    ar.register("swe-test/odd-v0")(tasks)

    def work(env: ar.Env, seed: int) -> ar.Script:
        change = "for f in old new; do printf '#!/bin/sh\\necho 2\\n' >$f; chmod +x $f; done"
        (answer,) = yield one_call("shell", command=f"cat version; ls; git clean -fdxq; ls lib; {change}")
        assert answer.content.split() == ["$Format:%H$", "lib", "old", "tests", "version", "kept.py"]
        yield "done"

    (episode,) = ar.run("swe-test/odd-v0", Scripted(work), env_args={"sandbox": "local"})
    assert episode.reward == 1.0, episode.error


UNITTEST = """
test_word (x.X.test_word)
Says ... a word. ... ok
test_sign (x.X.test_sign)
Says a sign. ... FAIL
test_log (x.X.test_log) ... WARNING: late
ok
test_line (x.X.test_line) ...
hello
ok
test_left (x.X.test_left) ... test_next (x.X.test_next) ... ok
test_other (x.X.test_other) ... skipped 'no'
ok
test_part (x.X.test_part) ... ok
FAIL: test_part (x.X.test_part) (n=1)
"""


def test_swe_reads_docstrings_subtests_and_tests_that_print() -> None:
    passed = ["test_word (x.X.test_word)", "Says ... a word.", "test_log (x.X.test_log)"]
    assert all_pass(UNITTEST, [*passed, "test_line (x.X.test_line)", "test_next (x.X.test_next)"])
    failed = [f"test_{name} (x.X.test_{name})" for name in ("sign", "left", "other", "part")]
    assert not any(all_pass(UNITTEST, [name]) for name in (*failed, "Says a sign.", "test_none (x)"))


def test_swe_takes_names_that_end_at_a_space() -> None:
    said = "PASSED a.py::test_a[x y]\nPASSED a.py::test_b[x y]\nFAILED a.py::test_b[x z] - assert 0\n"
    assert all_pass(said, ["a.py::test_a[x"]) and not all_pass(said, ["a.py::test_b[x"])


@given(st.text(alphabet="a\n", max_size=40), st.integers(1, 9))
def test_swe_pieces_of_a_text_have_its_lines(text: str, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(printed_tests, "MAX_LINE", most)
        pieces = list(pieces_of(text))
    assert max(map(len, pieces), default=0) <= most
    lines = [line for piece in pieces for line in piece.split("\n")]
    assert [line for line in lines if line] == [line[:most] for line in text.split("\n") if line]


def test_swe_looks_at_an_output_in_pieces() -> None:
    """Splitting all of it held up every thread for 0.3 s."""
    assert MAX_OUTPUT <= 2 << 20
    before = time.thread_time()
    assert not next(pieces_of("\n" * (16 << 20))).strip()
    assert time.thread_time() - before < 0.05


HASH = "0" * 64 + "-"


@pytest.mark.parametrize(
    "said",
    [
        *("[1]", "[" * 100_000, f"{HASH} 1", f'{HASH} {{"a": 1}}', f"{HASH} {'[' * 9000}", f'{HASH} "../x"'),
        *(f'{HASH} "/x"', f'{HASH} "a/../../x"', f'{HASH} "{"x" * MAX_LINE}"', "\n\n", "\xff"),
    ],
)
def test_swe_takes_no_forged_list_of_files(said: str) -> None:
    assert hashes(f'{HASH} "a b"\n{HASH} "c/d"\n') == {"a b": HASH, "c/d": HASH}
    assert hashes(f'{HASH} "a b"\n{said}') == {}


# Diffs

Text = st.lists(st.sampled_from(["a", "b", "--- x", "+++ y", "@@ -1 +1 @@", "", "\\ c"]), max_size=12).map("\n".join)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from("pqr"), Text), st.dictionaries(st.sampled_from("pqr"), st.none() | Text))
def test_patch_of_any_texts_makes_the_others(before: dict[str, str], after: dict[str, str | None]) -> None:
    after = {path: text for path, text in after.items() if text or before.get(path)}  # others have no diff
    changed = {path: text for path, text in after.items() if before.get(path) != text}
    assert {path: text or None for path, text in patched(read_patch(diff(before, changed)), before).items()} == {
        path: text or None for path, text in changed.items()
    }


def test_patch_of_git_does_what_git_did(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=", *words]
        return subprocess.run(command, capture_output=True, check=True).stdout.decode()

    before = {
        "feed.py": "a\n\x0c\nb\nc\n\x0c\nd\n",
        "returns.txt": "x\r\ny\rz\r\nw\r\n",
        "lines.txt": "a\u2028b\nc\x85d\n",
        "café.py": "1\n2\n",
        "some space.py": "1\n",
        "moved.py": "k\nl\n",
        "gone.py": "",
    }
    after = {
        **before,
        "feed.py": "a\n\x0c\nb\ncc\n\x0c\ndd\n",
        "returns.txt": "x\r\ny\rzz\r\nw\r\n",
        "lines.txt": "a\u2028b\nc\x85!\n",
        "café.py": "1\n3\n",
        "some space.py": "2\n",
        "néw/__init__.py": "",
        "néw/moved.py": before["moved.py"],
    }
    del after["moved.py"], after["gone.py"]
    git("init", "-q")
    for files, how in ((before, ["commit", "-qm", "before"]), (after, ["diff", "--cached", "-M", "--no-rename-empty"])):
        for old in before:
            (tmp_path / old).unlink(missing_ok=True)
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_bytes(text.encode())
        git("add", "-A")
        written = git(*how)
    patches = read_patch(written)
    changed = {path: text for path, text in after.items() if before.get(path) != text}
    assert patched(patches, before) == {**changed, "moved.py": None, "gone.py": None}
    assert "néw/__init__.py" not in files_of(patches) and "néw/moved.py" in files_of(patches)


def test_patch_refuses_other_texts() -> None:
    (patch,) = read_patch(diff({"a": "one\ntwo\n"}, {"a": "one\nthree\n"}))
    assert apply_patch(patch, "one\ntwo\nmore\n") == "one\nthree\nmore\n"
    for other in ("", "one\n", "0\none\ntwo\n"):
        with pytest.raises(ar.ConfigError, match="does not fit line 1"):
            apply_patch(patch, other)
    with pytest.raises(ar.ConfigError, match="which is not there"):
        patched([patch], {})
    with pytest.raises(ar.ConfigError, match="binary"):
        read_patch("Binary files a/x and b/x differ\n")
