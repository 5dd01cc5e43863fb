"""Batches of this replica, in the run's order, from data whose samples can be asked for by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from disttrain.data.order import Sample, SampleOrder, share_of
from disttrain.data.replicas import replica_of
from disttrain.errors import ArgumentError, DataError
from disttrain.mesh import DeviceMesh


class Loader:
    """Iterates over this replica's batches, from where the run stands to the end of the epoch, or without an end.

    Args:    dataset     has `len` and `[index]`. One whose samples depend on the epoch has `in_epoch(epoch, index)`,
                         too, which is asked instead. Both run in the thread that iterates.
             batch_size  samples of a step, of all replicas together.
             mesh        its ranks are the replicas, all axes together: mesh["dp"], or mesh["replicate", "dp"]. Or
                         `replica` and `num_replicas` say so; by default each rank of the world is one.
             seed, shuffle  as for `SampleOrder`.
             collate     makes a batch of a list of samples; default: torch's `default_collate`.
             endless     an iteration goes on after an epoch's end.
    `state_dict` is alike on all ranks: how many samples are behind all of them together, and what their order follows
    from. Another number of replicas, or another batch size, goes on with the next sample.
    Raises:  DataError for a batch that the replicas cannot share evenly, or for empty data.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        mesh: DeviceMesh | None = None,
        replica: int | None = None,
        num_replicas: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] = default_collate,
        endless: bool = False,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            problem = f"a {type(dataset).__name__} has no length, or no samples by number."
            raise ArgumentError("Loader", problem, "Give a list or a map-style dataset; StreamLoader takes others.")
        self._get: Callable[[Sample], Any] = _getter(dataset)
        self.order = SampleOrder(len(dataset), batch_size, seed, shuffle)
        self.replica, self.num_replicas = replica_of("Loader", mesh, replica, num_replicas)
        self._share = share_of(batch_size, self.replica, self.num_replicas)
        self._collate = collate
        self._is_endless = endless
        self.num_samples_behind = 0
        """The number of samples of the run that all replicas have had."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.num_samples_behind // self.order.num_samples

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while self._is_endless or self.epoch == epoch:
            samples = self.next_samples()
            batch = self._collate([self._get(sample) for sample in samples])
            self.num_samples_behind += self.order.batch_size
            yield batch

    def next_samples(self) -> list[Sample]:
        """The samples of this replica's next batch."""
        return self.order.rows(self.num_samples_behind + self._share.start, len(self._share))

    def __len__(self) -> int:
        """The number of batches to the end of the epoch."""
        remaining = (self.epoch + 1) * self.order.num_samples - self.num_samples_behind
        return (remaining + self.order.batch_size - 1) // self.order.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands."""
        return {
            "num_samples_behind": self.num_samples_behind,
            "num_samples": self.order.num_samples,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. Raises: DataError where samples would come in another order."""
        present = self.state_dict()
        check_same("Loader", state_dict, {name: present[name] for name in ("num_samples", "seed", "shuffle")})
        self.num_samples_behind = int(state_dict["num_samples_behind"])


def check_same(operation: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raises DataError where a state was saved with other data, or another order of it."""
    differing: Sequence[str] = [name for name, value in present.items() if saved.get(name) != value]
    if differing:
        was = ", ".join(f"{name}={saved.get(name)}" for name in differing)
        now = ", ".join(f"{name}={present[name]}" for name in differing)
        problem = f"the state was saved with {was}; now it is {now}. Samples would come twice, or never."
        raise DataError(f"{operation}.load_state_dict", problem, "Give the same data in the same order, or begin anew.")


def _getter(dataset: Any) -> Callable[[Sample], Any]:
    if hasattr(dataset, "in_epoch"):
        return lambda sample: dataset.in_epoch(sample.epoch, sample.index)
    return lambda sample: dataset[sample.index]
