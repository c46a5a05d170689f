"""Adapters of protocols, on stand-ins; tests/adapters has the packages themselves."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import agent_rl as ar
from agent_rl.envs.adapters.harbor import MAX_REWARD, _number_of_json
from agent_rl.envs.quiz import one_call
from agent_rl.policy import Scripted
from tests.sandbox.backends import BACKENDS, readable_python


class Coin:
    """A game as GEM's are: it draws from the global random numbers."""

    def __init__(self, sides: int = 2) -> None:
        self.sides = sides

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, object]]:
        random.seed(seed)
        self.left = 3
        self.face = random.randrange(self.sides)
        return "Which side?", {"suffix": f"A number below {self.sides}."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        hit, self.left = action == str(self.face), self.left - 1
        shown, self.face = self.face, random.randrange(self.sides)
        return f"It was {shown}.", float(hit), hit, not hit and self.left == 0, {}


@pytest.mark.parametrize("game", [Coin, Coin(50), lambda sides=9: Coin(sides)])
def test_gem_objects_play_their_own_random_numbers(game: object) -> None:
    ar.register("protocols-test/coin-v0")(type("Tossed", (ar.from_gem(game),), {}))
    ar.run("protocols-test/coin-v0", "random")  # imports rich, which draws
    state = random.getstate()
    alone = [ar.run("protocols-test/coin-v0", "random", n=n)[-1] for n in (1, 2, 3, 4)]
    together = ar.run("protocols-test/coin-v0", "random", n=4)
    assert random.getstate() == state
    assert [e.messages for e in alone] == [e.messages for e in together]
    assert {e.turns for e in together} <= {1, 2, 3} and together[0].messages[0].content.startswith("Which side?\nA num")
    assert {finding.check for finding in ar.check("protocols-test/coin-v0", n=4).findings} <= {"floor"}


def test_gem_arguments_and_mistakes_are_named() -> None:
    ar.register("protocols-test/five-v0")(ar.from_gem(Coin, sides=5))
    assert "below 5" in ar.run("protocols-test/five-v0", "empty")[0].messages[0].content
    assert "below 7" in ar.run("protocols-test/five-v0", "empty", env_args={"sides": 7})[0].messages[0].content
    with pytest.raises(ar.ConfigError, match="3 is no game"):
        ar.from_gem(3)
    with pytest.raises(ar.ConfigError, match="pip install gem-llm"):
        ar.from_gem("game:Sudoku-v0")


class Race:
    """A game as TextArena's are: who says "go" first wins."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.turn, self.rewards = 0, dict[int, float]()
        self.state = type("State", (), {"role_mapping": {0: "Zero", 1: "One"}})

    def get_observation(self) -> tuple[int, list[tuple[int, str]]]:
        return self.turn, [(-1, "Say go."), (1 - self.turn, "I wait."), (self.turn, "my own")]

    def step(self, action: str) -> tuple[bool, dict[str, object]]:
        if action == "go":
            self.rewards = {self.turn: 1.0, 1 - self.turn: -1.0}
        self.turn = 1 - self.turn
        return bool(self.rewards), {}

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, object]]]:
        return self.rewards, {0: {"reason": "gone"}, 1: {}}


@pytest.mark.parametrize(("move", "answer", "end"), [("go", "go", (-1.0, 1)), ("wait", "go", (1.0, 1))])
def test_textarena_opponent_may_win_before_the_first_turn(move: str, answer: str, end: tuple[float, int]) -> None:
    adapted = ar.from_textarena(Race, player=1, opponents=lambda text: move)
    ar.register("protocols-test/race-v0")(type("Raced", (adapted,), {}))
    (episode,) = ar.run("protocols-test/race-v0", {"name": "constant", "text": answer})
    assert (episode.reward, episode.turns, episode.outcome) == (*end, ar.Outcome.TERMINATED), episode.error
    if move == "wait":
        assert episode.messages[0].content == "[Player -1] Say go.\n[Zero] I wait."
    assert {finding.check for finding in ar.check("protocols-test/race-v0", n=2).findings} <= {"floor", "termination"}


class Oldest:
    """A game with less than GEM's: no seed, no info at the start, one value for the end."""

    def reset(self) -> str:
        return f"Say {random.randrange(1000)}."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, object]]:
        return "Done.", 1.0, True, {}


