"""Which samples are whose: a function of seed, epoch and batch, which any number of replicas cut alike."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain import get_rank
from disttrain.data import Loader, Sample, SampleOrder, TokenArray, Windows, permuted
from disttrain.errors import ArgumentError, DataError
from disttrain.mesh import init_device_mesh
from disttrain.testing import run_threads


def numbers(num_tokens: int) -> TokenArray:
    return TokenArray([np.arange(num_tokens, dtype=np.uint32)])


def alone(dataset: Any, batch_size: int, **others: Any) -> Loader:
    return Loader(dataset, batch_size, replica=0, num_replicas=1, **others)


@given(st.integers(1, 300), st.integers(0, 3), st.integers(0, 3))
def test_a_shuffle_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(place, size, seed, epoch) for place in range(size)) == list(range(size))


def test_shuffles_differ_by_seed_and_epoch_and_need_no_memory() -> None:
    orders = {tuple(permuted(place, 50, seed, epoch) for place in range(50)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert 0 <= permuted(10**17, 10**18, 0, 0) < 10**18


@given(st.integers(1, 60), st.integers(1, 12), st.sampled_from([1, 2, 3, 4, 6]), st.booleans())
def test_replicas_cut_one_order_in_which_every_sample_comes_once_an_epoch(
    num_samples: int, size: int, num_replicas: int, shuffle: bool
) -> None:
    order = SampleOrder(num_samples, size * num_replicas, seed=5, shuffle=shuffle)
    num_epochs = 3
    steps = [(epoch, step) for epoch in range(num_epochs) for step in range(order.num_steps(epoch))]
    whole = [order.samples(epoch, step) for epoch, step in steps]
    for (epoch, step), batch in zip(steps, whole, strict=True):
        parts = [order.samples(epoch, step, replica, num_replicas) for replica in range(num_replicas)]
        assert list(chain(*parts)) == batch
        assert {len(part) for part in parts} == {size}
        assert batch[0].epoch == epoch
    seen = Counter(chain(*whole))
    expected = [Sample(epoch, index) for epoch in range(num_epochs) for index in range(num_samples)]
    assert seen & Counter(expected) == Counter(expected)
    assert set(seen.values()) == {1}


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(DataError, match=r"a batch of 10 cannot be shared evenly by 4 replicas\. Give a multiple of 4"):
        SampleOrder(100, 10).samples(0, 0, 1, 4)
    with pytest.raises(DataError, match="replica is 2, of 2"):
        Loader([1, 2], 2, replica=2, num_replicas=2)
    with pytest.raises(DataError, match="num_samples is 0"):
        alone([], 2)
    with pytest.raises(DataError, match="Give a mesh, or replica and num_replicas"):
        Loader([1, 2], 2, replica=0)
    with pytest.raises(ArgumentError, match="a generator has no length, or no samples by number"):
        alone((number for number in range(3)), 2)


def test_a_loader_iterates_to_the_end_of_the_epoch_and_goes_on() -> None:
    loader = alone(range(10), 4, seed=1)
    epochs = []
    for _ in range(2):
        assert len(loader) == loader.order.num_steps(loader.epoch)
        epochs.append([batch.tolist() for batch in loader])
    assert [len(batches) for batches in epochs] == [3, 2]
    seen = list(chain(*chain(*epochs)))
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert (loader.epoch, loader.num_samples_behind) == (2, 20)


def test_a_state_goes_on_with_another_number_of_replicas_and_another_batch() -> None:
    undisturbed = [number for batch in islice(alone(range(50), 6, endless=True), 20) for number in batch.tolist()]
    seen, state = [], alone(range(50), 6).state_dict()
    for num_replicas, batch_size, num_steps in ((2, 6, 3), (3, 12, 2), (1, 6, 13)):
        loaders = [
            Loader(range(50), batch_size, replica=replica, num_replicas=num_replicas, endless=True)
            for replica in range(num_replicas)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        for _, *parts in zip(range(num_steps), *loaders, strict=False):
            seen += torch.cat(parts).tolist()
        states = [loader.state_dict() for loader in loaders]
        assert states[1:] == states[:-1]
        state = states[0]
    assert seen == undisturbed[: len(seen)]
    assert len(seen) == 120


def test_a_state_of_other_data_is_refused() -> None:
    state = alone(range(50), 6, seed=1).state_dict()
    with pytest.raises(DataError, match=r"saved with num_samples=50, seed=1; now it is num_samples=49, seed=2\."):
        alone(range(49), 6, seed=2).load_state_dict(state)


def test_replicas_are_places_on_a_mesh_or_ranks() -> None:
    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))
        places = [Loader(range(8), 8, mesh=mesh["replicate", "dp"]), Loader(range(8), 8, mesh=mesh["dp"])]
        places.append(Loader(range(8), 8))
        return [(loader.replica, loader.num_replicas) for loader in places]

    for rank, found in enumerate(run_threads(8, body)):
        assert found == [(rank // 2, 4), (rank // 2 % 2, 2), (rank, 8)]


def test_a_loader_shows_each_rank_its_part() -> None:
    def body() -> list[int]:
        loader = Loader(range(12), 6, shuffle=False)
        return [get_rank(), *next(iter(loader)).tolist()]

    assert run_threads(3, body) == [[0, 0, 1], [1, 2, 3], [2, 4, 5]]


def test_samples_are_put_together_as_asked() -> None:
    class Crops:
        """A dataset whose samples depend on the epoch."""

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[int, int]:
            raise AssertionError(index)

        def in_epoch(self, epoch: int, index: int) -> tuple[int, int]:
            return epoch, index

    batches = list(chain(*repeat(alone(Crops(), 2, shuffle=False, collate=list), 2)))
    assert batches == [[(0, 0), (0, 1)], [(0, 2), (1, 0)], [(1, 1), (1, 2)]]


@given(st.integers(9, 200), st.integers(1, 8))
def test_an_epoch_has_each_window_once(num_tokens: int, length: int) -> None:
    windows = Windows(numbers(num_tokens), length, seed=1)
    assert len(windows) == max(1, (num_tokens - length) // length)
    batches = alone(windows, 1, seed=1, endless=True)
    rows = torch.cat(list(islice(batches, 2 * len(windows))))
    assert rows.shape == (2 * len(windows), length + 1)
    assert torch.equal(rows - rows[:, :1], torch.arange(length + 1).expand_as(rows))
    for epoch in rows.chunk(2):
        assert max(Counter(epoch[:, :-1].flatten().tolist()).values()) == 1


def test_windows_have_no_row_beyond_their_number() -> None:
    windows = Windows(numbers(20), 4)
    assert torch.equal(windows[3], windows.in_epoch(0, 3))
    with pytest.raises(IndexError, match="window 4 of 4"):
        windows[4]
    with pytest.raises(DataError, match=r"rows of 20 \+ 1 tokens cannot be cut from 20"):
        Windows(numbers(20), 20)
