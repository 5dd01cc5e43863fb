"""The collectives as operators that a graph can hold, under `torch.ops.disttrain`.

A graph knows tensors and constants, neither groups nor handles. So a group goes by its name, which the current world
looks up; and each collective is two operators. The first starts it and gives a tensor with the number of the handle;
`wait_tensor` takes that number and gives the result; its other arguments tell what it looks like. What lies between
them in the graph runs meanwhile.

Ranks may compile different graphs. So the first operators have an ordered effect: they are kept in the order of the
program, also where a result is unused. Inductor forgets that order (torch 2.13 looks for it under another name), and
fusion and the pass `reorder_for_peak_memory` change it. So each may be given the handle of the one before as `after`,
which it does not look at: DTensors, whose graphs differ among ranks, do so (`order.py`). Others whose graphs differ
compile with `options={"reorder_for_peak_memory": False}`.

A compiler may plan memory as it likes: the result is new memory, not an alias of something that the graph knew before,
and what is under way reads a copy of the input, which may be overwritten as soon as the first operator has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttrain.process_group._c10d import ReduceOp, keep_in_order
from disttrain.process_group.calls import collectives
from disttrain.process_group.current import current_world
from disttrain.process_group.door import issue, parts_of
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.work import Work

REDUCE_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}

Started = tuple[torch.Tensor, Work]
"""The output of a collective, and the handle to wait for before reading it."""


def start_all_reduce(input: torch.Tensor, reduce_op: str, group_name: str) -> Started:
    output = input.clone(memory_format=torch.contiguous_format)
    group = _group("all_reduce", group_name)
    return output, _work(collectives.all_reduce(output, REDUCE_OPS[reduce_op], group, async_op=True))


def start_broadcast(input: torch.Tensor, src: int, group_name: str) -> Started:
    output = input.clone(memory_format=torch.contiguous_format)
    group = _group("broadcast", group_name)
    return output, _work(collectives.broadcast(output, group=group, async_op=True, group_src=src))


def start_all_gather(input: torch.Tensor, group_name: str) -> Started:
    group = _group("all_gather_into_tensor", group_name)
    sent = input.contiguous()
    output = sent.new_empty((input.shape[0] * group.group_size, *input.shape[1:]))
    return output, _work(collectives.all_gather_into_tensor(output, sent, group, async_op=True))


def start_reduce_scatter(input: torch.Tensor, reduce_op: str, group_name: str) -> Started:
    group = _group("reduce_scatter_tensor", group_name)
    sent = input.contiguous()
    output = sent.new_empty((input.shape[0] // group.group_size, *input.shape[1:]))
    op = REDUCE_OPS[reduce_op]
    return output, _work(collectives.reduce_scatter_tensor(output, sent, op, group, async_op=True))


def start_all_to_all(
    input: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str
) -> Started:
    group = _group("all_to_all_single", group_name)
    sent = input.contiguous()
    output = sent.new_empty((sum(output_splits), *input.shape[1:]))
    run = group.backend_of("all_to_all_single", input).all_to_all_single
    arguments = (output, sent, output_splits, input_splits, True)
    how = parts_of(output_splits, input_splits)
    return output, _work(issue(group, "all_to_all_single", run, arguments, (sent,), (output,), True, None, how))


def _group(operation: str, group_name: str) -> ProcessGroup:
    return current_world(operation).find_group(operation, group_name)


def _work(work: Work | None) -> Work:
    assert work is not None  # async_op=True was asked for
    return work


def _starting(start: Callable[..., Started]) -> Callable[..., torch.Tensor]:
    def run(input: torch.Tensor, *arguments: Any, after: torch.Tensor | None = None) -> torch.Tensor:
        sent = input if start in _COPY_THEMSELVES else input.clone(memory_format=torch.contiguous_format)
        return current_world().keep_pending(*start(sent, *arguments))

    return run


def _start_shape(*_: object, after: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _wait(handle: torch.Tensor, input: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    output, work = current_world("wait_tensor").take_pending(int(handle.item()))
    work.wait()
    return output


def _wait_shape(handle: torch.Tensor, input: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return input.new_empty(size)


_COPY_THEMSELVES = (start_all_reduce, start_broadcast)
_STARTS: dict[str, Callable[..., Started]] = {
    "all_reduce(Tensor input, str reduce_op, str group_name": start_all_reduce,
    "broadcast(Tensor input, int src, str group_name": start_broadcast,
    "all_gather_into_tensor(Tensor input, str group_name": start_all_gather,
    "reduce_scatter_tensor(Tensor input, str reduce_op, str group_name": start_reduce_scatter,
    "all_to_all_single(Tensor input, SymInt[] output_splits, SymInt[] input_splits, str group_name": start_all_to_all,
}
_library = torch.library.Library("disttrain", "DEF")


def _define(schema: str, run: Callable[..., torch.Tensor], shape: Callable[..., torch.Tensor]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"disttrain::{name}", shape, lib=_library)


for _schema, _start in _STARTS.items():
    _define(f"{_schema}, *, Tensor? after=None) -> Tensor", _starting(_start), _start_shape)
    keep_in_order(f"disttrain::{_schema.partition('(')[0]}")
_define("wait_tensor(Tensor handle, Tensor input, SymInt[] size) -> Tensor", _wait, _wait_shape)
