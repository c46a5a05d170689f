"""torch, imported when something of it is first used: settings, formulas and wrong command lines need none of it."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
else:

    class _Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            import torch

            self.__dict__.update(vars(torch))  # from now on a look-up is the module's own
            return getattr(torch, name)

    torch = _Lazy("torch")
