"""Batches of this replica from data that can only be read on, such as Hugging Face's streaming sets.

The data comes in several streams, whose number is fixed for the run. Each row of a batch is of one stream, whichever
replica it falls to: so another number of replicas reads the same rows. A stream's state is its own (`state_dict`), else
it is read again up to where it was.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from disttrain.data.loader import check_same
from disttrain.data.order import share_of
from disttrain.data.replicas import replica_of
from disttrain.errors import DataError
from disttrain.mesh import DeviceMesh


class StreamLoader:
    """Iterates over this replica's batches, without an end: a stream that ends begins its next epoch by itself.

    Args:    streams     iterables, which together are the data, the same on all ranks: of an IterableDataset of Hugging
                         Face's `[split_dataset_by_node(data, rank, n) for rank in range(n)]`. With `state_dict` and
                         `load_state_dict` they go on from a checkpoint by themselves; with `set_epoch` they are told of
                         each epoch.
             batch_size  rows of a step, of all replicas together: a multiple of the number of streams.
             mesh, replica, num_replicas, collate  as for `Loader`. A replica reads the streams that it has rows of: one
                         that has part of a stream's reads all of it, so make at least as many streams as replicas.
    `state_dict` has the states of the streams that this rank reads, by their numbers: ranks that read the same have the
    same, and a checkpoint has all. It loads what it needs, on any number of replicas.
    Raises:  DataError for a batch that streams or replicas cannot share evenly, and for a stream without samples.
    """

    def __init__(
        self,
        streams: Sequence[Iterable[Any]],
        batch_size: int,
        *,
        mesh: DeviceMesh | None = None,
        replica: int | None = None,
        num_replicas: int | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if not streams or batch_size < 1 or batch_size % len(streams):
            problem = f"a batch of {batch_size} cannot have as many rows of each of {len(streams)} streams."
            raise DataError("StreamLoader", problem, "Give a batch_size that is a multiple of the number of streams.")
        self._batch_size, self._num_streams = batch_size, len(streams)
        self.replica, self.num_replicas = replica_of("StreamLoader", mesh, replica, num_replicas)
        rows = share_of(batch_size, self.replica, self.num_replicas)
        size = batch_size // len(streams)
        self._streams = {
            number: _Stream(number, streams[number])
            for number in range(rows.start // size, (rows.stop - 1) // size + 1)
        }
        self._rows_of = {number: range(number * size, (number + 1) * size) for number in self._streams}
        self._rows = rows
        self._collate = collate

    def __iter__(self) -> Iterator[Any]:
        while True:
            samples = []
            for number, stream in self._streams.items():
                # Also those of other replicas, so that all that read a stream are at one place in it.
                read = [(row, stream.read()) for row in self._rows_of[number]]
                samples += [sample for row, sample in read if row in self._rows]
            yield self._collate(samples)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's streams stand."""
        streams = {str(number): stream.state() for number, stream in self._streams.items()}
        return {"batch_size": self._batch_size, "num_streams": self._num_streams, "streams": streams}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. Raises: DataError where rows would come from other streams, or a state is missing."""
        check_same("StreamLoader", state_dict, {"batch_size": self._batch_size, "num_streams": self._num_streams})
        saved = state_dict["streams"]
        if missing := [number for number in self._streams if str(number) not in saved]:
            problem = f"there is no state of stream {missing[0]}; there are those of {', '.join(sorted(saved))}."
            remedy = "Save the loader on all ranks, in a checkpoint of disttrain's, which has the states of all."
            raise DataError("StreamLoader.load_state_dict", problem, remedy)
        for number, stream in self._streams.items():
            stream.go_on_from(saved[str(number)])


class _Stream:
    """One of the streams, and where it is read."""

    def __init__(self, number: int, source: Any) -> None:
        self._number, self._source = number, source
        self._has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        # That from which an epoch begins, for those that are not told of epochs.
        self._first_state = copy.deepcopy(source.state_dict()) if self._has_state else None
        self._epoch = self._num_rows = 0
        self._iterator: Iterator[Any] | None = None

    def read(self) -> Any:
        """The next sample; that of the next epoch at the end."""
        if self._iterator is None:
            self._set_epoch()
            self._iterator = iter(self._source)
        is_fresh = self._num_rows == 0
        for sample in self._iterator:
            self._num_rows += 1
            return sample
        if is_fresh:
            problem = f"stream {self._number} has no samples."
            raise DataError("StreamLoader", problem, "Make fewer streams, or give more data.")
        self._begin_epoch(self._epoch + 1)
        return self.read()

    def state(self) -> list[Any]:
        """Its epoch, its rows in it, and its own state."""
        source_state = copy.deepcopy(self._source.state_dict()) if self._has_state else None
        # A list, which a checkpoint takes as one value: the state may have other keys when it is loaded.
        return [self._epoch, self._num_rows, source_state]

    def go_on_from(self, state: Sequence[Any]) -> None:
        epoch, num_rows, source_state = state
        self._begin_epoch(epoch)
        self._num_rows = num_rows
        self._set_epoch()
        if self._has_state:
            if source_state is not None:
                self._source.load_state_dict(source_state)
            self._iterator = iter(self._source)
        else:
            self._iterator = itertools.islice(self._source, self._num_rows, None)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._num_rows, self._iterator = epoch, 0, None
        if self._first_state is not None and not hasattr(self._source, "set_epoch"):
            self._source.load_state_dict(copy.deepcopy(self._first_state))

    def _set_epoch(self) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._epoch)
