"""Chooses the samples of a step: a pure function of the seed and of the step's place in the run, for any replicas.

The samples of all epochs stand in one row, each epoch's in an order of its own. A batch is the next `batch_size` of
them, and replicas cut it. So every sample comes once in each epoch, all batches are full, and the position in the data
is one number. A batch that begins in an epoch belongs to it; its last samples may be the first ones of the next.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from disttrain.errors import DataError

_NUM_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of the data, and the epoch that it is read in."""

    epoch: int
    index: int


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a run reads its samples.

    Args:    num_samples  of the data;  batch_size  samples of a step, of all replicas together;  seed  of the order;
             shuffle      False: each epoch from the first sample to the last.
    Raises:  DataError for fewer than one sample, or for an empty batch.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.batch_size < 1:
            problem = f"num_samples is {self.num_samples}, batch_size {self.batch_size}; both are 1 or more."
            raise DataError("SampleOrder", problem, "Give data with samples in it, and a batch that takes some.")

    def first_step(self, epoch: int) -> int:
        """The number of steps of the run that lie before the first one of `epoch`."""
        return -(-epoch * self.num_samples // self.batch_size)

    def num_steps(self, epoch: int) -> int:
        """The number of batches that begin in `epoch`; it differs by one at most among epochs."""
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def samples(self, epoch: int, step: int, replica: int = 0, num_replicas: int = 1) -> list[Sample]:
        """The samples of a replica in a step, counted from the epoch's first.

        The parts of all replicas, one after the other, are the batch, however many replicas there are.
        Raises: DataError for a batch that they cannot share evenly.
        """
        rows = share_of(self.batch_size, replica, num_replicas)
        first = (self.first_step(epoch) + step) * self.batch_size
        return self.rows(first + rows.start, len(rows))

    def rows(self, first: int, num_rows: int) -> list[Sample]:
        """The samples from number `first` of the run on."""
        return [self.row(number) for number in range(first, first + num_rows)]

    def row(self, number: int) -> Sample:
        """The sample with this number in the run."""
        epoch, position = divmod(number, self.num_samples)
        return Sample(epoch, permuted(position, self.num_samples, self.seed, epoch) if self.shuffle else position)


def share_of(batch_size: int, replica: int, num_replicas: int) -> range:
    """The rows of a batch that are a replica's. Raises: DataError."""
    if batch_size % num_replicas:
        # A mean over replicas would give samples different weights.
        problem = f"a batch of {batch_size} cannot be shared evenly by {num_replicas} replicas."
        raise DataError("share a batch", problem, f"Give a multiple of {num_replicas}, or another number of replicas.")
    if not 0 <= replica < num_replicas:
        problem = f"replica is {replica}, of {num_replicas}."
        raise DataError("share a batch", problem, "Replicas count from 0.")
    size = batch_size // num_replicas
    return range(replica * size, (replica + 1) * size)


def permuted(position: int, size: int, seed: int, epoch: int) -> int:
    """Moves `position` of `size`: a permutation that needs no memory, however many positions there are.

    A Feistel network on the bits (Luby and Rackoff, 1988), again and again until the result is below `size` (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(_NUM_ROUNDS):
            left, right = right, left ^ (hashed(seed, epoch, turn + 1, right) & mask)
        position = left << half | right
        if position < size:
            return position


def hashed(*numbers: int) -> int:
    """A number of 64 bits that follows from `numbers`, alike on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest())
