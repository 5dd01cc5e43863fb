"""Awkward arguments for each operator of the kernels; what compilers are told of its results, beside what comes out.

A compiler reads results by what it was told. Where that is wrong, numbers are, and nobody says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import disttrain.kernels  # noqa: F401  # the operators
from disttrain.kernels.cross_entropy.pieces import LossTerms
from tests.cases.expert_operators import EXPERT_CASES
from tests.cases.kernels import drawn

OPS: Any = torch.ops.disttrain
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2
Case = tuple[Any, ...]
View = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def plain(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return drawn(*shape, dtype=dtype)


def turned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return drawn(*shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])


def first_two_turned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return drawn(shape[1], shape[0], *shape[2:], dtype=dtype).transpose(0, 1)


def sliced(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Not at the start of its memory, with gaps between rows."""
    return drawn(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., 2:-1]


def skipping(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Neighbours don't lie side by side."""
    return drawn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def repeated(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """All rows are the same memory."""
    return drawn(shape[-1], dtype=dtype).expand(shape)


def overlapping(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return drawn(sum(shape), dtype=dtype).as_strided(shape, (1,) * len(shape))


VIEWS: list[View] = [plain, turned, first_two_turned, sliced, skipping, repeated, overlapping]


def all_of(*shapes: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """The first shape in every view, the others in memory of their own; dtypes take turns."""
    views = [(shapes[0], view) for view in VIEWS] + [(shape, plain) for shape in shapes[1:]]
    for number, (shape, view) in enumerate(views):
        yield view(shape, (torch.bfloat16, torch.float32, torch.float64)[number % 3])


def norms() -> Iterator[Case]:
    for number, x in enumerate(all_of((3, 2, 4), (0, 5), (1, 1), (5,))):
        weight = drawn(x.shape[-1]) if number % 2 else None
        yield x, weight, weight, 1e-5, number % 2 > 0


def adding_norms() -> Iterator[Case]:
    for x, *rest in norms():
        yield (x, torch.zeros(x.shape, dtype=x.dtype), *rest)
        yield (torch.zeros(x.shape, dtype=x.dtype), x, *rest)


def norm_backwards() -> Iterator[Case]:
    for x, weight, _, *rest in norms():
        _, statistics = OPS.norm(x, weight, weight, *rest)
        ones, num_parameters = torch.ones((), dtype=x.dtype).expand(x.shape), 0 if weight is None else 2
        yield ones, None, x, weight, statistics, num_parameters, statistics.dtype
        yield x, ones, x, weight, statistics, num_parameters, torch.bfloat16


def glus() -> Iterator[Case]:
    for gate in all_of((3, 2, 4), (7, 5), (0, 5), (1, 1), (5,)):
        yield gate, gate, "silu"
        yield gate, torch.zeros(gate.shape, dtype=gate.dtype), "gelu_tanh"


def glu_backwards() -> Iterator[Case]:
    for gate, up, activation in glus():
        yield torch.ones((), dtype=gate.dtype).expand(gate.shape), gate, up, activation


def rotations() -> Iterator[Case]:
    for x in all_of((2, 3, 5, 4), (1, 1, 1, 2), (0, 3, 5, 4), (2, 3, 0, 4)):
        angles = drawn(x.shape[2], x.shape[3] // 2)
        for is_interleaved in (False, True):
            yield x, angles, angles.mT.contiguous().mT, is_interleaved, False


def rotations_in_place() -> Iterator[Case]:
    for x, *rest in rotations():
        yield (torch.empty_like(x).copy_(x), *rest)


def casts() -> Iterator[Case]:
    wanted = [(True, True), (True, False), (False, True), (False, False)]
    for number, x in enumerate(all_of((20, 5), (16, 32), (1, 1), (0, 4), (4, 0))):
        for by_rows in (False, True):
            yield x.float(), None, 1, FLOAT8[number % 2], by_rows, *wanted[number % 4]
    parts = drawn(20, 32).to(FLOAT8[0])
    for by_rows in (False, True):
        yield parts, torch.ones(3), 8, FLOAT8[0], by_rows, True, True


def float8_products() -> Iterator[Case]:
    for rows, columns in ((16, 32), (1, 16), (0, 16)):
        a, b = torch.ones(rows, columns).to(FLOAT8[0]), torch.ones(48, columns).to(FLOAT8[1])
        yield a, torch.ones(1), b, torch.ones(1), torch.float32, True
        yield a, torch.ones(rows), b, torch.ones(48), torch.bfloat16, False


def block_tables() -> Iterator[Case]:
    for num_queries, num_keys in ((1, 1), (300, 300), (130, 520)):
        like = drawn(2, 4, num_queries, 8)
        yield like, ["Causal"], [0], [], num_queries, num_keys
        yield like, ["SlidingWindow", "Causal"], [17, 0], [], num_queries, num_keys
        yield like, ["Prefix"], [0], [torch.tensor([7, 47])], num_queries, num_keys
        if num_queries == num_keys:
            ids = (torch.arange(num_queries) // 40).expand(2, -1)
            yield like, ["Documents"], [0], [ids[0]], num_queries, num_keys
            yield like, ["Causal", "Documents"], [0, 0], [ids], num_queries, num_keys


def losses() -> Iterator[Case]:
    """The arguments that the operators of the loss share."""
    terms = [float(one) for one in LossTerms(11, 0, -100, 0.1, 0.0)]
    for number, hidden in enumerate(all_of((7, 5), (1, 1), (0, 5))):
        weight, bias = drawn(hidden.shape[1], 11, dtype=hidden.dtype).mT, drawn(11, dtype=hidden.dtype)
        target, block_bytes = torch.arange(len(hidden)), (1 << 20, 64)[number % 2]
        yield hidden, weight, bias if number % 2 else None, target, None, terms, "", block_bytes


def summed_losses() -> Iterator[Case]:
    for number, arguments in enumerate(losses()):
        has_bias = arguments[2] is not None
        yield (*arguments, [[True, True, has_bias], [False, True, False], [False, False, False]][number % 3])


def loss_backwards() -> Iterator[Case]:
    for *layer, terms, group_name, block_bytes in losses():
        _, row_losses, log_sums = OPS.linear_loss_rows(*layer, terms, group_name, block_bytes)
        wanted = [True, True, layer[2] is not None]
        yield (torch.ones_like(row_losses), *layer, log_sums, terms, group_name, block_bytes, wanted)


def sparse_products() -> Iterator[Case]:
    """Packed from another version of the weight."""
    for x in all_of((8, 16), (5, 16), (0, 16), (1, 16)):
        for weight_view in (plain, turned):
            for is_transposed in (False, True):
                weight = weight_view((16, 4) if is_transposed else (4, 16), x.dtype)
                yield x, weight, torch.empty(0, dtype=x.dtype), torch.zeros(2, dtype=torch.int64), is_transposed


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "add_norm": adding_norms,
    "attention_blocks": block_tables,
    **EXPERT_CASES,
    "float8_cast": casts,
    "float8_mm": float8_products,
    "glu": glus,
    "glu_backward": glu_backwards,
    "linear_loss_backward": loss_backwards,
    "linear_loss_rows": losses,
    "linear_loss_sum": summed_losses,
    "norm": norms,
    "norm_backward": norm_backwards,
    "rotate": rotations,
    "rotate_": rotations_in_place,
    "sparse24_mm": sparse_products,
}


def check_what_is_told(name: str, mode: FakeTensorMode, device: str = "cpu") -> None:
    """Sizes, strides, dtypes, devices; and that nothing shares memory with anything."""
    op = getattr(OPS, name).default
    for case in CASES[name]():
        arguments = tree_map_only(torch.Tensor, lambda one: moved(one, device), case)
        with mode:
            told = [
                description(one) for one in tensors_of(op(*tree_map_only(torch.Tensor, mode.from_tensor, arguments)))
            ]
        given = places(arguments)
        results = op(*arguments)
        assert told == [description(one) for one in tensors_of(results)], [
            description(one) for one in tensors_of(arguments)
        ]
        own = places(results)
        assert len(set(own) - set(given)) == len(own)


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """With the same strides, from the same place of its memory."""
    if device == "cpu":
        return tensor
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def places(values: Any) -> list[int]:
    """Where in memory they lie, those that have elements."""
    return [one.untyped_storage().data_ptr() for one in tensors_of(values) if one.numel()]


def description(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Of the strides those that say where an element lies."""
    shape = tuple(int(size) for size in tensor.shape)
    strides = tuple(
        int(stride) if size > 1 and 0 not in shape else 0 for stride, size in zip(tensor.stride(), shape, strict=True)
    )
    return shape, strides, tensor.dtype, tensor.device.type, int(tensor.storage_offset())
