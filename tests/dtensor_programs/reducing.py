"""Steps that reduce, and products of matrices."""

from __future__ import annotations

from typing import Any

import torch

from tests.dtensor_programs.draw import Draw, Value

SEVERAL_DIMS = "sum mean amax amin std var logsumexp nansum count_nonzero nanmean"
ONE_DIM = "max min argmax argmin prod any all median cummax_ all"
EXACT = "sum amax amin max min argmax argmin any all count_nonzero nansum prod"
ORDERS = (2, 2, 1, 3, 0.5, float("inf"), float("-inf"), 0)
EQUATIONS = (
    ("ij,jk->ik", "ij", "jk"),
    ("bij,bjk->bik", "bij", "bjk"),
    ("ij->ji", "ij"),
    ("ii->i", "ii"),
    ("ij,ij->", "ij", "ij"),
    ("bij,kj->bik", "bij", "kj"),
    ("i,j->ij", "i", "j"),
    ("bhqd,bhkd->bhqk", "bhqd", "bhkd"),
    ("ijk,jil->kl", "ijk", "jil"),
    ("...ij,...jk->...ik", "bij", "bjk"),
    ("ij,jk,kl->il", "ij", "jk", "kl"),
    ("ijk->i", "ijk"),
)


def reduce(draw: Draw) -> None:
    x = draw.floating() if draw.random.random() < 0.9 else draw.any()
    name = draw.name(SEVERAL_DIMS + " " + ONE_DIM)
    rounds = name not in EXACT.split()
    if draw.random.random() < 0.05 and x.ndim:
        dims = tuple(draw.random.sample(range(x.ndim), draw.random.randint(1, x.ndim)))
        draw.do(draw.random.choice(("torch.std_mean", "torch.var_mean")), x, dims, rounds=True)
    elif name == "cummax_":
        draw.do(draw.random.choice((".cummax", ".cummin")), x, draw.dim(x))
    elif draw.random.random() < 0.3 or not x.ndim:
        draw.do(f".{name}", x, rounds=rounds)
    elif name in ONE_DIM:
        draw.do(f".{name}", x, draw.dim(x), draw.random.random() < 0.4, rounds=rounds)
    else:
        dims = tuple(draw.random.sample(range(x.ndim), draw.random.randint(1, x.ndim)))
        if name == "count_nonzero":
            draw.do(".count_nonzero", x, dims)
        else:
            draw.do(f".{name}", x, dims, keepdim=draw.random.random() < 0.4, rounds=rounds)


def norm(draw: Draw) -> None:
    x = draw.floating(1)
    order = draw.random.choice(ORDERS)
    dims: Any = None
    if draw.random.random() < 0.7:
        dims = tuple(draw.random.sample(range(x.ndim), draw.random.randint(1, x.ndim)))
    keeps = draw.random.random() < 0.4
    kind = draw.name("vector vector norm matrix normalize renorm")
    if kind == "vector":
        draw.do("torch.linalg.vector_norm", x, order, dims, keeps, rounds=True)
    elif kind == "norm":
        draw.do(".norm", x, order, dims, keeps, rounds=True)
    elif kind == "matrix":
        draw.do("torch.linalg.matrix_norm", x, draw.random.choice((1, float("inf"))), rounds=True)
    elif kind == "renorm":
        draw.do(".renorm", x, 2, draw.dim(x), 1.5, rounds=True)
    else:
        draw.do("torch.nn.functional.normalize", x, 2, draw.dim(x), rounds=True)


def scan(draw: Draw) -> None:
    x = draw.floating(1)
    name = draw.name("cumsum cumprod logcumsumexp cumsum_ diff cumsum trapezoid")
    if name == "diff":
        draw.do(".diff", x, 1, draw.dim(x))
    elif name == "trapezoid":
        draw.do("torch.trapezoid", x, dim=draw.dim(x), rounds=True)
    else:
        draw.do(f".{name}", x, draw.dim(x), rounds=not name.startswith("cumsum"))


