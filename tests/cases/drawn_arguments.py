"""Draws arguments of operators, on the meta device: right ones and wrong ones, of the kinds that operators take."""

from __future__ import annotations

import random
import re
from typing import Any

import torch

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


class DrawnOfKinds(Drawn):
    """Arguments of operators that compare, join, look up, order or scatter."""

    def whole(self, shape: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32 if self.is_rare() else dtype, device="meta")

    def number(self) -> Any:
        return self.random.choice([2, 0.5, True, -1])

    def operand(self, shape: list[int]) -> torch.Tensor:
        return self.tensor(self.broadcast(shape)) if self.is_rare(3) else self.tensor(shape)

    def smaller(self, shape: list[int]) -> list[int]:
        return [max(size - self.is_rare(3), 0) for size in shape]

    def norms(self, operator: str) -> list[Any]:
        batch, groups = self.random.choice([1, 2, 3]), 2
        channels, sizes = self.random.choice([2, 4]), [self.random.choice([1, 3, 4]) for _ in range(2)]
        operand = self.tensor([batch, channels, *sizes])
        vectors = [self.vector([channels]) for _ in range(2)]
        counts = [batch, channels, sizes[0] * sizes[1], groups]
        if operator == "native_group_norm":
            return [operand, *vectors, *counts, 1e-5]
        if operator == "native_group_norm_backward":
            statistics = [self.tensor([batch, groups]) for _ in range(2)]
            return [self.tensor([*operand.shape]), operand, *statistics, vectors[0], *counts, self.mask()]
        running = [self.tensor([channels]) for _ in range(2)]
        return [operand, *vectors, *running, not self.is_rare(3), 0.1, 1e-5]

    def windows(self, operator: str) -> list[Any]:
        """Arguments of convolutions and poolings, of which most are right."""
        choose = self.random.choice
        batch, channels, *sizes = [choose([1, 2, 3]), choose([2, 4, 4]), choose([5, 6]), choose([5, 7])]
        stride, padding, dilation = [choose([1, 2]), 2], [0, choose([0, 1])], [choose([1, 1, 2]), 1]
        operand, is_backward = self.tensor([batch, channels, *sizes]), operator.endswith("backward")
        if operator.startswith("convolution"):
            groups = choose([1, 2])
            transposed = choose([False, True])
            more = choose([[0, 0], [0, 1]]) if transposed else [0, 0]
            outer, inner = choose([2, 4]), channels // groups
            kernel = [choose([2, 3]), 3]
            weight = self.tensor([channels, outer, *kernel] if transposed else [outer, inner, *kernel])
            rest = [stride, padding, dilation, transposed, more, groups]
            if not is_backward:
                return [operand, weight, self.vector([outer * groups if transposed else outer]), *rest]
            shape = torch.ops.aten.convolution.default(
                *[torch.empty(each.shape, device="meta") for each in (operand, weight)], None, *rest
            ).shape
            return [self.tensor([*shape]), operand, weight, [shape[1]], *rest, self.mask()]
        if "3d" in operator:
            sizes, stride, padding, dilation = (
                [*each, 2 - (each == padding)] for each in (sizes, stride, padding, dilation)
            )
            operand = self.tensor([batch, channels, *sizes])
        settings = [
            [2, 3, 2][: len(sizes)],
            stride,
            padding,
            *([dilation] if operator.startswith("max") else []),
            self.is_rare(),
        ]
        forward = getattr(torch.ops.aten, operator.removesuffix("_backward")).default
        if not is_backward:
            return [operand, *settings]
        pooled = forward(torch.empty(operand.shape, device="meta"), *settings)
        largest = operator.startswith("max")
        shape = [*(pooled[0] if largest else pooled).shape]
        indices = torch.empty(shape, dtype=torch.int64, device="meta")
        return [self.tensor(shape), operand, *settings, *([indices] if largest else [True, None])]

    def resampled(self, operator: str) -> list[Any]:
        """Arguments of interpolations, of poolings to a size, and of paddings."""
        num_dims = int(re.findall("([123])d", operator)[0])
        sizes, sized = ([self.random.choice([3, 4, 1, 5]) for _ in range(num_dims)] for _ in range(2))
        shape = [self.random.choice([1, 2]), self.random.choice([1, 3]), *sizes]
        operand, is_backward = self.tensor(shape), operator.endswith("backward")
        if "_pad" in operator:
            padding = [self.random.choice([0, 1, 1, 2]) for _ in range(2 * num_dims)]
            if not is_backward:
                return [operand, padding]
            for at in range(num_dims):
                sizes[-1 - at] += sum(padding[2 * at : 2 * at + 2])
            return [self.tensor([*shape[:2], *sizes]), operand, padding]
        if "adaptive" in operator:
            grad = self.tensor([*shape[:2], *sized])
            if not is_backward:
                return [operand, sized]
            indices = torch.empty(grad.shape, dtype=torch.int64, device="meta")
            return [grad, operand, *([indices] if "max" in operator else [])]
        settings = [] if "nearest" in operator else [False]
        factors = [None] * num_dims
        if is_backward:
            return [self.tensor([*shape[:2], *sized]), sized, shape, *settings, *factors]
        return [operand, sized, *settings, *factors]

    def measured(self, operator: str, overload: str, shape: list[int]) -> list[Any] | None:
        """Arguments of what measures, counts or searches; None for other operators."""
        operand, dim = self.tensor(shape), self.dim()
        dims = [self.dim() for _ in range(self.random.randint(0, 2))]
        if operator in ("cumprod", "cummax", "cummin"):
            return [operand, dim]
        if operator in ("median", "nanmedian", "mode") or overload == "dim_int":
            return [operand, dim, self.is_rare(2)]
        if operator == "prod":
            return [operand]
        if operator in ("var_mean", "std_mean"):
            return [operand, self.random.choice([None, dims])]
        if operator == "kthvalue":
            return [operand, self.random.randint(1, 3), dim, self.is_rare(2)]
        if operator == "count_nonzero":
            return [operand, self.random.choice([None, dim]) if overload == "default" else dims]
        if operator == "norm":
            return [operand, self.random.choice([None, 1, 2, 3.0]), dims, self.is_rare(2)]
        if operator in ("searchsorted", "bucketize"):
            ordered = self.tensor(self.random.choice([[5], [*shape[:-1], 5]]))
            return [ordered, operand] if operator == "searchsorted" else [operand, ordered]
        return [operand, self.random.randint(1, 5)] if operator == "histc" else self.distances(operator, shape)

    def distances(self, operator: str, shape: list[int]) -> list[Any] | None:
        if operator == "dist":
            return [self.tensor(shape), self.operand(shape)]
        if operator.startswith("_cdist"):
            rows, columns, width = self.shape(3)
            batch = self.shape(self.random.choice([0, 0, 1]))
            both = [self.tensor([*batch, size, width]) for size in (rows, columns)]
            if operator == "_cdist_forward":
                return [*both, 2.0, None]
            distances = [self.tensor([*batch, rows, columns]) for _ in range(2)]
            return [distances[0], *both, 2.0, distances[1]]
        return None

    def arguments(self, name: str) -> list[Any]:  # noqa: C901, PLR0912, PLR0915  a case for each kind
        name = name.removeprefix("aten.")
        operator, overload = name.split(".")
        shape, dim = self.shape(), self.dim()
        some_dims = [self.dim() for _ in range(self.random.randint(0, 2))]
        operand = self.tensor(shape)
        mask = torch.empty(self.broadcast(shape), dtype=torch.bool, device="meta")
        index = self.whole(self.smaller(shape))
        if (measured := self.measured(operator, overload, shape)) is not None:
            return measured
        if operator.lstrip("_").startswith(("upsample", "adaptive", "reflection", "replication")):
            return self.resampled(operator)
        if operator in ("cat", "stack"):
            return [[operand, self.tensor(shape if self.is_rare(2) else self.smaller(shape))], dim]
        if operator == "where":
            return [mask, operand, self.operand(shape)]
        if operator.startswith("masked_fill"):
            value = self.tensor([]) if overload == "Tensor" else self.number()
            return [operand, mask, value]
        if operator == "embedding":
            return [self.tensor(self.shape(2)), index]
        if operator == "index":
            return [operand, self.random.choice([[index], [index, None], [None, index]])]
        if operator.startswith("nll_loss"):
            scores = self.tensor(self.shape(self.random.choice([1, 2, 2, 2])))
            target = self.whole([*scores.shape[:1]] if scores.ndim == 2 else [])
            weight = self.vector([*scores.shape[-1:]])
            reduction = self.random.randrange(3)
            arguments = [scores, target, weight, reduction, -100]
            if operator.endswith("forward"):
                return arguments
            grad = self.tensor([] if reduction else [*target.shape])
            return [grad, *arguments, self.tensor([])]
        if "_loss" in operator or operator.startswith("binary_cross"):
            other, reduction = self.operand(shape), self.random.randrange(3)
            grads = [self.tensor([] if reduction else shape)] if operator.endswith("_backward") else []
            weights = [None] * {"binary_cross_entropy_with_logits": 2, "binary": 1}.get(
                operator if operator.endswith("logits") else operator.partition("_")[0], 0
            )
            factors = [0.5] if operator.startswith(("smooth", "huber")) else []
            return [*grads, operand, other, *weights, reduction, *factors]
        if operator.startswith("glu"):
            halved = [*shape]
            if -len(shape) <= dim < len(shape):
                halved[dim] //= 2
            return [*([self.tensor(halved)] if operator == "glu_backward" else []), operand, dim]
        if operator.endswith("_like") or operator.startswith("new_"):
            sizes = [self.shape()] if operator.startswith("new_") else []
            return [self.random.choice([operand, mask, index]), *sizes, *([2] if "full" in operator else [])]
        if operator.startswith(("native_group_norm", "native_batch_norm")):
            return self.norms(operator)
        if operator.startswith("convolution") or re.search("pool[23]d", operator):
            return self.windows(operator)
        if operator == "native_dropout":
            return [operand, self.random.choice([0.0, 0.5, 1.0]), self.random.choice([None, True, False])]
        if operator == "topk":
            return [operand, self.random.randint(1, 3), dim]
        if operator in ("sort", "cumsum"):
            return [operand, dim]
        if operator in ("argmax", "argmin"):
            return [operand, self.random.choice([None, dim]), self.is_rare(2)]
        if operator in ("any", "all"):
            return [self.random.choice([operand, mask]), *([dim, self.is_rare(2)] if overload == "dim" else [])]
        if operator in ("amax", "amin", "logsumexp"):
            return [operand, some_dims, self.is_rare(2)]
        if operator == "linalg_vector_norm":
            return [operand, self.random.choice([1, 2, float("inf")]), self.random.choice([None, some_dims])]
        if operator in ("var", "std"):
            return [operand, self.random.choice([None, some_dims])]
        if operator == "flip":
            return [operand, some_dims]
        if operator == "roll":
            return [operand, [1] * len(some_dims), some_dims]
        if operator in ("tril", "triu"):
            return [operand, self.random.randint(-1, 1)]
        if operator == "gather":
            return [operand, dim, index]
        if operator in ("scatter", "scatter_add"):
            return [operand, dim, index, self.number() if overload == "value" else self.tensor(shape)]
        if operator == "index_add":
            chosen = self.whole(self.shape(1))
            source = [*shape]
            if -len(shape) <= dim < len(shape):
                source[dim] = chosen.shape[0]
            return [operand, dim, chosen, self.tensor(source)]
        if operator.startswith("bitwise"):
            first, second = (torch.empty(shape, dtype=each.dtype, device="meta") for each in (mask, index))
            both = self.random.choice([[first, first], [second, second], [first, second]])
            return both[:1] if operator == "bitwise_not" else both
        if operator in ("abs", "neg"):
            return [self.random.choice([operand, index])]
        if operator == "sum":
            dims = [some_dims, self.is_rare(2)] if overload == "dim_IntList" else []
            return [self.random.choice([operand, mask, index]), *dims]
        if operator in ("add", "mul", "sub", "remainder", "floor_divide", "div"):
            whole = self.whole(shape)
            dtypes = [whole.dtype] if operator == "floor_divide" else [whole.dtype, torch.bool, *DTYPES]
            other = torch.empty(self.broadcast(shape), dtype=self.random.choice(dtypes), device="meta")
            takes_number = overload == "Scalar" or (operator != "remainder" and self.is_rare(2))
            return [whole, self.number() if takes_number else other]
        if operator == "clamp":
            return [operand, *self.random.choice([[None, 1], [0], [0, 1.5], [None, None]])]
        if operator.startswith(("lerp", "addc")) or operator in (
            "logical_and",
            "logical_or",
            "logical_xor",
            "gelu_backward",
        ):
            others = [self.operand(shape) for _ in range(2 if operator.startswith("addc") else 1)]
            return [operand, *others, *([0.5] if operator.startswith("lerp") else [])]
        if overload == "Scalar" or operator.startswith("clamp"):
            return [operand, self.number()]
        return [operand, self.operand(shape)] if overload == "Tensor" else [operand]
