"""Lists of places among indices, `x[[0, 2]]`: numbers of the program, and so the same on all ranks, as `x[0]` is.

torch makes plain tensors of them beneath dispatch, where they look like tensors of the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.fx.immutable_collections import immutable_list  # lists, as they are in a graph

_SEQUENCES = frozenset({immutable_list, list, range, np.ndarray})


def has_places(index: Any) -> bool:
    """False where `with_places` would change nothing."""
    return type(index) in _SEQUENCES or (type(index) is tuple and not _SEQUENCES.isdisjoint(map(type, index)))


def with_places(index: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`index` with what `make` makes of lists, ranges and arrays of numbers in place of them."""
    if isinstance(index, tuple):
        return tuple([with_places(item, make) for item in index])
    if isinstance(index, np.ndarray) and index.ndim > 0:
        return make(torch.as_tensor(index))
    # A list of lists may be one index or several: torch knows, and warns.
    if isinstance(index, list | range) and all(isinstance(item, int) for item in index):
        return make(torch.tensor(index, dtype=None if len(index) else torch.int64))
    return index
