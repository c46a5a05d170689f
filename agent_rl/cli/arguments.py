"""Arguments of commands, in front of their modules, which take longer to import."""

from __future__ import annotations

import argparse

TOKEN_MODES = ("source", "logprob", "advantage", "ratio", "version")
"""As of `agent_rl.view.shading`, which takes longer to import."""


def add_envs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `envs`."""
    parser.add_argument("namespace", nargs="?", help="list those of another package only")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    add_play(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    _add_settings(parser, "settings; backend=verl; resume=FOLDER")
    for option, text in {
        "--config": "print every setting and its meaning; train nothing",
        "--explain": "print the algorithm's formula; train nothing",
        "--dry-run": "check the settings and the environment, print the full config; train nothing",
    }.items():
        parser.add_argument(option, action="store_true", help=text)
    parser.add_argument("--status", metavar="FOLDER", help="say what a run in FOLDER is doing, from another terminal")


def add_rollout(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rollout`."""
    _add_settings(parser, "settings; resume=FILE")
    parser.add_argument("--status", metavar="FILE", help="say what a rollout into FILE is doing, from another terminal")


def add_play(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `play`."""
    parser.add_argument("env", help="the id of a registered environment")
    _add_settings(parser)


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `chat`."""
    model = "a run's or a model's folder, a file or name of a model, or a policy's name"
    parser.add_argument("checkpoint", help=model)
    _add_settings(parser)
    parser.add_argument("--tokens", action="store_true", help="print the ids of each reply, with log-probabilities")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    _add_settings(parser, "settings, as of train")


def _add_settings(parser: argparse.ArgumentParser, text: str = "settings") -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=text)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `runs`."""
    parser.add_argument("folder", nargs="?", default="runs", help="runs by default")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each")


def add_statistics(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stats`."""
    parser.add_argument("first", metavar="RUN", help="an episodes.jsonl, or a run's folder")
    parser.add_argument("second", nargs="?", metavar="RUN2", help="another, to compare by the tasks that both have")
    by = "what to split success by: purpose, split, env, step, ending, or a key of the tasks; may be repeated"
    parser.add_argument("--by", action="append", default=[], metavar="KEY", help=by)
    where = "only episodes for which this holds, such as purpose=eval; all of several hold"
    parser.add_argument("--where", action="append", default=[], metavar="FIELD=VALUE", help=where)
    parser.add_argument("--departures", action="store_true", help="list everything that went wrong, not the top only")
    fit = "fit ScaleRL's sigmoid in log compute to a metric (rollout/success), its first quarter against the rest"
    parser.add_argument("--fit", nargs="?", const="rollout/success", metavar="METRIC", help=fit)
    parser.add_argument("--svg", metavar="FILE", help="with --fit: write its picture")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")


