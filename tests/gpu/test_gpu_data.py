"""Batches on their way to a GPU: whole when they are used, whatever computes beside the copies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from disttrain.data import Loader, Prefetcher

NUM_ELEMENTS = 1 << 20


class Rows:
    """Large rows, each of one value."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"row": torch.full((NUM_ELEMENTS,), float(index)), "index": torch.tensor(index)}


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_batches_are_whole_when_they_are_used(num_ahead: int) -> None:
    loader = Loader(Rows(), 4, replica=0, num_replicas=1, endless=True)
    busy = torch.randn(2048, 2048, device="cuda")
    are_right = []
    with Prefetcher(loader, "cuda", num_ahead=num_ahead) as batches:
        for batch in itertools.islice(batches, 40):
            assert batch["row"].is_cuda
            for _ in range(4):
                busy = (busy @ busy).tanh()
            # Computed late; memory that were given away too early would have another batch's values by then.
            are_right.append((batch["row"] == batch["index"][:, None]).all())
            del batch
    assert all(are_right)


def test_the_trainers_own_stream_waits() -> None:
    loader = Loader(Rows(), 2, replica=0, num_replicas=1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), Prefetcher(loader, torch.device("cuda", 0)) as batches:
        for batch in batches:
            assert (batch["row"] == batch["index"][:, None]).all()


def test_objects_that_move_themselves_are_moved() -> None:
    class Encoding:
        def __init__(self, data: dict[str, Any]) -> None:
            self.data = data

        def to(self, device: torch.device, **others: Any) -> Encoding:
            return Encoding({name: value.to(device, **others) for name, value in self.data.items()})

    with Prefetcher([Encoding({"x": torch.ones(3)})], "cuda") as batches:
        assert next(batches).data["x"].sum().item() == 3.0
