"""Mini-batches on verl: every rank cuts its share of the batch, in order, into parts of equally many rows."""

from __future__ import annotations

from agent_rl.seeds import Stream, rng


def mini_batch_of(rows: int, ranks: int, mini_batches: int) -> list[int]:
    """Return which update takes each row of a batch, which ranks share evenly, one after the other."""
    share = rows // ranks
    return [row % share * mini_batches // share for row in range(rows)]


def shuffled_in_ranks(rows: int, ranks: int, seed: int, step: int) -> list[int]:
    """Return an order of a batch's rows, fixed by seed and step, in which each rank keeps its share."""
    random, share = rng(Stream.MINI_BATCHES, seed, step), rows // ranks
    return [rank * share + int(place) for rank in range(ranks) for place in random.permutation(share)]
