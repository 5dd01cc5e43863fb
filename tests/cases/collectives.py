"""What every collective must do, on any transport: each case runs on all ranks and checks its own values."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain import ReduceOp
from disttrain.errors import DisttrainError
from disttrain.process_group import all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced

MOVED = ("float32", "bfloat16", "int16", "bool", "complex64", "float8_e4m3fn", "uint32")
NUMBERS = ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64", "complex64")


def place() -> tuple[int, int]:
    return disttrain.get_rank(), disttrain.get_world_size()


def filled(value: int, count: int, dtype: str) -> torch.Tensor:
    """`count` small numbers that start at `value`."""
    return torch.arange(value, value + count).remainder(7).to(torch.float32).to(getattr(torch, dtype))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit by bit, for dtypes that torch cannot compare as well."""
    return left.dtype == right.dtype and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


def all_gather_of_lists() -> None:
    rank, size = place()
    for dtype in MOVED:
        for sizes in ([3] * size, list(range(size)), [0] * size):
            outputs = [filled(0, count, dtype) for count in sizes]
            disttrain.all_gather(outputs, filled(rank + 1, sizes[rank], dtype))
            for other, output in enumerate(outputs):
                assert same(output, filled(other + 1, sizes[other], dtype))


def all_gather_along_and_across() -> None:
    rank, size = place()
    for dtype in ("float32", "int16"):
        mine = filled(rank, 6, dtype).view(2, 3)
        everyone = torch.stack([filled(other, 6, dtype).view(2, 3) for other in range(size)])
        for shape in ((2 * size, 3), (size, 2, 3), (6 * size,)):
            output = filled(0, 6 * size, dtype).view(shape)
            disttrain.all_gather_into_tensor(output, mine)
            assert same(output, everyone)
        one = filled(rank, 1, dtype).view(())
        output = filled(0, size, dtype)
        disttrain.all_gather_into_tensor(output, one)
        assert same(output, torch.cat([filled(other, 1, dtype) for other in range(size)]))


def several_tensors_at_once() -> None:
    rank, size = place()
    for dtype in ("float32", "bfloat16"):
        counts = (6, 1, 4096)
        mine = [filled(rank, count, dtype) for count in counts]
        outputs = [filled(0, count * size, dtype).view(size, count) for count in counts]
        for async_op in (False, True):
            work = all_gather_into_tensor_coalesced(outputs, mine, async_op=async_op)
            if work is not None:
                work.wait()
            for count, output in zip(counts, outputs, strict=True):
                assert same(output, torch.stack([filled(other, count, dtype) for other in range(size)]))
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            parts = [filled(7, count, dtype) for count in counts]
            reduce_scatter_tensor_coalesced(parts, outputs, op)
            for count, part in zip(counts, parts, strict=True):
                whole = filled(rank, count, dtype)
                assert same(part, whole if op == ReduceOp.AVG else whole * size)
    with pytest.raises(DisttrainError, match="2 outputs and 1 inputs"):
        all_gather_into_tensor_coalesced(outputs[:2], mine[:1])


def gather_and_scatter() -> None:
    rank, size = place()
    root = size - 1
    for dtype in MOVED:
        for count in (4, 0):
            mine = filled(rank, count, dtype)
            parts = [filled(0, count, dtype).view(2, -1) for _ in range(size)] if rank == root else None
            disttrain.gather(mine, parts, dst=root)
            for other, part in enumerate(parts or ()):
                assert same(part, filled(other, count, dtype))
            received = filled(0, count, dtype)
            disttrain.scatter(received, parts, group_src=root)
            assert same(received, mine)


def reduce_to_one() -> None:
    rank, size = place()
    for dtype in NUMBERS:
        tensor = filled(rank, 4, dtype)
        disttrain.reduce(tensor, dst=1)
        total = torch.stack([filled(other, 4, dtype) for other in range(size)]).sum(0).to(tensor.dtype)
        assert same(tensor, total if rank == 1 else filled(rank, 4, dtype)), dtype


