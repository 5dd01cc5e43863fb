"""A text without borders, cut into rows of one length: a dataset whose rows begin elsewhere in each epoch."""

from __future__ import annotations

import numpy as np
import torch

from disttrain.data.order import hashed
from disttrain.data.token_array import TokenArray
from disttrain.errors import DataError


class Windows:
    """Rows of `length` + 1 tokens: inputs and, one further, targets. An epoch has each token once among its inputs,
    but for fewer than `length` at either end.

    Args:    tokens  a `TokenArray`;  seed  of where an epoch's windows begin.
    Raises:  DataError for fewer than `length` + 1 tokens.
    """

    def __init__(self, tokens: TokenArray, length: int, *, seed: int = 0) -> None:
        if length < 1 or tokens.size <= length:
            problem = f"rows of {length} + 1 tokens cannot be cut from {tokens.size}."
            raise DataError("Windows", problem, "Give more tokens, or shorter rows.")
        self.tokens = tokens
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        """The number of windows of an epoch."""
        return max(1, (self.tokens.size - self.length) // self.length)

    def __getitem__(self, index: int) -> torch.Tensor:
        """A row of the first epoch."""
        return self.in_epoch(0, index)

    def in_epoch(self, epoch: int, index: int) -> torch.Tensor:
        """A row: (length + 1,) int64."""
        return self.row_at(self.start_of(epoch, index))

    def start_of(self, epoch: int, index: int) -> int:
        """The number of tokens before a row."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        room = min(self.length, self.tokens.size - len(self) * self.length)
        return index * self.length + hashed(self.seed, epoch, 0) % room

    def row_at(self, start: int) -> torch.Tensor:
        """The row that begins at a token."""
        return torch.from_numpy(self.tokens.read(start, self.length + 1).astype(np.int64))