class Bare:
    """A game with less than TextArena's: no seed, no names, rewards without an info."""

    def reset(self, num_players: int) -> None:
        self.done = False

    def get_observation(self) -> tuple[int, list[tuple[int, str]]]:
        return 0, [(-1, "Say go.")]

    def step(self, action: str) -> tuple[bool, None]:
        return True, None

    def close(self) -> dict[int, float]:
        return {0: 1.0}


@pytest.mark.parametrize("adapted", [ar.from_gem(Oldest), ar.from_textarena(Bare())])
def test_games_with_less_than_the_interface_are_played(adapted: type[ar.Env]) -> None:
    ar.register("protocols-test/less-v0")(type("Less", (adapted,), {}))
    first, again = (ar.run("protocols-test/less-v0", "random")[0] for _ in range(2))
    assert (first.reward, first.outcome) == (1.0, ar.Outcome.TERMINATED), first.error
    assert first.messages == again.messages and "Say" in first.messages[0].content


GREET = "Write a greeting to greeting.txt."
SPLITS = {"train": 3, "eval": 1}
GRADE = """#!/bin/sh
if [ "$(cat greeting.txt)" = "hello $(cat who.txt)" ]; then good=1; else good=0.25; fi
"""


def write_task(folder: Path, name: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)


def harbor_task(folder: Path, name: str = "greet", end: str = 'echo $good > "$LOGS_DIR/verifier/reward.txt"') -> None:
    files = {
        "task.toml": '[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 20.0\n',
        "instruction.md": f"{GREET}\n",
        "environment/who.txt": "you",
        "solution/solve.sh": '#!/bin/sh\ncat "$TASK/solution/start" who.txt > greeting.txt\n',
        "solution/start": "hello ",
        "solution/noise": random.Random(0).randbytes(150_000).hex(),  # more than one command takes
        "tests/test.sh": GRADE + end,
    }
    write_task(folder, name, files)


def test_harbor_tasks_are_solved_and_graded(tmp_path: Path) -> None:
    harbor_task(tmp_path)
    harbor_task(tmp_path, "more/json", 'echo "{\\"reward\\": $good}" > "$LOGS_DIR/verifier/reward.json"')
    harbor_task(tmp_path, "more/nothing", "exit 3")
    old = {"task.yaml": "instruction: |-\n  Greet.\ncategory: old\n", "who.txt": "me", "tests/a.txt": "!"}
    old |= {
        "run-tests.sh": GRADE + 'cat "$TEST_DIR/a.txt" && [ $good = 1 ]',
        "solution.sh": "echo hello me > greeting.txt",
    }
    write_task(tmp_path, "old", old)
    tasks = type("Tasks", (ar.from_harbor(tmp_path),), {})
    ar.register("protocols-test/harbor-v0")(tasks)
    local = {"sandbox": "local"}
    for policy, earned in (("oracle", (1.0, 1.0, 0.0, 1.0)), ("nothing", (0.25, 0.25, 0.0, 0.0))):
        splits = [ar.run("protocols-test/harbor-v0", policy, n=n, split=s, env_args=local) for s, n in SPLITS.items()]
        played = {str(episode.task["name"]): episode for episodes in splits for episode in episodes}
        assert [played[name].reward for name in ("greet", "more/json", "more/nothing", "old")] == list(earned), played
    assert played["greet"].task == {"name": "greet", "instruction": GREET, "difficulty": "easy"}
    assert played["old"].messages[0].content == "Greet." and played["old"].task["category"] == "old"
    one = type("One", (ar.from_harbor(tmp_path / "greet"),), {})
    ar.register("protocols-test/one-v0")(one)
    assert ar.run("protocols-test/one-v0", Scripted(cheat), env_args=local)[0].reward == 0.25