def every_reduction() -> None:
    rank, size = place()
    for dtype in NUMBERS:
        every = torch.stack([filled(other + 1, 2 * size, dtype) for other in range(size)])
        expected = {ReduceOp.SUM: every.sum(0), ReduceOp.AVG: every.sum(0) / size}
        if not every.is_complex():
            expected |= {
                ReduceOp.PRODUCT: every.prod(0),
                ReduceOp.MIN: every.amin(0),
                ReduceOp.MAX: every.amax(0),
            }
        if not (every.is_floating_point() or every.is_complex()):
            expected |= {
                ReduceOp.BAND: _folded(torch.bitwise_and, every),
                ReduceOp.BXOR: _folded(torch.bitwise_xor, every),
            }
        for op, whole in expected.items():
            _check_reduction(
                every[rank], op, whole.to(every.dtype), exact=not (every.is_floating_point() or every.is_complex())
            )


def premultiplied_sums() -> None:
    rank, size = place()
    for dtype in ("float32", "float64", "complex64"):
        every = torch.stack([filled(other + 1, 2 * size, dtype) for other in range(size)])
        weights = torch.arange(1, size + 1).to(every.dtype)[:, None]
        _check_reduction(every[rank], disttrain.premul_sum(rank + 1.0), (every * weights).sum(0), exact=False)


def reductions_of_truth() -> None:
    rank, size = place()
    every = torch.tensor([[(other >> bit) & 1 for bit in range(3)] + [1, 0] for other in range(size)]).bool()
    expected = {
        ReduceOp.SUM: every.any(0),
        ReduceOp.MAX: every.any(0),
        ReduceOp.BOR: every.any(0),
        ReduceOp.PRODUCT: every.all(0),
        ReduceOp.MIN: every.all(0),
        ReduceOp.BAND: every.all(0),
        ReduceOp.BXOR: every.sum(0) % 2 == 1,
    }
    for op, whole in expected.items():
        tensor = every[rank].clone()
        disttrain.all_reduce(tensor, op)
        assert torch.equal(tensor, whole), op


def reduce_scatter_of_lists() -> None:
    rank, size = place()
    for dtype in ("float32", "int16", "complex64"):
        for sizes in ([3] * size, list(range(1, size + 1))):
            every = [[filled(other + 2 * part, sizes[part], dtype) for part in range(size)] for other in range(size)]
            output = filled(0, sizes[rank], dtype)
            disttrain.reduce_scatter(output, every[rank])
            whole = torch.stack([every[other][rank] for other in range(size)]).sum(0)
            assert same(output, whole.to(output.dtype))
            assert same(every[rank][0], filled(rank, sizes[0], dtype)), "the input has changed"


