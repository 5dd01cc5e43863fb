"""Which tokens a row of a batch has: a pure function of the seed and the row's number in the run.

So there is no loader whose state must be saved: the number of rows so far is the position in the data, on any mesh and
with any size of batches, and each rank reads its own rows only. In each epoch every window comes once, in an order of
the epoch's own, and the windows begin elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llama.tokens import Shards, Tokens

NUM_ROUNDS = 4


@dataclass(frozen=True)
class Batches:
    """Rows of `length` + 1 tokens, inputs and, one further, targets."""

    tokens: Tokens
    length: int
    seed: int

    def training(self, first: int, num_rows: int) -> Tensor:
        """The rows from number `first` of the run on: (num_rows, length + 1) int64."""
        starts = [self.start_of(row) for row in range(first, first + num_rows)]
        return self._read(self.tokens.training, starts)

    def held_out(self, first: int, num_rows: int, num_in_all: int) -> Tensor:
        """The same of rows that are spread evenly over the text that is held out."""
        last = self.tokens.held_out.size - self.length - 1
        starts = np.linspace(0, last, num_in_all).astype(np.int64)[first : first + num_rows]
        return self._read(self.tokens.held_out, starts.tolist())

    def start_of(self, row: int) -> int:
        """Where a row of the run begins."""
        size = self.tokens.training.size
        num_windows = max(1, (size - self.length) // self.length)
        epoch, place = divmod(row, num_windows)
        room = min(self.length, size - num_windows * self.length)
        offset = _digest(self.seed, epoch, 0) % room
        return shuffled(place, num_windows, self.seed, epoch) * self.length + offset

    def _read(self, side: Shards, starts: Sequence[int]) -> Tensor:
        rows = [side.read(start, self.length + 1) for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def shuffled(place: int, size: int, seed: int, epoch: int) -> int:
    """Where `place` of `size` goes: a permutation that needs no memory, however many there are.

    A Feistel network on the bits (Luby and Rackoff, 1988), again and again until the result is below `size` (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(NUM_ROUNDS):
            left, right = right, left ^ (_digest(seed, epoch, turn + 1, right) & mask)
        place = left << half | right
        if place < size:
            return place


def _digest(*numbers: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest())