def test_harbor_shows_no_policy_tests_or_solution(tmp_path: Path) -> None:
    own = {"task.yaml": "instruction: Greet.", "solution.sh": "", "run-tests.sh": "exit 1", "tests/a/b.py": ""}
    write_task(tmp_path, "old", own | {"who.txt": "me", "app/tests/c.py": ""})
    ar.register("protocols-test/own-v0")(type("Own", (ar.from_harbor(tmp_path),), {}))

    def look(env: ar.Env, seed: int) -> ar.Script:
        (answer,) = yield one_call("shell", command="find . -type f | sort")
        assert answer.content.split() == ["./app/tests/c.py", "./who.txt"]
        yield "done"

    (episode,) = ar.run("protocols-test/own-v0", Scripted(look), env_args={"sandbox": "local"})
    assert episode.error is None, episode.error


def test_harbor_takes_each_task_once_whatever_files_it_has(tmp_path: Path) -> None:
    harbor_task(tmp_path)
    write_task(tmp_path, "greet", {"task.yaml": "instruction: Old.", "environment/app/task.yaml": "steps: []"})
    harbor_task(tmp_path, "more/greet")
    assert [task["name"] for task in ar.from_harbor(tmp_path).default_tasks] == ["greet", "more/greet"]


def test_harbor_tests_may_run_programs_of_theirs(tmp_path: Path) -> None:
    harbor_task(tmp_path, end='echo "$("$TEST_DIR/more/check")" > "$LOGS_DIR/verifier/reward.txt"')
    write_task(tmp_path, "greet", {"tests/more/check": "#!/bin/sh\necho 0.5\n"})
    ar.register("protocols-test/programs-v0")(type("Programs", (ar.from_harbor(tmp_path),), {}))
    assert ar.run("protocols-test/programs-v0", "nothing", env_args={"sandbox": "local"})[0].reward == 0.5


@pytest.mark.parametrize(("last", "earned"), [("PASSED t.py::a", 1.0), ("FAILED t.py::a", 0.0), ("ERROR t.py", 0.0)])
def test_harbor_reads_what_old_tests_sum_up(tmp_path: Path, last: str, earned: float) -> None:
    said = f"FAILED was printed by a test\n{'.' * 9000}\n==== short test summary info ====\nPASSED t.py::b\n{last}\n"
    script = f"cat <<'END'\n{said}\nEND\necho The tests are done.\n"
    write_task(tmp_path, "old", {"task.yaml": "instruction: Greet.", "run-tests.sh": f"#!/bin/sh\n{script}"})
    ar.register("protocols-test/summed-v0")(type("Summed", (ar.from_harbor(tmp_path),), {}))
    assert ar.run("protocols-test/summed-v0", "nothing", env_args={"sandbox": "local"})[0].reward == earned


def test_harbor_tests_that_take_too_long_earn_nothing(tmp_path: Path) -> None:
    harbor_task(tmp_path, end='echo 1 > "$LOGS_DIR/verifier/reward.txt"; sleep 60')
    write_task(tmp_path, "greet", {"task.toml": "[verifier]\ntimeout_sec = 0.5\n"})
    ar.register("protocols-test/late-v0")(type("Late", (ar.from_harbor(tmp_path),), {}))
    assert ar.run("protocols-test/late-v0", "nothing", env_args={"sandbox": "local"})[0].reward == 0.0


def test_harbor_gives_each_part_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "ours")
    harbor_task(tmp_path, end='echo "$(cat seen)$B${SECRET:-2}" > "$LOGS_DIR/verifier/reward.txt"')
    tables = ("environment.env]\nA='1'", "verifier.env]\nB='${B:-.5}'\nSECRET='${SECRET}'", "solution.env]\nC='3'")
    write_task(tmp_path, "greet", {"task.toml": "\n".join(f"[{table}" for table in tables)})
    write_task(tmp_path, "greet", {"solution/solve.sh": "#!/bin/sh\necho $A$B$C > seen"})
    ar.register("protocols-test/variables-v0")(type("Variables", (ar.from_harbor(tmp_path),), {}))
    (episode,) = ar.run("protocols-test/variables-v0", "oracle", env_args={"sandbox": "local"})
    assert episode.reward == 13.52, episode.error
    write_task(tmp_path, "greet", {"task.toml": "[verifier.env]\nA=1"})
    with pytest.raises(ar.ConfigError, match="env has A=1, which is no text"):
        ar.from_harbor(tmp_path)


