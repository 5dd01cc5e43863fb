"""Steps that make views, and that put tensors together or in another order."""

from __future__ import annotations

from typing import Any

import torch

from tests.dtensor_programs.draw import Draw, Value


def reorder(draw: Draw) -> None:
    x = draw.any()
    dims = list(range(x.ndim))
    draw.random.shuffle(dims)
    kind = draw.name("transpose permute t movedim swapaxes mT")
    if kind == "permute":
        draw.do(".permute", x, tuple(dims))
    elif kind == "t":
        draw.do(".t", x)
    elif kind == "mT":
        draw.do(".transpose", x, -1, -2)
    else:
        draw.do(f".{kind}", x, draw.dim(x), draw.dim(x))


def regroup(draw: Draw) -> None:
    """Another shape of as many elements."""
    x = draw.any()
    function = draw.random.choice((".view", ".reshape", ".reshape"))
    draw.do(function, x, regrouped(draw, x))


def regrouped(draw: Draw, x: Value) -> tuple[int, ...]:
    shape = list(x.shape)
    for _ in range(draw.random.randint(1, 3)):
        place = draw.random.randrange(len(shape)) if shape else 0
        if len(shape) > 1 and draw.random.random() < 0.6:
            place = min(place, len(shape) - 2)
            shape[place : place + 2] = [shape[place] * shape[place + 1]]
        elif shape:
            divisors = [size for size in (1, 2, 3, 4, 5, 6) if shape[place] and shape[place] % size == 0]
            size = draw.random.choice(divisors) if divisors else 1
            shape[place : place + 1] = [size, shape[place] // size]
    if shape and draw.random.random() < 0.2 and 0 not in shape:
        shape[draw.random.randrange(len(shape))] = -1
    return tuple(shape)


def resize(draw: Draw) -> None:
    """A dim more or less."""
    x = draw.any()
    kind = draw.random.choice(("unsqueeze", "squeeze", "squeeze all", "flatten", "unflatten", "expand"))
    if kind == "unsqueeze":
        draw.do(".unsqueeze", x, draw.random.randint(-x.ndim - 1, x.ndim))
    elif kind == "squeeze all":
        draw.do(".squeeze", x)
    elif kind == "flatten":
        first = draw.random.randrange(max(1, x.ndim))
        draw.do(".flatten", x, first, draw.random.randint(first, max(first, x.ndim - 1)))
    elif kind == "unflatten" and x.ndim:
        draw.do(".unflatten", x, draw.dim(x), (draw.random.choice((1, 2, 3)), -1))
    elif kind == "expand":
        sizes = tuple(
            draw.random.choice((2, 3, 5)) if size == 1 else draw.random.choice((size, -1)) for size in x.shape
        )
        draw.do(".expand", x, (2, *sizes) if draw.random.random() < 0.4 else sizes)
    else:
        draw.do(".squeeze", x, draw.dim(x))


def plain_index(draw: Draw, x: Value) -> Any:
    """An index of numbers, slices and such."""
    index: list[Any] = []
    for size in x.shape[: draw.random.randint(1, max(1, x.ndim))]:
        kind = draw.random.random()
        if kind < 0.3 and size:
            index.append(draw.random.randint(-size, size - 1))
        elif kind < 0.8:
            start = draw.random.choice((None, None, 0, 1, 2, size // 2, -2, -1))
            stop = draw.random.choice((None, None, size - 1, size // 2 + 1, -1, size + 2))
            index.append(slice(start, stop, draw.random.choice((None, None, 1, 2, 3))))
        else:
            index.append(slice(None))
    if draw.random.random() < 0.2:
        index.insert(draw.random.randint(0, len(index)), None)
    if draw.random.random() < 0.15:
        index.insert(draw.random.randint(0, len(index)), Ellipsis)
    return tuple(index) if len(index) != 1 or draw.random.random() < 0.5 else index[0]


def slice_out(draw: Draw) -> None:
    x = draw.any(1)
    kind = draw.name("index index index select narrow unfold diagonal")
    dim = draw.dim(x)
    size = x.shape[dim]
    if kind == "index":
        draw.do("operator.getitem", x, plain_index(draw, x))
    elif kind == "select":
        draw.do(".select", x, dim, draw.random.randrange(-size, size) if size else 0)
    elif kind == "narrow":
        start = draw.random.randint(0, size)
        draw.do(".narrow", x, dim, start, draw.random.randint(0, size - start))
    elif kind == "unfold":
        draw.do(".unfold", x, dim, draw.random.randint(1, max(1, size)), draw.random.choice((1, 2, 3)))
    elif x.ndim > 1:
        first, second = draw.random.sample(range(x.ndim), 2)
        draw.do(".diagonal", x, draw.random.choice((0, 0, 1, -1)), first, second)


def split(draw: Draw) -> None:
    x = draw.any(1)
    dim = draw.dim(x)
    size = x.shape[dim]
    kind = draw.random.choice(("split", "chunk", "unbind", "tensor_split", "split sizes", "split", "unsafe"))
    if kind == "split":
        draw.do(".split", x, draw.random.randint(1, max(1, size)), dim)
    elif kind == "unsafe":
        pieces = draw.do("torch.unsafe_split", x, draw.random.randint(1, max(1, size)), dim)
        # Nobody may write to them, torch says.
        draw.values = [value for value in draw.values if value not in pieces]
    elif kind == "chunk":
        draw.do(".chunk", x, draw.random.randint(1, 4), dim)
    elif kind == "unbind" and size < 5:
        draw.do(".unbind", x, dim)
    elif kind == "split sizes":
        first = draw.random.randint(0, size)
        draw.do(".split", x, [first, size - first], dim)
    else:
        draw.do(".tensor_split", x, draw.random.randint(1, 4), dim)


def same(draw: Draw) -> None:
    """The same values, as another tensor or the same."""
    x = draw.any()
    kind = draw.name(".detach .clone .contiguous .view_as .reshape_as .expand_as .to")
    if kind in (".view_as", ".reshape_as", ".expand_as"):
        other = draw.pick(lambda value: value.tensor.numel() == x.tensor.numel() and value is not x)
        if other is not None:
            draw.do(kind, x, other)
    elif kind == ".to":
        draw.do(".to", x, draw.random.choice((torch.float64, torch.float32, torch.bfloat16, torch.int64)), rounds=True)
    else:
        draw.do(kind, x)


def join(draw: Draw) -> None:
    x = draw.any(1)
    kind = draw.name("cat cat stack stack hstack vstack column_stack")
    dim = draw.random.randrange(x.ndim)
    others = []
    for _ in range(draw.random.randint(1, 2)):
        shape = list(x.shape)
        if kind == "cat" and draw.random.random() < 0.5:
            shape[dim] = draw.random.choice((0, 1, 2, 3))
        if kind == "cat" and draw.random.random() < 0.1:
            shape = [0]
        dtype = x.tensor.dtype if draw.random.random() < 0.8 else torch.float32
        others.append(draw.exactly(shape, dtype))
    items = [x, *others]
    draw.random.shuffle(items)
    if kind == "stack":
        dim = draw.random.randint(-x.ndim - 1, x.ndim)
    if kind in ("cat", "stack"):
        draw.do(f"torch.{kind}", items, dim)
    else:
        draw.do(f"torch.{kind}", items)


def rearrange(draw: Draw) -> None:
    x = draw.any(1)
    dim = draw.dim(x)
    dims = tuple(draw.random.sample(range(x.ndim), draw.random.randint(1, x.ndim)))
    choice = draw.random.choice
    kind = choice(("flip", "roll", "roll flat", "pad", "tril", "triu", "repeat", "tile", "repeat_interleave", "rot90"))
    if kind == "flip":
        draw.do(".flip", x, dims)
    elif kind == "roll":
        draw.do(".roll", x, tuple(choice((-2, -1, 1, 2, 5)) for _ in dims), dims)
    elif kind == "roll flat":
        draw.do(".roll", x, choice((-3, 1, 2)))
    elif kind == "pad":
        widths = tuple(choice((0, 1, 2, 0, -1)) for _ in range(2 * draw.random.randint(1, x.ndim)))
        mode = choice(("constant", "constant", "constant", "reflect", "replicate", "circular"))
        draw.do("torch.nn.functional.pad", x, widths, mode)
    elif kind in ("tril", "triu"):
        draw.do(f".{kind}", x, choice((-1, 0, 1)))
    elif kind in ("repeat", "tile"):
        draw.do(f".{kind}", x, tuple(choice((1, 1, 1, 2, 2, 0)) for _ in range(x.ndim + choice((0, 0, 1)))))
    elif kind == "rot90" and x.ndim > 1:
        draw.do(".rot90", x, choice((1, 2, 3)), tuple(draw.random.sample(range(x.ndim), 2)))
    else:
        draw.do(".repeat_interleave", x, choice((1, 2)), dim)


def redistribute(draw: Draw) -> None:
    draw.move(draw.any())


FAMILIES = {
    reorder: 7,
    regroup: 8,
    resize: 6,
    slice_out: 12,
    split: 5,
    same: 4,
    join: 5,
    rearrange: 5,
    redistribute: 7,
}