def product(draw: Draw) -> None:
    x = draw.floating(1, 3)
    dtype, last, width = x.tensor.dtype, x.shape[-1], draw.random.randint(1, 5)
    kind = draw.name("matmul matmul linear mv bmm outer dot tensordot kron turned vdot addbmm")
    if kind == "matmul":
        draw.do("torch.matmul", x, draw.exactly(draw.random.choice(((last, width), (last,), (2, last, width))), dtype))
    elif kind == "turned":
        for turned in draw.do(".transpose", x, -1, -2):
            draw.do("torch.matmul", x, turned)
    elif kind == "linear":
        bias = draw.exactly((width,), dtype) if draw.random.random() < 0.6 else None
        draw.do("torch.nn.functional.linear", x, draw.exactly((width, last), dtype), bias)
    elif kind == "bmm":
        draw.do("torch.bmm", x, draw.exactly((x.shape[0], last, width), dtype))
    elif kind == "addbmm":
        if x.ndim == 3:
            added = draw.exactly((x.shape[1], width), dtype)
            draw.do(
                f".addbmm{draw.random.choice(('', '_'))}",
                added,
                x,
                draw.exactly((x.shape[0], last, width), dtype),
                may_overlap=False,
            )
    elif kind == "kron":
        draw.do("torch.kron", x, draw.exactly((2,) * x.ndim, dtype))
    elif kind == "tensordot":
        draw.do("torch.tensordot", x, draw.exactly((last, width), dtype), 1)
    else:
        # Of vectors, or of a matrix and a vector: what does not fit, torch refuses.
        draw.do(f"torch.{kind}", x, draw.exactly((last,), dtype))


def added_product(draw: Draw) -> None:
    x = draw.floating(1, 3)
    dtype, last, width = x.tensor.dtype, x.shape[-1], draw.random.randint(1, 5)
    numbers = {"alpha": draw.random.choice((1, 2)), "beta": draw.random.choice((1, 0, 0.5))}
    suffix = draw.random.choice(("", "", "_"))
    target = (*x.shape[:-1], width)
    added = draw.exactly(target, dtype) if suffix else draw.broadcastable(target, dtype=dtype)
    if x.ndim == 3:
        other = draw.exactly((x.shape[0], last, width), dtype)
        draw.do(f".baddbmm{suffix}", added, x, other, may_overlap=False, **numbers)
    elif x.ndim == 1:
        vector, matrix = draw.exactly((width,), dtype), draw.exactly((last, width), dtype)
        draw.do(f".addr{suffix}", matrix, x, vector, may_overlap=False, **numbers)
    elif draw.random.random() < 0.7:
        draw.do(f".addmm{suffix}", added, x, draw.exactly((last, width), dtype), may_overlap=False, **numbers)
    else:
        vector = draw.exactly((x.shape[0],), dtype)
        draw.do(f".addmv{suffix}", vector, x, draw.exactly((last,), dtype), may_overlap=False, **numbers)


def einsum(draw: Draw) -> None:
    equation, *terms = draw.random.choice(EQUATIONS)
    sizes: dict[str, int] = {}
    operands: list[Value] = []
    for term in terms:

        def suits(value: Value, term: str = term) -> bool:
            if value.ndim != len(term) or value.tensor.dtype != torch.float64:
                return False
            own = dict(sizes)
            return all(own.setdefault(letter, size) == size for letter, size in zip(term, value.shape, strict=True))

        value = draw.pick(suits)
        if value is None:
            shape = [sizes.get(letter, draw.random.choice((1, 2, 3, 4))) for letter in term]
            for place, letter in enumerate(term):
                shape[place] = shape[term.index(letter)]
            value = draw.leaf(tuple(shape), torch.float64)
        sizes.update(zip(term, value.shape, strict=True))
        operands.append(value)
    draw.do("torch.einsum", equation, *operands)


FAMILIES = {reduce: 11, norm: 5, scan: 3, product: 5, added_product: 3, einsum: 4}