HOSTILE = {
    "empty": "{}",
    "digits": '{"reward": 1%s}' % ("0" * 400),
    "deep": "[" * 4000,
    "list": '["reward"]',
    "null": "null",
    "infinite": '{"reward": 1e999}',
    "nested": '{"reward": {"reward": 1}}',
    "surrogate": '{"reward": "\\ud800"}',
}
"""What code of the policy's, which runs in the tests, may leave in reward.json."""


@pytest.mark.parametrize("name", [*HOSTILE, "large", "large text"])
def test_harbor_takes_no_hostile_file_for_a_reward(tmp_path: Path, name: str) -> None:
    text = HOSTILE.get(name, '{"reward": 1}' + " " * MAX_REWARD)
    kind = "txt" if name == "large text" else "json"
    harbor_task(tmp_path, end=f"""cat >"$LOGS_DIR/verifier/reward.{kind}" <<'END'\n{text}\nEND""")
    ar.register("protocols-test/hostile-v0")(type("Hostile", (ar.from_harbor(tmp_path),), {}))
    (episode,) = ar.run("protocols-test/hostile-v0", "nothing", env_args={"sandbox": "local"})
    assert episode.reward == 0.0, episode.error


@pytest.mark.parametrize("text", [*HOSTILE.values(), "[" * 100_000, "\xff", "1"])
def test_harbor_reads_no_number_of_hostile_json(text: str) -> None:
    assert _number_of_json(text.encode("latin-1")) is None


def test_harbor_ends_jobs_before_the_tests(tmp_path: Path) -> None:
    write = "until test -d $LOGS_DIR; do sleep 0.01; done; while :; do touch beat; sleep 0.01; done"

    def work(env: ar.Env, seed: int) -> ar.Script:
        yield one_call("shell", command="echo hello you > greeting.txt")
        yield one_call("shell", command=write, background=True)
        yield "done"

    earned = []
    for keeps, wait in ((False, "sleep 0.2"), (True, "until test -e beat; do sleep 0.01; done")):
        name = f"jobs{keeps:d}"
        harbor_task(tmp_path / name, end=f'{wait}; test -e beat && echo $good > "$LOGS_DIR/verifier/reward.txt"')
        solution = tmp_path / name / "greet" / "solution" / "solve.sh"
        solution.write_text(f"#!/bin/sh\necho hello you > greeting.txt\n({write}) &\n")
        tasks = type(name.title(), (ar.from_harbor(tmp_path / name),), {"keeps_jobs": keeps})
        ar.register(f"protocols-test/{name}-v0")(tasks)
        for policy in (Scripted(work), "oracle"):
            (episode,) = ar.run(f"protocols-test/{name}-v0", policy, env_args={"sandbox": "local"})
            earned.append(episode.reward)
    assert earned == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(("more", "is_fresh"), [("", True), ("head -c 17M /dev/urandom > much", False)])
def test_harbor_tests_run_in_a_fresh_sandbox(tmp_path: Path, more: str, *, is_fresh: bool) -> None:
    look = 'if test -e /dev/shm/left; then good=0.5; fi; echo $good > "$LOGS_DIR/verifier/reward.txt"'
    harbor_task(tmp_path, end=look)

    def work(env: ar.Env, seed: int) -> ar.Script:
        (said,) = yield one_call("shell", command=f"echo hello you > greeting.txt; touch /dev/shm/left; {more}")
        assert said.content == ""
        yield "done"

    name = f"protocols-test/fresh-{is_fresh:d}-v0"
    ar.register(name)(type("Fresh", (ar.from_harbor(tmp_path),), {}))
    (episode,) = ar.run(name, Scripted(work), env_args={"sandbox": "local"})
    assert episode.reward == (1.0 if is_fresh else 0.5), episode.error


