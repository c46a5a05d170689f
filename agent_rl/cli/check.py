"""`agent-rl check`: find what is wrong with an environment."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from agent_rl.checks.check import CheckSettings, check_env
from agent_rl.checks.report import CheckReport, Finding
from agent_rl.cli.config_text import list_settings
from agent_rl.cli.settings import settings_of
from agent_rl.config import load_config
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import EnvSpec, load_all_once, spec
from agent_rl.judge.build import build_judge
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.lint import lint
from agent_rl.judge.reward import judge_rewards, use_judge
from agent_rl.judge.run import check_judges
from agent_rl.view.tables import print_whole


class JudgedCheckSettings(CheckSettings):
    """What `agent-rl check` takes."""

    judge: JudgeConfig = JudgeConfig()


EXAMPLES = """
examples:
  agent-rl check search-v0
  agent-rl check --import shop.py shop-v0 n=32 --json
  agent-rl check python-v0 env_args.sandbox=docker"""


def check_help() -> str:
    """Return the settings of a check and examples, for `--help`."""
    return f"\n\nsettings:\n{list_settings(JudgedCheckSettings(), without={'env'})}\n{EXAMPLES}"


def check(arguments: argparse.Namespace) -> int:
    """Check an environment; return 1 if there is a finding."""
    given = settings_of(arguments)
    if "env" in given:
        raise ConfigError(f"env={given['env']}: name the environment without `env=`, as in agent-rl check search-v0")
    settings = load_config(None, JudgedCheckSettings, settings=given | {"env": arguments.env})
    load_all_once(settings.imports)
    env, n, seconds = spec(settings.env), settings.n, settings.seconds
    check_judges(settings.judge, env)
    with closing(build_judge(settings.judge)) as judge, use_judge(judge if settings.judge.model else None):
        report = check_env(env, n=n, seed=settings.seed, seconds=seconds, env_args=settings.env_args)
    report = replace(report, findings=(*report.findings, *_of_rubrics(env)))
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    return 0 if report.ok else 1


def _of_rubrics(env: EnvSpec) -> Iterator[Finding]:
    """Yield what is wrong with the rubrics of an environment's judges."""
    for _, given in judge_rewards(env):
        if (rubric := given.rubric) is not None:
            for found in lint(rubric):
                where = f"{rubric.name}: {found.where}" if found.where else rubric.name
                yield Finding(f"rubric-{found.check}", found.what, where, found.mend)


def _print(report: CheckReport) -> None:
    policies = list(dict.fromkeys(score.policy for score in report.scores))
    table = Table("split", *policies, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for split in dict.fromkeys(score.split for score in report.scores):
        table.add_row(split, *(str(report.score(policy, split)) for policy in policies))
    console = Console()
    print_whole(table, console)
    print(f"{report.microseconds_per_turn:.0f} microseconds of CPU a turn, without a model")
    for name, why in report.skipped.items():
        print(f"{name} is not checked: {why}")
    for finding in report.findings:
        print(f"\n{finding}")
    count = len(report.findings)
    print(f"{report.env}: {'no finding' if report.ok else f'{count} finding' + 's' * (count > 1)}")