def add_difference(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diff`."""
    parser.add_argument("file", metavar="RUN", help="an episodes.jsonl, or a run's folder")
    parser.add_argument("first", metavar="A", help="an episode's id, or a beginning that only one has")
    parser.add_argument("second", nargs="?", metavar="B", help="another's; the same id if it is left out")
    parser.add_argument("--other", metavar="RUN2", help="where B is, if not in RUN")
    parser.add_argument("--full", action="store_true", help="show long texts whole, and messages that are the same")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `view`."""
    parser.add_argument("file", help="an episodes.jsonl, or a run's folder")
    parser.add_argument("id", nargs="?", help="an episode's id, or a beginning that only one has")
    modes = "show every token, coloured by its source, logprob (if left out), advantage, ratio or version"
    parser.add_argument("--tokens", nargs="?", const="logprob", choices=TOKEN_MODES, metavar="MODE", help=modes)
    parser.add_argument("--full", action="store_true", help="show long texts whole")
    beside = "show the samples of a task side by side: of a group, or of an episode's"
    parser.add_argument("--group", metavar="ID", help=beside)
    parser.add_argument("--follow", action="store_true", help="print each new episode as a line, until the run ends")
    parser.add_argument("--turn", type=_count, default=0, metavar="K", help="begin at turn K, counted from 0")
    tui = "browse by keys: a folder of runs, a run or a file; needs pip install 'agent-rl[tui]'"
    parser.add_argument("--tui", action="store_true", help=tui)
    parser.add_argument("--html", metavar="FILE", help="write a page that needs nothing else, for any browser")
    parser.add_argument("--serve", action="store_true", help="serve this page, which follows a run under way")
    parser.add_argument("--port", type=_port, default=8080, help="of --serve; 8080 by default, 0 for any that is free")
    host = "of --serve; 127.0.0.1 by default; for any other, AGENT_RL_SERVER_TOKEN has to be set"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    parser.add_argument("--open", action="store_true", help="with --serve or --html: open the page in a browser")
    _add_filters(parser, "rows of the table (20); episodes of a page")


def add_listing(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `episodes`."""
    parser.add_argument("file", help="an episodes.jsonl, or a run's folder")
    _add_filters(parser, "rows of the table (20), or of the JSON (all)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each, with all fields")
    parser.add_argument("--count", action="store_true", help="print how many fit, and nothing else")


def _add_filters(parser: argparse.ArgumentParser, limit: str) -> None:
    where = "only episodes for which this holds, such as 'reward < 0.5 and stop = turns'; all of several hold"
    parser.add_argument("--where", action="append", default=[], metavar="EXPRESSION", help=where)
    parser.add_argument("--search", default="", metavar="TEXT", help="only episodes in which this was said")
    parser.add_argument("--sort", metavar="FIELD", help="smallest first, instead of in the order of the file")
    parser.add_argument("--reverse", action="store_true", help="largest or last first")
    parser.add_argument("--limit", type=_count, metavar="N", help=limit)
    parser.add_argument("--offset", type=_count, default=0, metavar="N", help="rows to leave out before")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: there are 0 to 65535")
    return int(text)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    parser.add_argument("file", help="an episodes.jsonl, or a run's folder; or a checkpoint, to export its model")
    parser.add_argument("target", nargs="?", metavar="OUT", help="the same as --out")
    parser.add_argument("--to", metavar="FORMAT", help="one of the formats above; left out, the model is exported")
    out = "the new file; a folder for a model, for dataset, and for atif where it does not end in .jsonl"
    parser.add_argument("-o", "--out", metavar="PATH", help=out)
    parser.add_argument("--merge", action="store_true", help="of a model: add its adapter to its weights")
    formats = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=formats, help="of a model: the format of its weights, float32 by default")
    where = "only episodes for which this holds, as of agent-rl view; those that failed are left out by default"
    parser.add_argument("--where", action="append", default=[], metavar="FIELD=VALUE", help=where)
    parser.add_argument("--search", default="", metavar="TEXT", help="only episodes in which this was said")
    parser.add_argument("--limit", type=_count, metavar="N", help="the first N episodes that fit")


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `import`."""
    parser.add_argument("file", help=".jsonl or .json, or a folder of such files")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="the new episode file")
    parser.add_argument("--from", dest="format", metavar="FORMAT", help="openai or atif; told by each row if left out")
    env = "what the episodes are said to be of, where a row doesn't say; imported/FILE by default"
    parser.add_argument("--env", default="", metavar="NAME", help=env)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument("envs", nargs="+", metavar="env", help="the id of a registered environment")
    add_serving(parser, what="episodes", capacity=1024)


def add_sandbox_server(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sandbox serve`."""
    parser.add_argument("options", nargs="*", metavar="key=value", help="the backend's options, as of sandbox_args")
    parser.add_argument("--backend", default="local", metavar="NAME", help="local by default; see docs/sandboxes.md")
    plain = "let other machines in without TLS: a proxy has it, or the network is yours alone"
    parser.add_argument("--plain", action="store_true", help=plain)
    add_serving(parser, what="sandboxes", capacity=64)


def add_serving(parser: argparse.ArgumentParser, *, what: str, capacity: int) -> None:
    """Add the arguments of every server; `what` is what takes a place."""
    host = "127.0.0.1 by default; for any other, AGENT_RL_SERVER_TOKEN has to be set, to what clients have to know"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    parser.add_argument("--port", type=_port, default=8000, help="8000 by default; 0 for any that is free")
    places = f"{what} at a time; {capacity} by default"
    parser.add_argument("--capacity", type=int, default=capacity, metavar="N", help=places)
    idle = f"{what} are closed that wait for their client so long; 3600 by default"
    parser.add_argument("--ttl", type=float, default=3600.0, metavar="SECONDS", help=idle)
    wait = "a client that finds no free place is refused after so long; 60 by default"
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help=wait)
    certificate = "the server's certificate, a PEM file: https:// then, and nothing else"
    parser.add_argument("--tls-cert", default="", metavar="FILE", help=certificate)
    parser.add_argument("--tls-key", default="", metavar="FILE", help="its private key, if that is in another file")


def add_fork(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `replay fork`."""
    parser.add_argument("file", help="an episodes.jsonl, or a run's folder")
    parser.add_argument("id", help="an episode's id, or a beginning that only one has")
    turn = "the first turn to be played again, counted from 0; the number of its turns, if a budget ended the episode"
    parser.add_argument("--at-turn", type=_count, required=True, metavar="K", help=turn)
    _add_settings(parser)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `replay verify`."""
    parser.add_argument("file", help="an episodes.jsonl, or a run's folder")
    parser.add_argument("ids", nargs="*", metavar="id", help="an episode's id, or a beginning that only one has")
    where = "only episodes for which this holds, as of agent-rl view; all of several hold"
    parser.add_argument("--where", action="append", default=[], metavar="FIELD=VALUE", help=where)
    parser.add_argument("--limit", type=_count, metavar="N", help="the first N episodes that fit")
    mode = "live (the default) runs all tools again; in cassette those that reach outside answer from the record"
    parser.add_argument("--mode", choices=("live", "cassette"), default="live", help=mode)
    parser.add_argument("--workers", type=_count, metavar="N", help="processes; one for each core by default")
    tokenizer = "the folder of the episodes' tokenizer; by default the one that the run's folder or settings lead to"
    parser.add_argument("--tokenizer", metavar="FOLDER", help=tokenizer)
    parser.add_argument("--renderer", metavar="NAME", help="instead of the one that fits the tokenizer")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def add_judging(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `judge run` and `judge estimate`."""
    parser.add_argument("file", help="an episodes.jsonl, or a run's folder")
    parser.add_argument("rubric", help="a rubric's file; or task:KEY, for the one that each task has under a key")
    _add_judge_settings(parser)
    out = "the judged file; judged/RUBRIC-JUDGE.jsonl beside the episodes by default"
    parser.add_argument("-o", "--out", metavar="FILE", help=out)
    calls = "the log of the judge's calls, none of which is made twice; calls.jsonl beside the judged file by default"
    parser.add_argument("--calls", metavar="FILE", help=calls)
    where = "only episodes for which this holds, as of agent-rl view; those that failed are left out by default"
    parser.add_argument("--where", action="append", default=[], metavar="FIELD=VALUE", help=where)
    parser.add_argument("--search", default="", metavar="TEXT", help="only episodes in which this was said")
    parser.add_argument("--limit", type=_count, metavar="N", help="the first N episodes that fit")
    parser.add_argument("--max-cost", type=float, metavar="COST", help="what the calls may cost: judge.max_cost")


def add_judge_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `judge report`."""
    parser.add_argument("judged", help=_JUDGED)
    parser.add_argument("--html", metavar="FILE", help="write a page that needs nothing else, with all verdicts")
    parser.add_argument("--prices", metavar="FILE", help="of a million tokens, as judge.prices")
    _add_json(parser)
    _add_moved(parser)


def add_judge_apply(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `judge apply`."""
    parser.add_argument("judged", help=_JUDGED)
    parser.add_argument("-o", "--out", metavar="FILE", help="the new episode file")
    parser.add_argument("--weight", type=float, default=1.0, help="of the judged reward; 1 by default")
    kept = "keep the rewards that are there; by default they get weight 0, and their source says what it was"
    parser.add_argument("--add", action="store_true", help=kept)
    _add_moved(parser)


def add_judge_comparison(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `judge compare`."""
    parser.add_argument("first", help="a judged file")
    parser.add_argument("second", help="another, of the same episodes")
    _add_json(parser)


def add_judge_agreement(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `judge agree`."""
    parser.add_argument("judged", help=_JUDGED)
    parser.add_argument("labels", help="a CSV file: episode_id,criterion_id,label[,rater]")
    _add_json(parser)
    _add_moved(parser)


def add_judge_probe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `judge probe`."""
    add_rubric(parser)
    _add_judge_settings(parser)
    parser.add_argument("--calls", metavar="FILE", help="the log of the judge's calls, none of which is made twice")
    parser.add_argument("--limit", type=_count, metavar="N", help="real answers at most")
    _add_json(parser)
    real = "real answers to compare with: a file or a run's folder"
    parser.add_argument("--episodes", metavar="FILE", help=real)


def add_rubric(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `judge lint`."""
    parser.add_argument("rubric", help="a rubric's file")


_JUDGED = "a judged file, as agent-rl judge run writes it"


def _add_judge_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="judge.key=value", help="settings of the judge")


def _add_moved(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", metavar="FILE", help="where the episodes are now, if they were moved")


def add_init(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    parser.add_argument("folder", help="a new folder; its name is the environment's, as in my-env")


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=["bash", "zsh"], help="the one that reads the script")


def add_image(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sandbox build-image`."""
    parser.add_argument("--tag", help="the image's name; the one that the docker sandbox takes by default")
