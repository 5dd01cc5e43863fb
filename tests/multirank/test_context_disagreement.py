"""Calls of cut attention that cannot be served, or are not alike on all ranks: one error on all, and nobody waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from disttrain.errors import ArgumentError, DisttrainError, GroupError, ShapeError
from disttrain.kernels import Alibi, Causal, Documents, attention
from disttrain.kernels.attention.context.blocks.kernels import Task
from disttrain.kernels.attention.context.parts import Parts, contiguous, mirrored
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.cut_attention import axis_of_all, whole

WAYS = ("ring", "gather", "heads")
BAD: dict[str, tuple[str, Callable[[int, list[torch.Tensor], dict[str, Any]], None]]] = {}


def bad(pattern: str) -> Callable[[Any], Any]:
    def add(spoil: Any) -> Any:
        BAD[spoil.__name__] = (pattern, spoil)
        return spoil

    return add


@bad("a mask of positions|mask is a Tensor")
def mask_in_memory(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["mask"] = torch.ones(6, 6, dtype=torch.bool)


@bad("Documents has a tensor of shape")
def documents_of_this_rank_alone(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["mask"] = Documents(torch.zeros(6, dtype=torch.int64))


@bad("Alibi has a tensor of shape")
def a_rule_of_one_rank_alone(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    if rank == 1:
        options["mask"] = Alibi(torch.ones(3))


@bad("the parts give this rank")
def sizes_that_contradict_the_parts(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    if rank == 0:
        own[:] = [tensor[:, :, 1:] for tensor in own]


@bad("positions: ")
def lengths_that_differ(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    del options["parts"]
    if rank == 0:
        own[:] = [tensor[:, :, 1:] for tensor in own]


@bad("positions: ")
def parts_that_differ(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["parts"] = (contiguous if rank else mirrored)(12, 2)


@bad("way: ")
def ways_that_differ(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["way"] = "ring" if rank else "gather"


@bad("tensors of the rule: ")
def documents_that_differ(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["mask"] = Documents(torch.arange(12) // (2 + rank))


@bad("gradients: ")
def gradients_wanted_on_one_rank(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    own[1].requires_grad_(rank == 1)


@bad(r"tensors of the rule: \w+ on rank 0, \w+ on rank 1")
def slopes_that_differ(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["mask"] = Causal() & Alibi(torch.full((4,), 0.5 + rank))


@bad("cannot be divided by 2 ranks")
def heads_that_do_not_divide(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["way"] = "heads"
    own[:] = [tensor[:, :3] for tensor in own]


@bad("there is no way 'around'")
def an_unknown_way(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["way"] = "around"


@bad("leave out positions 3 to 5")
def positions_missing(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["parts"] = Parts(12, ((range(3),), (range(6, 12),)))


@bad("give position 4 twice")
def positions_twice(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["parts"] = Parts(12, ((range(6),), (range(4, 12),)))


@bad("for 3 ranks")
def parts_of_another_axis(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["parts"] = contiguous(12, 3)


@bad("6 queries and 5 keys")
def fewer_keys_than_queries(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    own[1:] = [tensor[:, :, 1:] for tensor in own[1:]]


@bad("'flash' computes whole sequences")
def an_implementation_of_whole_sequences(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    options["by"] = "flash"


@bad("float64, torch.float32")
def dtypes_that_differ(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    if rank == 1:
        own[1] = own[1].float()


@bad("the parts are a list")
def parts_that_are_none(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    if rank == 1:
        options["parts"] = [range(6), range(6, 12)]


@bad("AttributeError: 'list' object has no attribute 'dim'")
def documents_that_are_no_tensor(rank: int, own: list[torch.Tensor], options: dict[str, Any]) -> None:
    if rank == 1:
        ids: Any = [0] * 12
        options["mask"] = Documents(ids)


@bad("query, key and value are Tensor, Tensor, list")
def no_tensors(rank: int, own: list[Any], options: dict[str, Any]) -> None:
    if rank == 1:
        own[2] = [1.0]


@on_ranks(2)
def test_bad_input_is_one_error_on_all_ranks() -> None:
    axis = axis_of_all()
    rank = axis.get_local_rank()
    for name, (pattern, spoil) in BAD.items():
        own = [tensor.narrow(2, 0, 6) for tensor in whole((4, 4), 6)]
        options: dict[str, Any] = {"parts": contiguous(12, 2), "mask": Causal()}
        spoil(rank, own, options)
        with pytest.raises(DisttrainError) as caught:
            attention(*own, options.pop("mask"), axis=axis, **options)
        assert isinstance(caught.value, ShapeError | ArgumentError), name
        assert re.search(pattern, str(caught.value)), (name, str(caught.value))
    # And all go on.
    own = [tensor.narrow(2, 0, 6) for tensor in whole((4, 4), 6)]
    assert attention(*own, Causal(), axis=axis).shape == own[0].shape


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_differentiate_different_calls(way: str) -> None:
    """They would send each other the keys of one for those of another."""
    axis = axis_of_all()
    own = [tensor.narrow(2, 0, 6).requires_grad_() for tensor in whole((4, 4), 6)]
    first = attention(*own, Causal(), axis=axis, way=way)
    second = attention(own[0], own[2], own[1], Causal(), axis=axis, way=way)
    with pytest.raises(ShapeError, match="backward: of call 1 on rank 0, of call 2 on rank 1"):
        (second if axis.get_local_rank() else first).sum().backward()
    third = attention(*own, Causal(), axis=axis, way=way)
    torch.autograd.grad(third.sum(), own)


@on_ranks(2)
def test_a_backward_on_one_rank_alone() -> None:
    axis = axis_of_all()
    own = [tensor.narrow(2, 0, 6).requires_grad_() for tensor in whole((4, 4), 6)]
    first = attention(*own, Causal(), axis=axis)
    turn = (lambda: attention(*own, Causal(), axis=axis)) if axis.get_local_rank() else first.sum().backward
    with pytest.raises(ShapeError, match="backward: of call 1 on rank 0, none on rank 1"):
        turn()
    assert attention(*own, Causal(), axis=axis).shape == own[0].shape


@on_ranks(3)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_that_fails_between_two_exchanges(direction: str) -> None:
    """The others learn why, at once; and nobody takes what is left on its way for keys of another call."""
    axis = axis_of_all()
    own = [tensor.narrow(2, 0, 6).requires_grad_() for tensor in whole((4, 4), 6)]
    before = attention(*own, axis=axis, way="ring")
    run, calls = getattr(Task, direction), []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if axis.get_local_rank() == 1 and len(calls) == 2:
            raise MemoryError("no room")
        return run(*args, **kwargs)

    with mock.patch.object(Task, direction, fail), pytest.raises((MemoryError, DisttrainError), match="no room"):
        (attention(*own, axis=axis, way="ring") if direction == "forward" else before).sum().backward()
    with pytest.raises(GroupError, match="has ended"):
        attention(*own, axis=axis, way="ring")
