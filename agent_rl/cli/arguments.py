"""Arguments of commands, in front of their modules, which take longer to import."""

from __future__ import annotations

import argparse


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument("first", help="an episodes.jsonl, or a run's folder")
    parser.add_argument("second", help="another, with the same tasks")
    where = "only episodes for which this holds, such as purpose=eval; all of several hold"
    parser.add_argument("--where", action="append", default=[], metavar="FIELD=VALUE", help=where)
    parser.add_argument("--by", metavar="KEY", help="compare each value of this key of the tasks, too")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `view`."""
    parser.add_argument("file", help="an episodes.jsonl, or a run's folder")
    parser.add_argument("id", nargs="?", help="an episode's id, or a beginning that only one has")
    parser.add_argument("--tokens", action="store_true", help="show which tokens were sampled")
    parser.add_argument("--full", action="store_true", help="show long texts whole")
    where = "only episodes for which this holds, such as 'reward<0.5' (in quotes) or id=train-*; all of several hold"
    parser.add_argument("--where", action="append", default=[], metavar="FIELD=VALUE", help=where)
    parser.add_argument("--search", default="", metavar="TEXT", help="only episodes in which this was said")
    parser.add_argument("--sort", metavar="FIELD", help="smallest first, instead of in the order of the file")
    parser.add_argument("--reverse", action="store_true", help="largest or last first")
    parser.add_argument("--limit", type=_count, default=20, metavar="N", help="rows of the table (20)")
    parser.add_argument("--offset", type=_count, default=0, metavar="N", help="rows to leave out before")


def _count(text: str) -> int:
    if (count := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return count


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument("envs", nargs="+", metavar="env", help="the id of a registered environment")
    host = "127.0.0.1 by default; for any other, AGENT_RL_SERVER_TOKEN has to be set, to what clients have to know"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    parser.add_argument("--port", type=int, default=8000, help="8000 by default; 0 for any that is free")
    parser.add_argument("--capacity", type=int, default=1024, metavar="N", help="episodes at a time; 1024 by default")
    idle = "an episode is closed that waits for its client so long; 3600 by default"
    parser.add_argument("--ttl", type=float, default=3600.0, metavar="SECONDS", help=idle)
    wait = "a client that finds no free place is refused after so long; 60 by default"
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help=wait)
