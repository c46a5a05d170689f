"""`agent-rl judge`: stored episodes judged under rubrics, and judges measured."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from pathlib import Path

from rich.console import Console

from agent_rl.cli.config_text import list_settings
from agent_rl.cli.settings import settings_of
from agent_rl.config import Section, load_config
from agent_rl.core.display import plural
from agent_rl.errors import ConfigError
from agent_rl.judge.agreement import agree, families_of
from agent_rl.judge.apply import apply_judged, episodes_of
from agent_rl.judge.build import build_judge
from agent_rl.judge.compare import compare_judgements
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.files import load_rubric
from agent_rl.judge.judged import Judged, load_judged
from agent_rl.judge.labels import read_labels
from agent_rl.judge.model import ModelJudge
from agent_rl.judge.offline import Judging, Plan, plan_judging, read_rubric, require_use
from agent_rl.judge.summary import summarise_judged
from agent_rl.rollout.usage import load_prices
from agent_rl.runs.commands import command
from agent_rl.runs.stop import Stop
from agent_rl.store.episodes import read_episodes
from agent_rl.view.conversation import clean
from agent_rl.view.judged import print_agreement, print_comparison, print_summary
from agent_rl.view.progress import Progress
from agent_rl.view.results import dump_results

EXAMPLES = """
examples:
  agent-rl judge run runs/latest rubric.yaml                             a rubric of rules
  agent-rl judge run runs/latest rubric.yaml judge.model=gpt-5-mini judge.samples=3
  agent-rl judge run runs/latest rubric.yaml judge.model=m judge.base_url=http://localhost:8000/v1 -o judged/a.jsonl
  agent-rl judge run runs/latest task:rubric judge.model=gpt-5-mini --where 'reward<0.5' --limit 100"""


class JudgeSettings(Section):
    """The settings of a command line that names a judge."""

    judge: JudgeConfig = JudgeConfig()


def settings_help() -> str:
    """Return the settings of a judge, for `--help`."""
    return f"\n\nsettings, each with `judge.` before it:\n{list_settings(JudgeConfig())}"


def judge_help() -> str:
    """Return the same, and examples of `judge run`."""
    return f"{settings_help()}\n{EXAMPLES}"


def run(arguments: argparse.Namespace) -> int:
    """Judge episodes, and print what the judge said."""
    plan = _plan(arguments)
    with Progress() as progress, plan.open_judge() as judge, plan.open_file(judge) as writer:
        judging = Judging(plan, judge, writer, _progress(progress, plan))
        stop = Stop(progress.say, "Stopping; Ctrl-C again does not wait for what is under way.")
        is_stopped = _judge(judging, stop)
        logged, cost = (judge.caller.logged, judge.cost) if isinstance(judge, ModelJudge) else (0, 0.0)
    judged = load_judged(plan.out)
    number = len(judged.episodes)
    state = f"{plural(number, 'episode')} {'is' if number == 1 else 'are'} judged in {plan.out}"
    again = f"continue with: {_again(arguments)}"
    if is_stopped:
        print(f"Stopped; {state}; {again}")
        return 130
    _print(judged, plan.config.prices, as_json=False)
    if logged:
        print(f"{plural(logged, 'call')} {'was' if logged == 1 else 'were'} in {plan.calls}, and not made again")
    if judging.is_out_of_money:
        limit = f"judge.max_cost={plan.config.max_cost:g}"
        raise ConfigError(f"the calls have cost {cost:.4g} ({limit}); {state}; {again}")
    page = command("judge", "report", str(plan.out), "--html", str(plan.out.with_suffix(".html")))
    print(f"{plural(number, 'judgement')} in {plan.out}; as a page: {page}")
    return 0


def _judge(judging: Judging, stop: Stop) -> bool:
    """Judge all that is left; return whether it was stopped."""

    async def work() -> None:
        stop.cancel_when_asked()
        await judging.run()

    try:
        with stop.on_signals():
            asyncio.run(work())
    except (asyncio.CancelledError, KeyboardInterrupt):
        return True
    return False


def estimate(arguments: argparse.Namespace) -> int:
    """Print what judging would cost."""
    from agent_rl.judge.estimate import ENOUGH, estimate_cost

    plan = _plan(arguments)
    found = estimate_cost(plan)
    print(f"calls: {found.calls:,} for {plural(found.episodes, 'episode')}; {found.logged:,} are in {plan.calls}")
    about = "" if found.is_counted else "~"
    print(f"tokens: {about}{_span(found.input_tokens, ',.0f')} in, ~{_span(found.output_tokens, ',.0f')} out")
    if found.cost is not None:
        print(f"cost: ~{_span(found.cost, '.4g')}")
    if found.calls:
        seen = f"what {found.seen} logged calls took" if found.seen >= ENOUGH else "a guess, for want of logged calls"
        print(f"~ is {seen}; replies that have to be asked for again, and reasoning before a reply, come on top")
    return 0


def _span(span: tuple[float, float], form: str) -> str:
    low, high = (format(value, form) for value in span)
    return low if low == high else f"{low} to {high}"


def report(arguments: argparse.Namespace) -> int:
    """Print a judged file in numbers, or write it as a page."""
    judged = load_judged(arguments.judged)
    if arguments.html is None:
        _print(judged, arguments.prices, as_json=arguments.json)
        return 0
    from agent_rl.view.judged_html import write_judged_report

    episodes = read_episodes(episodes_of(judged, arguments.episodes))
    summary = summarise_judged(judged, load_prices(arguments.prices) if arguments.prices else None)
    print(f"Wrote {write_judged_report(arguments.html, judged, summary, episodes)}")
    return 0


def apply(arguments: argparse.Namespace) -> int:
    """Write the judged episodes with their scores as rewards."""
    judged = load_judged(arguments.judged)
    out = arguments.out or Path(arguments.judged).with_suffix(".episodes.jsonl")
    applied = apply_judged(
        judged, out, mode="add" if arguments.add else "replace", weight=arguments.weight, episodes=arguments.episodes
    )
    left_out = f"; {applied.left_out} without a judgement are left out" if applied.left_out else ""
    print(f"{plural(applied.written, 'episode')} in {applied.file}, {applied.unscored} of them unscored{left_out}")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Print how two judgements of the same episodes differ."""
    first, second = load_judged(arguments.first), load_judged(arguments.second)
    found = compare_judgements(first.judgements, second.judgements, first.tasks)
    if arguments.json:
        print(dump_results(asdict(found)), end="")
    else:
        print_comparison(found, Console())
    return 0


