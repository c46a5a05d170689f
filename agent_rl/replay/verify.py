"""Verify: the episodes of a file, played again in fresh environments and compared, in one process or several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agent_rl.errors import ConfigError
from agent_rl.rendering.config import RendererConfig
from agent_rl.replay.result import Verification, VerifiedEpisode
from agent_rl.replay.run import MODES, Mode
from agent_rl.replay.verifier import AT_A_TIME, Verifier, VerifyPlan
from agent_rl.replay.workers import verified_by
from agent_rl.store.beside import imported_files, renderer_settings, tokenizer_files
from agent_rl.store.selection import find_episode, select
from agent_rl.store.shards import Place
from agent_rl.worker_threads import outside_loop


def verify(
    path: str | os.PathLike[str],
    ids: Sequence[str] = (),
    *,
    where: Sequence[str] = (),
    mode: Mode = "live",
    limit: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    renderer: str | None = None,
    workers: int = 1,
    imports: Sequence[str | Path] = (),
    on_progress: Callable[[Verification, int], object] = lambda found, total: None,
) -> Verification:
    """Play stored episodes again in fresh environments, and compare turn by turn what these say, give and end by.

    Example::

        assert not ar.verify("runs/latest").exit_code

    Args:
        path: an episode file or a run's folder.
        ids: of episodes, or beginnings that only one has; all if there are none.
        where: conditions, as of `agent-rl view`.
        mode: "live" runs all tools again; in "cassette" those that reach outside answer from the record.
        limit: the most episodes to verify, from the first.
        tokenizer: the folder of the tokenizer that token ids are verified with; None for the one in the run's folder.
        renderer: its name, as in `load_renderer`; None for what the settings of the run or rollout say.
        workers: processes. A script needs `if __name__ == "__main__":` for more than one.
        imports: files that register environments, for further processes.
        on_progress: called with what is known so far, and the number of episodes.

    Raises:
        ConfigError: if a condition or the mode has no meaning.
        StoreError: if there is no such file or episode, or a line can't be read.
    """
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r}: take one of {', '.join(MODES)}")
    if workers < 1:
        raise ConfigError(f"workers={workers}: give at least 1")
    places = _places(path, ids, where, limit)
    given = {Path(name).name: Path(name).resolve() for name in imports}
    files = [*given.values(), *(file for file in imported_files(path) if file.name not in given)]
    beside = (str(file.parent) for file in tokenizer_files(path))
    plan = VerifyPlan(
        str(path),
        mode,
        next(beside, None) if tokenizer is None else str(tokenizer),
        tokenizer is not None,
        RendererConfig(name=renderer) if renderer else renderer_settings(path),
        tuple(map(str, files)),
    )
    found = Verification(mode)

    def work() -> Verification:
        for verified in _verified(plan, places, min(workers, max(1, len(places) // AT_A_TIME))):
            for episode in verified:
                found.add(episode)
            on_progress(found, len(places))
        return found

    return outside_loop(work)


def _verified(plan: VerifyPlan, places: Sequence[Place], workers: int) -> Iterable[list[VerifiedEpisode]]:
    chunks = [places[at : at + AT_A_TIME] for at in range(0, len(places), AT_A_TIME)]
    if workers > 1:
        return verified_by(plan, chunks, workers)
    verifier = Verifier(plan)
    return (verifier.verify_all(chunk) for chunk in chunks)


def _places(path: str | os.PathLike[str], ids: Sequence[str], where: Sequence[str], limit: int | None) -> list[Place]:
    selected = select(path, where=where, limit=sys.maxsize if limit is None or ids else limit)
    if not ids:
        return list(selected.places)
    place_of = dict(zip(selected.ids, selected.places, strict=True))
    wanted = dict.fromkeys(id if id in place_of else find_episode(path, id).id for id in ids)
    return [place_of[id] for id in wanted if id in place_of][:limit]