@pytest.mark.sandbox
def test_harbor_tests_run_in_the_folder_of_the_files(tmp_path: Path) -> None:
    if BACKENDS["landlock"].refused():
        pytest.skip("the kernel has no Landlock")
    look = 'if test "$(cat place)" = "$PWD"; then good=0.5; fi; echo $good > "$LOGS_DIR/verifier/reward.txt"'
    harbor_task(tmp_path, end=look)

    def work(env: ar.Env, seed: int) -> ar.Script:
        yield one_call("shell", command="pwd > place")
        yield "done"

    ar.register("protocols-test/place-v0")(type("Place", (ar.from_harbor(tmp_path),), {}))
    tier = {"tier": "landlock", "python": readable_python()}
    (episode,) = ar.run("protocols-test/place-v0", Scripted(work), env_args={"sandbox": "local", "sandbox_args": tier})
    assert episode.reward == 0.5, episode.error


def cheat(env: ar.Env, seed: int) -> ar.Script:
    """Leaves a reward, and folders that nothing can be written to."""
    reward = 'mkdir -p "$LOGS_DIR/verifier" && echo 1 > "$LOGS_DIR/verifier/reward.txt"'
    (answer,) = yield one_call("shell", command=f'{reward}; mkdir -p "$TASK/tests/test.sh"; chmod 0 "$TASK/tests"')
    assert answer.content == ""
    yield "done"


def test_trl_class_has_tools_that_come_with_reset() -> None:
    @ar.tool
    def look() -> str:
        """Look."""
        return "seen"

    class Later(ar.ToolEnv):
        def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
            self.box = {"look": look}
            return "hi"

        @property
        def toolbox(self):  # type: ignore[no-untyped-def]
            return self.box

    ar.register("later-tools-v0", tasks={"train": [{"n": 1}]})(Later)
    env = ar.as_trl("later-tools-v0")()
    assert env.reset() == "hi" and env.look() == "seen"  # type: ignore[attr-defined]


def test_harbor_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ar.ConfigError, match="has no tasks"):
        ar.from_harbor(tmp_path)
    write_task(tmp_path, "one", {"task.toml": "", "instruction.md": "Do."})
    with pytest.raises(ar.ConfigError, match=r"one is no task: it has no tests/test\.sh"):
        ar.from_harbor(tmp_path)
    write_task(tmp_path, "one", {"task.toml": "= 3"})
    with pytest.raises(ar.ConfigError, match="one is no task: TOMLDecodeError"):
        ar.from_harbor(tmp_path)
    for text, error in (("environment = 3", "AttributeError"), ("metadata = 3", "TypeError")):
        write_task(tmp_path, "one", {"task.toml": text})
        with pytest.raises(ar.ConfigError, match=f"one is no task: {error}"):
            ar.from_harbor(tmp_path)
    (tmp_path / "one" / "task.toml").unlink()
    for text in ("- a", "a: [", "3"):
        write_task(tmp_path, "one", {"task.yaml": text})
        with pytest.raises(ar.ConfigError, match="one is no task"):
            ar.from_harbor(tmp_path)


def test_trl_class_plays_tools_answers_and_ends() -> None:
    calculator = ar.as_trl("calculator-v0", split="eval", seed=3)
    env = calculator()
    assert env.get_reward() is None and env.answer("1") == "The episode is over."
    row, other = calculator.rows(2)
    question = env.reset(**row)
    solution = next(e for e in ar.run("calculator-v0", n=1, split="eval") if e.messages[0].content in question)
    results = iter([message.content for message in solution.messages if message.role == "tool"])
    for message in solution.messages:
        for call in message.tool_calls:
            said = env.calculator(**call.arguments)  # type: ignore[attr-defined]
            assert said == next(results)
    assert env.answer(solution.final_text) == "The episode is over." and env.get_reward() == solution.reward
    assert env.reset(**other) != question and "error" in env.calculator(expression=())  # type: ignore[attr-defined]
    assert env.get_reward() == 0.0 and env.answer("1") == "The episode is over."
    ar.register("one-task-v0", tasks={"train": [dict(solution.task)]})(ar.spec("calculator-v0").cls)
    only = ar.as_trl("one-task-v0")()
    assert only.reset() == only.reset() == question, "rows without a task have the split's, again and again"
    with pytest.raises(ar.ConfigError, match="no split 'evil'"):
        ar.as_trl("calculator-v0", split="evil")
