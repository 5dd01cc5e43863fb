"""What the collectives of Python values must do, on any transport."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain.errors import ShapeError


class Unpackable:
    """Nothing that msgpack knows."""


def value_of(rank: int) -> dict[str, object]:
    """Of another size on each rank."""
    return {"rank": rank, "names": ["x" * rank, ("tuple", None)], "tensor": torch.arange(rank)}


def same(left: object, right: dict[str, object]) -> bool:
    assert isinstance(left, dict)
    rest = {name: value for name, value in left.items() if name != "tensor"}
    expected = {name: value for name, value in right.items() if name != "tensor"}
    return rest == expected and torch.equal(left["tensor"], right["tensor"])


def every_object_collective() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    everyone: list[object] = [None] * size
    disttrain.all_gather_object(everyone, value_of(rank))
    assert all(same(value, value_of(other)) for other, value in enumerate(everyone))
    gathered: list[object] | None = [None] * size if rank == 1 else None
    disttrain.gather_object(value_of(rank), gathered, dst=1)
    assert gathered is None or all(same(value, value_of(other)) for other, value in enumerate(gathered))
    pair: list[object] = [value_of(rank), "from 0"] if rank == 0 else [None, None]
    disttrain.broadcast_object_list(pair)
    assert same(pair[0], value_of(0))
    assert pair[1] == "from 0"
    mine: list[object] = [None]
    disttrain.scatter_object_list(mine, [value_of(other) for other in range(size)] if rank == 1 else None, src=1)
    assert same(mine[0], value_of(rank))
    received: list[object] = [None, None]
    if rank == 0:
        disttrain.send_object_list([7, value_of(3)], 1)
    elif rank == 1:
        # NCCL cannot receive from whoever sends.
        source = 0 if disttrain.get_backend().endswith("nccl") else None
        assert disttrain.recv_object_list(received, source) == 0
        assert received[0] == 7
        assert same(received[1], value_of(3))


def what_cannot_travel_is_an_error_on_every_rank() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    value = Unpackable() if rank == 1 else rank
    places: list[object] = [None] * size
    with pytest.raises(ShapeError, match="rank 1 has no value that can travel: a value cannot travel: Unpackable"):
        disttrain.all_gather_object(places, value)
    with pytest.raises(ShapeError, match="rank 1 has no value that can travel"):
        disttrain.broadcast_object_list([value], src=1)
    if rank < 2:
        with pytest.raises(ShapeError, match="rank 1 has no value that can travel"):
            disttrain.gather_object(value, [None] * size if rank == 0 else None)
    else:
        disttrain.gather_object(value)
    if rank < 2:
        # Only the source, and who was to get it, hear of it.
        with pytest.raises(ShapeError, match="rank 1 has no value that can travel"):
            disttrain.scatter_object_list([None], [Unpackable(), *range(1, size)] if rank == 1 else None, src=1)
    else:
        received: list[object] = [None]
        disttrain.scatter_object_list(received, src=1)
        assert received == [rank]
    disttrain.barrier()


def lists_of_the_wrong_length_are_refused() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    mistakes = [
        lambda: disttrain.all_gather_object([], 1),
        lambda: disttrain.gather_object(1, [None] * (size + 1), dst=rank),
        lambda: disttrain.scatter_object_list([], [1] * size),
        lambda: disttrain.scatter_object_list([None], [1], src=rank),
    ]
    for attempt in mistakes:
        with pytest.raises(ShapeError, match=r"places; .* needed"):
            attempt()


CASES = {
    case.__name__: case
    for case in (
        every_object_collective,
        what_cannot_travel_is_an_error_on_every_rank,
        lists_of_the_wrong_length_are_refused,
    )
}
