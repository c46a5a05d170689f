"""Batches that Hypothesis draws; numbers are eighths, whose sums are exact."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tests.tensors import t64

quick = settings(deadline=None, max_examples=30)
numbers = st.integers(-40, 40).map(lambda i: i / 8)
factors = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def grid(draw, one, b, t):
    """Draw one for each token of `b` rows of `t`."""
    return draw(st.lists(st.lists(one, min_size=t, max_size=t), min_size=b, max_size=b))


@st.composite
def rows(draw):
    """Rewards, values and mask of a batch; each row may sample nothing, and have gaps anywhere."""
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    rewards, values = (t64(grid(draw, numbers, *shape)) for _ in range(2))
    return rewards, values, torch.tensor(grid(draw, st.booleans(), *shape))