def everyone_to_everyone() -> None:
    rank, size = place()
    for dtype in MOVED:
        sent = [filled(3 * rank + other, rank + other, dtype) for other in range(size)]
        received = [filled(0, other + rank, dtype) for other in range(size)]
        disttrain.all_to_all(received, sent)
        for other, part in enumerate(received):
            assert same(part, filled(3 * other + rank, other + rank, dtype))
        # Of one size on all ranks but the first two, which exchange more.
        counts = [[3 + 4 * (this < 2 and other < 2) for other in range(size)] for this in range(size)]
        sent = [filled(3 * rank + other, counts[rank][other], dtype) for other in range(size)]
        received = [filled(0, count, dtype).view(-1, 1) for count in counts[rank]]
        disttrain.all_to_all(received, sent)
        for other, part in enumerate(received):
            assert same(part, filled(3 * other + rank, counts[other][rank], dtype).view(-1, 1))
        joined = filled(0, sum(counts[rank]), dtype)
        disttrain.all_to_all_single(joined, torch.cat(sent), counts[rank], counts[rank])
        assert same(joined, torch.cat(received).view(-1))
        equal = filled(rank, 2 * size, dtype)
        output = filled(0, 2 * size, dtype)
        disttrain.all_to_all_single(output, equal)
        assert same(
            output, torch.cat([filled(other, 2 * size, dtype)[2 * rank : 2 * rank + 2] for other in range(size)])
        )
        # Rows of two, of which rank r sends other ranks one more than its rank, and itself none.
        rows = [0 if other == rank else rank + 1 for other in range(size)]
        from_others = [0 if other == rank else other + 1 for other in range(size)]
        uneven = filled(rank, 2 * sum(rows), dtype).view(-1, 2)
        output = filled(0, 2 * sum(from_others), dtype).view(-1, 2)
        disttrain.all_to_all_single(output, uneven, from_others, rows)
        expected = []
        for other in range(size):
            theirs = [0 if third == other else other + 1 for third in range(size)]
            whole = filled(other, 2 * sum(theirs), dtype).view(-1, 2)
            expected.append(whole.split(theirs)[rank])
        assert same(output, torch.cat(expected))


def messages_from_anybody_and_in_batches() -> None:
    rank, size = place()
    if rank == 0:
        seen = {}
        for _ in range(size - 1):
            value = torch.zeros(2)
            source = disttrain.recv(value, tag=5)
            seen[source] = value.tolist()
        assert seen == {other: [other, 1.0] for other in range(1, size)}
    else:
        disttrain.send(torch.tensor([float(rank), 1.0]), 0, tag=5)
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    received = torch.zeros(3)
    works = disttrain.batch_isend_irecv(
        [
            disttrain.P2POp(disttrain.isend, torch.full((3,), float(rank)), ahead),
            disttrain.P2POp(disttrain.irecv, received, behind),
        ]
    )
    assert [work.wait() for work in works] == [True, True]
    assert works[1].source_rank() == behind
    assert received.tolist() == [behind] * 3


def several_as_one() -> None:
    rank, size = place()
    tensors = [torch.full((2,), float(rank + step)) for step in range(3)]
    gathered = torch.empty(size)
    with disttrain.coalescing_manager() as together:
        for tensor in tensors:
            assert disttrain.all_reduce(tensor) is None
        disttrain.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    assert len(together.works) == 4
    assert [tensor[0].item() for tensor in tensors] == [sum(range(step, size + step)) for step in range(3)]
    assert gathered.tolist() == list(range(size))
    with disttrain.coalescing_manager(async_ops=True) as together:
        disttrain.broadcast(gathered, 1)
    assert together.wait(120)


def futures_hold_the_outputs() -> None:
    rank, size = place()
    for dtype in ("float32", "int16"):
        tensor = filled(rank, 2, dtype)
        work = disttrain.all_reduce(tensor, async_op=True)
        assert work is not None
        (result,) = work.get_future().wait()
        assert result is tensor
        assert tensor.tolist() == [sum(range(size)), sum(range(1, size + 1))]
        assert work.wait()
        assert tensor.tolist() == [sum(range(size)), sum(range(1, size + 1))]


