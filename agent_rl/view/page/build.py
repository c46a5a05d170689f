"""The page as one file: style, script and data in it, under a policy that lets nothing else load or run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError
from agent_rl.store.selection import Selection, select
from agent_rl.store.shards import refuse_device
from agent_rl.store.token_records import TokenRecord, read_token_records
from agent_rl.view.decoding import load_decoder
from agent_rl.view.page.data import dump, episode_json, head_columns, head_row, metrics_json, run_json

FOLDER = Path(__file__).parent
MOST = 2000
"""The episodes that a page has where no limit is given."""
_UNREAD = re.compile(r"^[ \t]*(?:(?://|/\*\*|\*[ /]).*|\*)?\n|^[ \t]+", re.MULTILINE)
"""Empty lines, lines of comments, indentation: a tenth of the script. No text of it spans lines."""


@cache
def script() -> str:
    """Return the page's script: the files of `js/`, in the order of their names, without comments and indentation."""
    return _UNREAD.sub("", "\n".join(file.read_text(encoding="utf-8") for file in sorted((FOLDER / "js").glob("*.js"))))


@cache
def style() -> str:
    """Return the page's style sheet: the files of `css/`, in the order of their names."""
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted((FOLDER / "css").glob("*.css")))


def digest(text: str) -> str:
    """Return what the page's policy knows a script or style sheet by."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def block(value: JSON) -> str:
    """Return a value as base64 of gzipped JSON, in which no element can end."""
    return base64.b64encode(gzip.compress(dump(value), 9, mtime=0)).decode()


def page_parts(source: str, blocks: Iterable[tuple[str, str]] = ()) -> Iterator[str]:
    """Yield the page, piece by piece.

    Args:
        source: "embedded", with blocks of data, or "served", by a server that the page asks.
        blocks: the id and the content of each.
    """
    loader = FileSystemLoader(FOLDER)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    yield from made.get_template("index.html.j2").generate(
        source=source,
        script=Markup(script()),  # ours; the policy of the page allows no other
        style=Markup(style()),
        script_digest=digest(script()),
        style_digest=digest(style()),
        blocks=blocks,
    )


def save_page(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    where: Sequence[str] = (),
    search: str = "",
    sort: str | None = None,
    reverse: bool = False,
    limit: int = MOST,
    offset: int = 0,
) -> Selection:
    """Write episodes as one page that needs nothing else and loads nothing; return what was chosen.

    Args:
        path: a run's folder, whose metrics are shown, too, or an episode file.
        out: the file to write; its directory is made where it is missing.
        where: conditions, as of `select`.
        search: as of `select`.
        sort: as of `select`.
        reverse: as of `select`.
        limit: the most episodes.
        offset: how many of those that fit to leave out before.

    Raises:
        ConfigError: if no episode fits, a condition has no meaning, or `out` is there and no file.
        StoreError: if there is no such file.
        DamagedEpisodeError: if a line can't be read.
    """
    chosen = select(path, where=where, search=search, sort=sort, reverse=reverse, limit=limit, offset=offset)
    if not chosen.places:
        raise ConfigError(f"{path}: {chosen.none}")
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name a file for the page, such as {out / 'page.html'}")
    refuse_device(out)
    out = out.resolve()  # as where /dev/stdout is a file
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(page_parts("embedded", _blocks(Path(path), chosen, where)))
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return chosen


def _blocks(path: Path, chosen: Selection, where: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the page's data; episodes are read one at a time."""
    records: dict[str, list[TokenRecord]] = {id: [] for id in chosen.ids}
    for record in read_token_records(path):
        if record.episode in records:
            records[record.episode].append(record)
    rows, decode = [], load_decoder(path)
    for at, episode in enumerate(chosen.episodes()):
        rows.append(head_row(episode))
        yield f"episode-{at}", block(episode_json(episode, records.get(episode.id, ()), decode))
    yield "heads", block(head_columns(rows))
    yield "metrics", block(metrics_json(path))
    yield "run", block(run_json(path, shown=len(rows), total=chosen.total, where=where))
