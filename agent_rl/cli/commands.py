"""The commands: what each is about, the function that it runs, its arguments and examples."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent_rl.cli import arguments


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or one that has others as its actions."""

    about: str
    runs: str = ""
    """The function of `agent_rl.cli` that runs it, `module:name`; it takes the arguments, and returns the status."""
    arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    """Adds them to its parser."""
    imports: bool = False
    """Whether it takes files that register environments."""
    stored: tuple[str, ...] = ()
    """The arguments that name stored episodes, which have to be there."""
    more: str = ""
    """The rest of its description, made when it is shown: a text of `agent_rl.cli` or a function, `module:name`."""
    examples: tuple[str, ...] = ()
    """Of one whose description has none."""
    aliases: tuple[str, ...] = ()
    actions: Mapping[str, Command] = field(default_factory=dict)


REPLAYS = {
    "verify": Command(
        "Play stored episodes again, and compare.",
        "verify:verify",
        arguments.add_verify,
        imports=True,
        stored=("file",),
        more="verify:HELP",
    ),
    "fork": Command(
        "Continue a stored episode from one of its turns, with another policy; what was before is replayed.",
        "replay:fork",
        arguments.add_fork,
        imports=True,
        stored=("file",),
        more="replay:fork_help",
    ),
}
JUDGED = "runs/latest/judged/rubric-gpt-5-mini.jsonl"
JUDGEMENTS = {
    "run": Command(
        "Judge stored episodes under a rubric; run again, make the judgements that are missing.",
        "judge:run",
        arguments.add_judging,
        stored=("file",),
        more="judge:judge_help",
    ),
    "estimate": Command(
        "Say what `judge run` would cost, and ask nothing.",
        "judge:estimate",
        arguments.add_judging,
        stored=("file",),
        more="judge:settings_help",
        examples=("agent-rl judge estimate runs/latest rubric.yaml judge.model=gpt-5-mini judge.prices=prices.yaml",),
    ),
    "report": Command(
        "Print judgements in numbers, or write them as a page.",
        "judge:report",
        arguments.add_judge_report,
        examples=(f"agent-rl judge report {JUDGED}", f"agent-rl judge report {JUDGED} --html judged.html"),
    ),
    "apply": Command(
        "Write the episodes with their scores as rewards, to learn from.",
        "judge:apply",
        arguments.add_judge_apply,
        examples=(
            f"agent-rl judge apply {JUDGED} -o judged-run",
            "agent-rl train algorithm=dpo episodes=judged-run start_from=runs/latest/checkpoint",
        ),
    ),
    "compare": Command(
        "Compare two judgements of the same episodes.",
        "judge:compare",
        arguments.add_judge_comparison,
        examples=("agent-rl judge compare one.jsonl other.jsonl",),
    ),
    "agree": Command(
        "Measure a judge's agreement with labels.",
        "judge:agree_with",
        arguments.add_judge_agreement,
        examples=(f"agent-rl judge agree {JUDGED} labels.csv",),
    ),
    "probe": Command(
        "Judge worthless answers and injections: none should be worth anything.",
        "judge:probe",
        arguments.add_judge_probe,
        more="judge:settings_help",
        examples=(
            "agent-rl judge probe rubric.yaml",
            "agent-rl judge probe rubric.yaml judge.model=gpt-5-mini --episodes runs/latest --limit 20",
        ),
    ),
    "lint": Command(
        "Find what is wrong with a rubric, without a model.",
        "judge:lint",
        arguments.add_rubric,
        examples=("agent-rl judge lint rubric.yaml",),
    ),
}
SANDBOXES = {
    "doctor": Command(
        "say what sandboxes guarantee on this machine, and what to do about it",
        "sandbox:sandbox_doctor",
        examples=("agent-rl sandbox doctor",),
    ),
    "build-image": Command(
        "make Docker's base image of this interpreter, offline",
        "sandbox:build_image",
        arguments.add_image,
        examples=(
            "agent-rl sandbox build-image",
            "agent-rl rollout env=python-v0 env_args.sandbox=docker policy=oracle",
        ),
    ),
    "serve": Command(
        "open sandboxes for clients elsewhere: env_args.sandbox=remote there",
        "sandbox:serve_sandboxes",
        arguments.add_sandbox_server,
        imports=True,
        examples=(
            "agent-rl sandbox serve --port 8001 --capacity 64",
            "agent-rl sandbox serve --backend docker image=python:3.12-slim",
            "agent-rl rollout env=python-v0 policy=oracle env_args.sandbox=remote "
            "env_args.sandbox_args.url=http://127.0.0.1:8001",
        ),
    ),
}
COMMANDS = {
    "envs": Command(
        "list the registered environments",
        "listing:list_envs",
        arguments.add_envs,
        imports=True,
        examples=("agent-rl envs", "agent-rl envs --import my_envs.py"),
    ),
    "check": Command(
        "find what is wrong with an environment, and what policies without skill score in it, without a model",
        "check:check",
        arguments.add_check,
        imports=True,
        more="check:check_help",
    ),
    "serve": Command(
        "play environments for clients elsewhere: env=http://HOST:PORT/NAME there",
        "serve:serve",
        arguments.add_server,
        imports=True,
        examples=(
            "agent-rl serve search-v0 sql-v0",
            "agent-rl serve --import shop.py shop-v0 --port 9000 --capacity 256",
        ),
    ),
    "train": Command(
        "train a model on an environment; by default a small one: warm start, then reinforcement learning",
        "training:train",
        arguments.add_training,
        imports=True,
        more="training:train_help",
    ),
    "rollout": Command(
        "run episodes without training, print them as a table, and store them",
        "episodes:rollout",
        arguments.add_rollout,
        imports=True,
        more="episodes:rollout_help",
    ),
    "play": Command(
        "play an environment yourself, in the terminal; the episode is stored as a demonstration",
        "play:play",
        arguments.add_play,
        imports=True,
        more="play:play_help",
    ),
    "chat": Command(
        "talk to a model in the terminal; with an environment's tools, which really run, if one is given",
        "chat:talk",
        arguments.add_chat,
        imports=True,
        more="chat:chat_help",
    ),
    "doctor": Command(
        "say what Ray's cluster lacks for a run: doctor backend=verl hardware=NAME",
        "training:doctor",
        arguments.add_doctor,
        imports=True,
        examples=("agent-rl doctor backend=verl", "agent-rl doctor backend=verl hardware=gpu_8x80gb start_from=MODEL"),
    ),
    "algorithms": Command(
        "list the algorithms and the parts that they are made of, with formulas",
        "listing:list_algorithms",
        imports=True,
        examples=("agent-rl algorithms", "agent-rl algorithms --import my_parts.py"),
    ),
    "runs": Command(
        "list the runs of a folder: how far they are, their success, episodes and size",
        "runs:print_runs",
        arguments.add_runs,
        examples=("agent-rl runs", "agent-rl runs /data/runs --json"),
    ),
    "episodes": Command(
        "list the episodes of a run that fit: as a table, as JSON, or only how many",
        "view:list_episodes",
        arguments.add_listing,
        stored=("file",),
        more="view:EPISODES_HELP",
    ),
    "view": Command(
        "read stored episodes: a table of those that fit, or one in full",
        "view:view",
        arguments.add_selection,
        more="view:HELP",
    ),
    "stats": Command(
        "show a run in numbers, and what went wrong in it; or compare two, by the tasks that both played",
        "stats:stats",
        arguments.add_statistics,
        stored=("first", "second"),
        examples=(
            "agent-rl stats runs/latest",
            "agent-rl stats runs/latest --where 'step>=15' --departures",
            "agent-rl stats runs/20261122-101500-rollout runs/20261122-103000-rollout",
            "agent-rl stats runs/one runs/other --where purpose=eval --where step=100 --by level",
        ),
        aliases=("compare",),
    ),
    "diff": Command(
        "compare two episodes, to the first differing token and side by side; exit status 1 if they differ",
        "diff:diff",
        arguments.add_difference,
        stored=("file",),
        examples=(
            "agent-rl diff runs/latest train-00003-001-04 train-00003-001-05",
            "agent-rl diff runs/one eval-00100-greedy-0000 --other runs/other",
        ),
    ),
    "replay": Command(
        "play stored episodes again: verify them, or continue one from any of its turns",
        examples=(
            "agent-rl replay verify runs/latest",
            "agent-rl replay fork runs/latest train-00010-003-00 --at-turn 2 policy=runs/latest n=8",
        ),
        actions=REPLAYS,
    ),
    "export": Command(
        "write stored episodes in another system's format, or a checkpoint's model for other tools",
        "export:export",
        arguments.add_export,
        more="formats:formats_help",
    ),
    "import": Command(
        "read conversations of other systems as episodes, to judge, view and compare them",
        "formats:import_",
        arguments.add_import,
        examples=(
            "agent-rl import conversations.jsonl -o imported/episodes.jsonl",
            "agent-rl import jobs/2026-02-09 --from atif -o imported/episodes.jsonl --env swe-v0",
        ),
    ),
    "judge": Command(
        "judge stored episodes under rubrics, and measure judges",
        examples=("agent-rl judge lint rubric.yaml", "agent-rl judge run runs/latest rubric.yaml"),
        actions=JUDGEMENTS,
    ),
    "init": Command(
        "write a small project: an environment, tasks, settings and a test, ready to train on",
        "project.init:init",
        arguments.add_init,
        examples=("agent-rl init my-env",),
    ),
    "completion": Command(
        "print a script that completes commands: source <(agent-rl completion bash)",
        "completion:print_completion",
        arguments.add_completion,
        examples=("source <(agent-rl completion bash)", "source <(agent-rl completion zsh)"),
    ),
    "sandbox": Command(
        "look after the places where model-written code runs",
        examples=("agent-rl sandbox doctor", "agent-rl sandbox serve --port 8001 --capacity 64"),
        actions=SANDBOXES,
    ),
}
