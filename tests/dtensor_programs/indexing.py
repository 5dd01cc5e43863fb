"""Steps that read and write by indices, masks and slices."""

from __future__ import annotations

from typing import Any

import torch

from tests.dtensor_programs.draw import Draw, Value
from tests.dtensor_programs.viewing import plain_index


def advanced(draw: Draw, x: Value) -> Any:
    """An index with index tensors, lists or masks in it."""
    kind = draw.random.random()
    if kind < 0.2:
        return draw.leaf(x.shape[: draw.random.randint(1, x.ndim)], torch.bool, bound=2)
    shape = draw.shape(1, 2) if draw.random.random() < 0.3 else (draw.random.randint(0, 4),)
    index: list[Any] = []
    for size in x.shape[: draw.random.randint(1, min(3, x.ndim))]:
        kind = draw.random.random()
        if kind < 0.5 and size:
            index.append(draw.indices(shape, size))
        elif kind < 0.6 and size and len(shape) == 1:
            index.append([draw.random.randrange(-size, size) for _ in range(shape[0])])
        elif kind < 0.75 and size:
            index.append(draw.random.randrange(size))
        else:
            index.append(slice(draw.random.choice((None, 1)), None, draw.random.choice((None, 2))))
    return tuple(index) if len(index) > 1 else index[0]


def get(draw: Draw) -> None:
    x = draw.any(1)
    draw.do("operator.getitem", x, advanced(draw, x))


def put(draw: Draw) -> None:
    x = draw.any(1)
    index = plain_index(draw, x) if draw.random.random() < 0.6 else advanced(draw, x)
    value: Any = draw.random.choice((0, 1, -2))
    if draw.random.random() < 0.6:
        # What indexing gives is what may be written there, but for elements that come twice.
        found = draw.do("operator.getitem", x, index)
        if found and _has_no_duplicates(index):
            value = draw.broadcastable(found[0].shape, floating=x.is_float)
    draw.do("operator.setitem", x, index, value, may_overlap=False)


def _has_no_duplicates(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        not isinstance(part, list) and (not isinstance(part, Value) or part.tensor.dtype == torch.bool)
        for part in parts
    )


def look_up(draw: Draw) -> None:
    """Elements at places that a tensor holds."""
    x = draw.floating(1, 3)
    dim, shape, size = _along(draw, x)
    kind = draw.name("gather take_along_dim index_select index_select take masked_select argwhere")
    if kind == "gather":
        small = [draw.random.randint(1, max(1, extent)) for extent in shape]
        small[dim] = shape[dim]
        draw.do("torch.gather", x, dim, draw.indices(small, size))
    elif kind == "take_along_dim":
        draw.do("torch.take_along_dim", x, draw.indices(shape, size), dim)
    elif kind == "index_select":
        draw.do(".index_select", x, dim, draw.indices((shape[dim],), size))
    elif kind == "take":
        draw.do(".take", x, draw.indices(draw.shape(1, 2), x.tensor.numel()))
    elif kind == "masked_select":
        draw.do(".masked_select", x, draw.broadcastable(x.shape, floating=False, dtype=torch.bool))
    else:
        draw.do("torch.argwhere", x)


def scatter(draw: Draw) -> None:
    """Elements written, or added, to places that a tensor holds."""
    x = draw.floating(1, 3)
    dim, shape, size = _along(draw, x)
    dtype, suffix = x.tensor.dtype, draw.random.choice(("", "_"))
    kind = draw.name("scatter_add scatter scatter_reduce index_put masked_scatter put")
    if kind == "scatter_add":
        draw.do(f".{kind}{suffix}", x, dim, draw.indices(shape, size), draw.exactly(shape, dtype), may_overlap=False)
    elif kind == "scatter":
        draw.do(f".{kind}{suffix}", x, dim, draw.indices(shape, size), draw.random.choice((0.5, 2)))
    elif kind == "scatter_reduce":
        how, operands = draw.name("sum prod amax amin mean"), (draw.indices(shape, size), draw.exactly(shape, dtype))
        keywords = {"include_self": draw.random.random() < 0.5, "rounds": how == "mean"}
        draw.do(f".{kind}{suffix}", x, dim, *operands, how, may_overlap=False, **keywords)
    elif kind == "index_put":
        index, values = draw.indices((3,), max(1, x.shape[0])), draw.exactly((3, *x.shape[1:]), dtype)
        draw.do(f".{kind}{suffix}", x, (index,), values, accumulate=True, may_overlap=False)
    elif kind == "masked_scatter":
        mask = draw.broadcastable(x.shape, floating=False, dtype=torch.bool)
        draw.do(f".{kind}{suffix}", x, mask, draw.exactly(x.shape, dtype), may_overlap=False)
    else:
        index, values = draw.indices((3,), x.tensor.numel()), draw.exactly((3,), dtype)
        draw.do(f".{kind}{suffix}", x, index, values, accumulate=True, may_overlap=False)


def along(draw: Draw) -> None:
    """Slices along a dim, written or added."""
    x = draw.floating(1, 3)
    dim, shape, size = _along(draw, x)
    dtype, suffix = x.tensor.dtype, draw.random.choice(("", "_"))
    kind = draw.name("index_add index_copy index_fill index_reduce select_scatter slice_scatter diagonal_scatter")
    index = draw.indices((shape[dim],), size)
    if kind == "index_add":
        alpha = draw.random.choice((1, 2))
        draw.do(f".{kind}{suffix}", x, dim, index, draw.exactly(shape, dtype), alpha=alpha, may_overlap=False)
    elif kind == "index_copy":
        shape[dim] = 1
        one = draw.indices((1,), size)
        draw.do(f".{kind}{suffix}", x, dim, one, draw.exactly(shape, dtype), may_overlap=False)
    elif kind == "index_fill":
        draw.do(f".{kind}{suffix}", x, dim, index, draw.random.choice((0.5, -1)))
    elif kind == "index_reduce":
        # torch's own kernel fails for products of one row of 16 bits.
        how = draw.name("amax amin mean") if dtype == torch.bfloat16 else draw.name("prod amax amin mean")
        source = draw.exactly(shape, dtype)
        draw.do(f".{kind}{suffix}", x, dim, index, source, how, rounds=how == "mean", may_overlap=False)
    elif kind == "select_scatter":
        del shape[dim]
        draw.do(f".{kind}", x, draw.exactly(shape, dtype), dim, draw.random.randrange(size))
    elif kind == "slice_scatter":
        shape[dim] = len(range(size)[1:])
        draw.do(f".{kind}", x, draw.exactly(shape, dtype), dim, 1)
    elif x.ndim == 2:
        draw.do(f".{kind}", x, draw.exactly((min(x.shape),), dtype))


def _along(draw: Draw, x: Value) -> tuple[int, list[int], int]:
    """A dim, the shape with another size there, and what indices along it have to be below."""
    dim = draw.random.randrange(x.ndim)
    shape = list(x.shape)
    shape[dim] = draw.random.randint(0, 4)
    return dim, shape, max(1, x.shape[dim])


FAMILIES = {get: 5, put: 9, look_up: 2, scatter: 2, along: 2}
