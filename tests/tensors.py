"""Writing small tensors down, and comparing results with numbers worked out by hand."""

import torch
from torch import Tensor


def t64(rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def i64(rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def bits(*rows: str) -> Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


def same(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance, equal_nan=True)