def agree_with(arguments: argparse.Namespace) -> int:
    """Print how far a judge agrees with labels."""
    judged = load_judged(arguments.judged)
    if judged.header.rubric is None:
        raise ConfigError(f"{arguments.judged}: each task has its own rubric there; agree takes one rubric for all")
    labels = read_labels(arguments.labels)
    families = None
    if not any(label.family for label in labels) and _has_episodes(judged, arguments.episodes):
        families = families_of(read_episodes(episodes_of(judged, arguments.episodes)))
    found = agree(judged.judgements, labels, judged.header.rubric, families, judged.tasks)
    if arguments.json:
        print(dump_results(asdict(found)), end="")
    else:
        print_agreement(found, Console())
    return 0


def _has_episodes(judged: Judged, given: str | None) -> bool:
    return given is not None or (judged.header.episodes is not None and Path(judged.header.episodes.file).exists())


def probe(arguments: argparse.Namespace) -> int:
    """Judge worthless answers in the place of real ones; return 1 if one is worth something."""
    from agent_rl.judge.probes import probe as probed
    from agent_rl.view.judged import print_probes

    rubric, key = read_rubric(arguments.rubric)
    if rubric is None:
        raise ConfigError(f"task:{key}: each task has its own rubric; probe takes one: give its file")
    config = _config(arguments)
    require_use(rubric, config)
    real = (e for e in read_episodes(arguments.episodes) if e.trainable) if arguments.episodes else ()
    episodes = list(islice(real, arguments.limit))
    if arguments.episodes and not episodes:
        raise ConfigError(
            f"{arguments.episodes} has no episode, or failed ones alone; leave out --episodes to judge no real answer"
        )
    with closing(build_judge(config, arguments.calls and Path(arguments.calls))) as judge:
        found = asyncio.run(probed(rubric, judge, episodes))
    if arguments.json:
        print(dump_results(asdict(found) | {"problems": found.problems}), end="")
    else:
        print_probes(found, Console())
    return 1 if found.problems else 0


def lint(arguments: argparse.Namespace) -> int:
    """Print what is wrong with a rubric; return 1 if there is a finding."""
    from agent_rl.judge.lint import lint as linted

    rubric = load_rubric(arguments.rubric)
    findings = linted(rubric)
    for finding in findings:
        print(clean(str(finding)))
    count = plural(len(findings), "finding") if findings else "no finding"
    print(f"{rubric.label}: {plural(len(rubric.criteria), 'criterion', 'criteria')}, {count}")
    return 1 if findings else 0


def _config(arguments: argparse.Namespace) -> JudgeConfig:
    given = settings_of(arguments)
    if getattr(arguments, "max_cost", None) is not None:
        given["judge.max_cost"] = arguments.max_cost
    return load_config(None, JudgeSettings, settings=given).judge


def _plan(arguments: argparse.Namespace) -> Plan:
    a = arguments
    selection = {"where": a.where, "search": a.search, "limit": a.limit}
    return plan_judging(a.file, a.rubric, _config(a), out=a.out, calls=a.calls, **selection)


def _progress(progress: Progress, plan: Plan) -> Callable[[Judging], None]:
    started, total = time.monotonic(), len(plan.selection.places)

    def show(judging: Judging) -> None:
        rate = judging.done / max(time.monotonic() - started, 1e-9)
        left = timedelta(seconds=round((len(judging.places) - judging.done) / rate))
        at = total - len(judging.places) + judging.done
        progress.phase("judge", at - 1, total, f"{rate:.3g} episodes/s, {left} left")

    return show


def _print(judged: Judged, prices: str | None, *, as_json: bool) -> None:
    summary = summarise_judged(judged, load_prices(prices) if prices else None)
    if as_json:
        print(dump_results(asdict(summary)), end="")
    else:
        print_summary(summary, Console())


def _again(arguments: argparse.Namespace) -> str:
    """Return the command for the rest."""
    a = arguments
    options = {"--out": a.out, "--calls": a.calls, "--search": a.search, "--limit": a.limit, "--max-cost": a.max_cost}
    words = [word for name, value in options.items() if value for word in (name, str(value))]
    words += [word for condition in a.where for word in ("--where", condition)]
    return command("judge", "run", a.file, a.rubric, *a.overrides, *words)
