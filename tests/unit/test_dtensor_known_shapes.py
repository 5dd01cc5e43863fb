"""Results of frequent operators by formulas, beside torch's kernels for the meta device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from disttrain.dtensor.dispatch import global_outputs
from disttrain.dtensor.dispatch.known_shapes import FORMULAS, known_outputs

Draw = Callable[[], list[Any]]
SIZES = (2, 3, 4, 2, 3, 1, 0)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


class Drawn:
    """Draws arguments, right ones and wrong ones, of the kinds that operators take."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.dtype = self.random.choice(DTYPES[:1] * 4 + DTYPES)

    def is_rare(self, one_in: int = 8) -> bool:
        return self.random.randrange(one_in) == 0

    def shape(self, num_dims: int | None = None) -> list[int]:
        return [self.random.choice(SIZES) for _ in range(self.random.randint(0, 4) if num_dims is None else num_dims)]

    def tensor(self, shape: list[int]) -> torch.Tensor:
        """Contiguous, or permuted, or expanded, or with gaps."""
        tensor = torch.empty(shape, dtype=DTYPES[1] if self.is_rare(20) else self.dtype, device="meta")
        kind = self.random.randrange(8)
        if kind == 0 and shape:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == 1 and 0 not in shape:
            return tensor[tuple(slice(0, self.random.choice([1, None])) for _ in shape)].expand(shape)
        if kind == 2:
            return torch.empty_strided(
                shape, [stride + 1 for stride in tensor.stride()], dtype=tensor.dtype, device="meta"
            )
        return tensor

    def broadcast(self, shape: list[int]) -> list[int]:
        """As it is, or smaller, or wrong."""
        smaller = [self.random.choice([size, size, 1]) for size in shape]
        return self.random.choice([shape, shape, smaller, smaller[len(smaller) // 2 :], self.shape()])

    def norm(self) -> list[Any]:
        rows, normalized = self.shape(), self.shape(self.random.randint(0, 2))
        whole = rows + normalized
        return [whole, rows, self.shape(1) if self.is_rare() else normalized]

    def vector(self, shape: list[int]) -> torch.Tensor | None:
        return None if self.is_rare(3) else self.tensor(shape)

    def arguments(self, name: str) -> list[Any]:
        shape = self.shape()
        if name.startswith("aten.native_layer_norm_backward"):
            whole, rows, normalized = self.norm()
            statistics = [self.tensor(rows + [1] * len(normalized)) for _ in range(2)]
            vectors = [self.vector(normalized) for _ in range(2)]
            return [self.tensor(whole), self.tensor(whole), normalized, *statistics, *vectors, self.mask()]
        if name.startswith("aten.native_layer_norm"):
            whole, _, normalized = self.norm()
            return [self.tensor(whole), normalized, self.vector(normalized), self.vector(normalized), 1e-5]
        if "softmax_backward" in name:
            return [self.tensor(shape), self.tensor(self.broadcast(shape)), self.dim(), self.random.choice(DTYPES)]
        if "softmax" in name:
            return [self.tensor(shape), self.dim(), self.is_rare()]
        if name in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default"):
            b, m, k, n = self.shape(4)
            factors = [[m, k], [n, k] if self.is_rare() else [k, n]]
            if "bmm" in name:
                factors = [[b, *factor] for factor in factors]
            added = [self.random.choice([[m, n], [n], [1, n], [m, 1], [], [7]])] if "addmm" in name else []
            return [self.tensor(each) for each in (*added, *factors)]
        if name in ("aten.sum.dim_IntList", "aten.mean.dim"):
            dims = [self.dim() for _ in range(self.random.randint(0, 2))]
            return [self.tensor(shape), dims, *self.random.choice([[], [True], [False]])]
        if "view" in name:
            return [self.tensor(shape), self.regrouped(shape)]
        if ".Scalar" in name or "Tensor_Scalar" in name:
            return [self.tensor(shape), self.random.choice([2, 0.5, True, -1])]
        if "threshold_backward" in name:
            return [self.tensor(shape), self.tensor(self.broadcast(shape)), 0]
        if ".Tensor" in name or "_backward" in name or "imum" in name:
            return [self.tensor(shape), self.tensor(self.broadcast(shape))]
        return [self.tensor(shape)]

    def mask(self) -> list[bool]:
        return [not self.is_rare(3) for _ in range(3)]

    def dim(self) -> int:
        return self.random.randint(-4, 3)

    def regrouped(self, shape: list[int]) -> list[int]:
        size = self.random.sample(shape, len(shape))
        if len(size) > 1 and self.is_rare(2):
            size = [size[0] * size[1], *size[2:]]
        if size and self.is_rare(3):
            size[self.random.randrange(len(size))] = -1
        return size


def described(outputs: tuple[torch.Tensor, ...] | None) -> list[Any] | None:
    return outputs and [(tuple(output.shape), output.stride(), output.dtype) for output in outputs]


@pytest.mark.parametrize("op", FORMULAS, ids=str)
def test_a_formula_is_as_torch_or_is_not_there(op: Any) -> None:
    num_known = 0
    for seed in range(150):
        args = Drawn(seed).arguments(str(op))
        known = known_outputs(op, args, {})
        if known is not None:
            num_known += 1
            assert described(known) == described(global_outputs._outputs(op, args, {})), args
    assert num_known > 2