def mistakes_are_refused_alike_on_all_ranks() -> None:
    rank, size = place()
    ones = torch.ones(4)
    gaps = torch.ones(4, 2)[:, 0]
    few = [ones.clone() for _ in range(size - 1)]
    full = [ones.clone() for _ in range(size)]
    complex_ones = ones.to(torch.complex64)
    mistakes = {
        "has .* tensors, the group": [
            lambda: disttrain.all_gather(few, ones),
            lambda: disttrain.reduce_scatter(ones, few),
            lambda: disttrain.all_to_all(full, few),
            lambda: disttrain.all_to_all([], []),
            lambda: disttrain.gather(ones, None, dst=rank),
            lambda: disttrain.scatter(ones, few, src=rank),
        ],
        "must be contiguous": [
            lambda: disttrain.reduce(gaps, 0),
            lambda: disttrain.gather(gaps, dst=(rank + 1) % size),
            lambda: disttrain.all_gather(full, gaps),
            lambda: disttrain.all_to_all_single(gaps, gaps),
            lambda: disttrain.irecv(gaps),
        ],
        "must be alike": [
            lambda: disttrain.all_gather(full, ones.double()),
            lambda: disttrain.all_to_all_single(ones, ones.int()),
        ],
        "same number of elements": [
            lambda: disttrain.all_gather(full, torch.ones(5)),
            lambda: disttrain.reduce_scatter(torch.ones(5), full),
            lambda: disttrain.scatter(torch.ones(5), full, src=rank),
        ],
        "equal parts": [lambda: disttrain.all_to_all_single(torch.ones(2 * size + 1), torch.ones(2 * size + 1))],
        "sizes that add up": [
            lambda: disttrain.all_to_all_single(ones, ones, [1] * size, [4] * size),
            lambda: disttrain.all_to_all_single(ones, ones, [4, *[0] * size], None),
        ],
        "is given on group rank": [lambda: disttrain.gather(ones, full, dst=(rank + 1) % size)],
        "has no meaning": [
            lambda: disttrain.all_reduce(ones.clone(), ReduceOp.BAND),
            lambda: disttrain.all_reduce(complex_ones.clone(), ReduceOp.MAX),
            lambda: disttrain.reduce(torch.ones(2).int(), 0, disttrain.premul_sum(2.0)),
        ],
        "not a member": [lambda: disttrain.reduce(ones, 9), lambda: disttrain.gather(ones, dst=9)],
        "an argument is not what belongs there: 'list' object": [
            lambda: disttrain.all_reduce([1.0]),  # type: ignore[arg-type]
            lambda: disttrain.all_gather_into_tensor(ones, [1.0]),  # type: ignore[arg-type]
            lambda: disttrain.broadcast([1.0], 0),  # type: ignore[arg-type]
        ],
        "op=.* is unknown": [lambda: disttrain.P2POp(disttrain.all_reduce, ones, 0)],
        "the list of messages is empty": [lambda: disttrain.batch_isend_irecv([])],
    }
    for rule, attempts in mistakes.items():
        for attempt in attempts:
            with pytest.raises(DisttrainError, match=rule):
                attempt()
    tensor = torch.ones(1)
    disttrain.all_reduce(tensor)
    assert tensor.item() == size, "the group is as good as before"


def _check_reduction(mine: torch.Tensor, op: object, whole: torch.Tensor, *, exact: bool) -> None:
    rank, _ = place()
    tolerances = {"rtol": 0, "atol": 0} if exact else {}
    tensor = mine.clone()
    disttrain.all_reduce(tensor, op)
    torch.testing.assert_close(tensor, whole, **tolerances)
    part = torch.empty_like(mine[:2])
    disttrain.reduce_scatter_tensor(part, mine, op)
    torch.testing.assert_close(part, whole[2 * rank : 2 * rank + 2], **tolerances)
    tensor = mine.clone()
    disttrain.reduce(tensor, 0, op)
    torch.testing.assert_close(tensor, mine if rank else whole, **tolerances)


def _folded(fold: object, every: torch.Tensor) -> torch.Tensor:
    total = every[0]
    for tensor in every[1:]:
        total = fold(total, tensor)
    return total


CASES = {
    case.__name__: case
    for case in (
        all_gather_of_lists,
        all_gather_along_and_across,
        several_tensors_at_once,
        gather_and_scatter,
        reduce_to_one,
        every_reduction,
        premultiplied_sums,
        reductions_of_truth,
        reduce_scatter_of_lists,
        everyone_to_everyone,
        messages_from_anybody_and_in_batches,
        several_as_one,
        futures_hold_the_outputs,
        mistakes_are_refused_alike_on_all_ranks,
    )
}
