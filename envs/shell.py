"""shell-v0: a small task in a sandboxed file system, graded on the final state of its files.

Task: count the lines of some files that have a word, find the file that has one, rename files, or mend a setting in
some. Tools: `shell` and `read_file`. Reward: `correct` (weight 1) if every file that matters is as it should be: read
from outside after the episode, so that nothing that is said or printed counts. Files that the task does not mention
have to be as they were; new ones are ignored.

Splits: `train`, `eval` and `dev` have other words, numbers and files.

The demonstrations write well-formed commands, but half of them do too much: they count or change what was not meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agent_rl import seeds
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Task
from agent_rl.envs.quiz import draw_task, one_call
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.calls import FileAccessError
from agent_rl.seeds import Stream
from agent_rl.tools.files import MAX_FILE, read_file
from agent_rl.tools.shell import shell

ANSWER = "answer.txt"
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeio"]


@dataclass(frozen=True, slots=True)
class World:
    """A task: the files at the beginning, and the changes to make."""

    question: str
    files: Mapping[str, str]
    changes: Mapping[str, str | None]
    """What has to be different in the end: a file's text, or None for one that is gone."""
    command: str
    """One that does it."""
    mistake: str
    """One that looks much like it."""


def _words(rng: np.random.Generator, n: int) -> list[str]:
    """Return different words."""
    picked = rng.choice(len(_SYLLABLES) ** 2, n, replace=False).tolist()
    return [_SYLLABLES[i // len(_SYLLABLES)] + _SYLLABLES[i % len(_SYLLABLES)] for i in picked]


def _count(rng: np.random.Generator) -> World:
    word, other, *names = _words(rng, 10)
    share = rng.uniform(0.2, 0.8)
    files = {
        f"logs/{name}.{'txt' if i % 4 == 0 else 'log'}": "".join(
            f"{n} {word if rng.random() < share else other}\n" for n in range(int(rng.integers(10, 40)))
        )
        for i, name in enumerate(names)
    }
    total = sum(text.count(word) for path, text in files.items() if path.endswith(".log"))
    question = f"How many lines of the .log files in logs have the word {word}? Write the number to {ANSWER}."
    command = f"cat logs/*.log | grep -c {word} > {ANSWER}"
    return World(question, files, {ANSWER: str(total)}, command, command.replace("*.log", "*"))


def _find(rng: np.random.Generator) -> World:
    word, *names = _words(rng, 13)
    paths = [f"data/{name[:2]}/{name}" for name in names]
    files = {path: "".join(f"{name}\n" for name in rng.permutation(names)) for path in paths}
    path = str(rng.choice(paths))
    files[path] += f"{word}\n"
    decoy = next(other for other in paths if other != path)
    files[decoy] += f"{word}x\n"
    question = f"Which file below data has the line {word}? Write its path, such as {decoy}, to {ANSWER}."
    command = f"grep -rlx {word} data > {ANSWER}"
    return World(question, files, {ANSWER: path}, command, command.replace("-rlx", "-rl"))


def _rename(rng: np.random.Generator) -> World:
    folder, other, *names = _words(rng, 12)
    paths = [f"{folder if i < 6 else other}/{name}" for i, name in enumerate(names)]
    old = {path: f"{path}.{'txt' if i % 2 else 'dat'}" for i, path in enumerate(paths)}
    files = {path: f"{rng.integers(10**6)}\n" for path in old.values()}
    changes: dict[str, str | None] = {}
    for path, name in old.items():
        if name.startswith(folder) and name.endswith(".txt"):
            changes |= {name: None, f"{path}.md": files[name]}
    question = f"Rename the .txt files in {folder}, and no others, so that they end in .md."
    command = f'for f in {folder}/*.txt; do mv "$f" "${{f%.txt}}.md"; done'
    return World(question, files, changes, command, command.replace(f"{folder}/", "*/"))


def _fix(rng: np.random.Generator) -> World:
    key, other, *names = _words(rng, 9)
    value, new = (str(n) for n in rng.choice(np.arange(10, 100), 2, replace=False))
    files, changes = {}, dict[str, str | None]()
    for i, name in enumerate(names):
        path = f"etc/{name}.{'old' if i % 3 == 0 else 'conf'}"
        lines = [f"{key}={value}", f"{key}={value}0", f"{other}={value}"]
        files[path] = "".join(f"{line}\n" for line in rng.permutation(lines))
        if path.endswith(".conf"):
            changes[path] = files[path].replace(f"{key}={value}\n", f"{key}={new}\n")
    question = f"In the .conf files in etc, change the lines {key}={value} to {key}={new}, and nothing else."
    command = f"sed -i 's/^{key}={value}$/{key}={new}/' etc/*.conf"
    return World(question, files, changes, command, command.replace("$/", "/"))


KINDS = (_count, _find, _rename, _fix)


def make_task(split: str, index: int) -> Task:
    """Draw a kind of task and its seed until they belong to the split."""

    def draw(rng: np.random.Generator) -> Task:
        return {"kind": int(rng.integers(len(KINDS))), "seed": int(rng.integers(2**48))}

    return draw_task(split, index, draw, "seed")


def world_of(task: Task) -> World:
    """Return the files of a task, and what is asked of them."""
    return KINDS[int(str(task["kind"]))](seeds.rng(Stream.WORLD, int(str(task["seed"]))))


@register("shell-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=8, seconds=120))
class Shell(SandboxedEnv):
    """Bring the files of a sandbox into the state that is asked for."""

    extra_tools = (shell, read_file)
    limits = Limits(memory=128 * 1024 * 1024, processes=16, disk=8 * 1024 * 1024, files=256)
    snapshot_attributes = ()

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Open a sandbox, write its files, and ask."""
        self.world = world_of(task)
        sandbox = await self.open_sandbox()
        for path, text in self.world.files.items():
            await sandbox.write_file(path, text.encode())
        return self.world.question

    @reward
    async def correct(self, episode: Episode) -> bool:
        """Whether every file is as it should be."""
        for path, text in {**self.world.files, **self.world.changes}.items():
            found = await self._text(path)
            if path == ANSWER and found is not None:
                found = found.strip()
            if found != text:
                return False
        return True

    async def _text(self, path: str) -> str | None:
        try:
            return (await self.sandbox.read_file(path, max_bytes=MAX_FILE)).decode(errors="replace")
        except FileAccessError:
            return None

    def oracle(self) -> Script:
        """Run the right command."""
        yield one_call("shell", command=self.world.command)
        yield "done"

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Run the right command, or one that does too much; misname it now and then."""
        if rng.random() < 0.1:
            yield one_call("shell", cmd=self.world.command)
        yield one_call("shell", command=self.world.command if rng.random() < 0.5 else self.world.mistake)
        yield "done"
