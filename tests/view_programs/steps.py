"""Views of tensors and writes to them, each with what draws its arguments for a tensor at hand.

What cannot be done to that tensor raises, at the draw or at the step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from disttrain.dtensor import DTensor

Draw = random.Random


def _dim(draw: Draw, tensor: torch.Tensor) -> int:
    return draw.randrange(-tensor.ndim, tensor.ndim)


def _select(draw: Draw, tensor: torch.Tensor) -> tuple[Any, ...]:
    dim = _dim(draw, tensor)
    return dim, draw.randrange(-tensor.shape[dim], tensor.shape[dim])


def _range(draw: Draw, size: int) -> tuple[int, int]:
    begin = draw.randrange(size + 1)
    return begin, draw.randrange(begin, size + 1)


def _narrow(draw: Draw, tensor: torch.Tensor) -> tuple[Any, ...]:
    dim = _dim(draw, tensor)
    begin, end = _range(draw, tensor.shape[dim])
    return dim, begin, end - begin


def _index(draw: Draw, tensor: torch.Tensor) -> tuple[Any, ...]:
    index: list[Any] = []
    for size in tensor.shape[: draw.randrange(1, tensor.ndim + 1)]:
        kind = draw.randrange(4)
        if kind == 0:
            index.append(draw.randrange(-size, size))
        elif kind == 1:
            index.append(None)
            index.append(slice(None))
        else:
            index.append(slice(*_range(draw, size), draw.choice([1, 1, 1, 2, 3])))
    return tuple(index)


def _regrouped(draw: Draw, tensor: torch.Tensor) -> tuple[int, ...]:
    left, sizes = tensor.numel(), []
    while left > 1 and len(sizes) < 4:
        size = draw.choice([size for size in range(2, left + 1) if left % size == 0])
        sizes.append(size)
        left //= size
        if draw.random() < 0.2:
            sizes.append(1)
    return tuple(sizes) or (1,) * tensor.ndim


def _order(draw: Draw, tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(draw.sample(range(tensor.ndim), tensor.ndim))


def _strided(draw: Draw, tensor: torch.Tensor) -> tuple[Any, ...]:
    rows = draw.randrange(1, tensor.numel() + 1)
    columns = draw.randrange(1, tensor.numel() // rows + 1)
    return (rows, columns), (columns, 1)


VIEWS: dict[str, tuple[Callable[..., Any], Callable[[Draw, torch.Tensor], tuple[Any, ...]]]] = {
    "select": (lambda t, *a: t.select(*a), _select),
    "index": (lambda t, *a: t[a], _index),
    "index more": (lambda t, *a: t[a], _index),
    "narrow": (lambda t, *a: t.narrow(*a), _narrow),
    "split": (
        lambda t, size, dim, place: t.split(size, dim)[place],
        lambda d, t: (d.randrange(1, 4), _dim(d, t), d.choice([0, -1])),
    ),
    "chunk": (
        lambda t, pieces, dim, place: t.chunk(pieces, dim)[place],
        lambda d, t: (d.randrange(1, 4), _dim(d, t), d.choice([0, -1])),
    ),
    "unbind": (lambda t, dim, place: t.unbind(dim)[place], _select),
    "squeeze": (lambda t, *a: t.squeeze(*a), lambda d, t: d.choice([(), (_dim(d, t),)])),
    "unsqueeze": (lambda t, dim: t.unsqueeze(dim), lambda d, t: (_dim(d, t),)),
    "view": (lambda t, *a: t.view(a), _regrouped),
    "view flat": (lambda t: t.view(-1), lambda *_: ()),
    "reshape": (lambda t, *a: t.reshape(a), _regrouped),
    "transpose": (lambda t, *a: t.transpose(*a), lambda d, t: (_dim(d, t), _dim(d, t))),
    "t": (lambda t: t.t(), lambda *_: ()),
    "permute": (lambda t, *a: t.permute(a), _order),
    "movedim": (lambda t, *a: t.movedim(*a), lambda d, t: (_dim(d, t), _dim(d, t))),
    "expand": (lambda t, times: t.unsqueeze(0).expand(times, *t.shape), lambda d, _: (d.randrange(1, 3),)),
    "unflatten": (lambda t, dim: t.unflatten(dim, (-1, 2)), lambda d, t: (_dim(d, t),)),
    "flatten": (lambda t: t.flatten(), lambda *_: ()),
    "diagonal": (lambda t, offset: t.diagonal(offset), lambda d, _: (d.randrange(-1, 2),)),
    "unfold": (lambda t, *a: t.unfold(*a), lambda d, t: (_dim(d, t), d.randrange(1, 3), d.randrange(1, 3))),
    "as_strided": (lambda t, *a: t.as_strided(*a), _strided),
    "detach": (lambda t: t.detach(), lambda *_: ()),
    "data": (lambda t: t.data, lambda *_: ()),
    "real": (lambda t: t.real, lambda *_: ()),
    "imag": (lambda t: t.imag, lambda *_: ()),
    "view_as_real": (torch.view_as_real, lambda *_: ()),
    "view_as": (lambda t: t.view_as(t), lambda *_: ()),
    "view dtype": (lambda t: t.view(torch.int64 if t.dtype == torch.float64 else torch.float64), lambda *_: ()),
    "view_as_complex": (torch.view_as_complex, lambda *_: ()),
    "ravel": (lambda t: t.ravel(), lambda *_: ()),
    "tensor_split": (
        lambda t, pieces, dim, place: t.tensor_split(pieces, dim)[place],
        lambda d, t: (d.randrange(1, 4), _dim(d, t), d.choice([0, -1])),
    ),
    "diagonal of two": (lambda t, *a: t.diagonal(*a), lambda d, t: (d.randrange(-1, 2), _dim(d, t), _dim(d, t))),
    "transpose_": (lambda t, *a: t.view_as(t).transpose_(*a), lambda d, t: (_dim(d, t), _dim(d, t))),
    "unsqueeze_": (lambda t, dim: t.view_as(t).unsqueeze_(dim), lambda d, t: (_dim(d, t),)),
    "squeeze_": (lambda t: t[:1].squeeze_(0) if t.ndim else t, lambda *_: ()),
    "conj": (lambda t: t.conj(), lambda *_: ()),
    "redistribute": (
        lambda t: t.redistribute(placements=t.placements) if isinstance(t, DTensor) else t.view_as(t),
        lambda *_: (),
    ),
}


def _number(draw: Draw, _: torch.Tensor) -> tuple[Any, ...]:
    return (draw.randrange(-2, 4),)


def _put(t: torch.Tensor, other: torch.Tensor, index: tuple[Any, ...], value: int) -> None:
    t[index] = value


def _put_tensor(t: torch.Tensor, other: torch.Tensor, index: tuple[Any, ...], value: int) -> None:
    t[index] = t[index] * value + 1


def _foreach(t: torch.Tensor, other: torch.Tensor, value: int) -> None:
    torch._foreach_mul_([t, other], value)
    torch._foreach_add_([other, t], [value, 1])


def _add_out(t: torch.Tensor, other: torch.Tensor, value: int) -> None:
    torch.add(t, value, out=t)


def _index_put(t: torch.Tensor, other: torch.Tensor, place: int, value: int) -> None:
    index = torch.tensor([place])
    if isinstance(t, DTensor):
        index = DTensor.from_local(index, t.device_mesh)
    t.index_fill_(0, index, value)


WRITES: dict[str, tuple[Callable[..., Any], Callable[[Draw, torch.Tensor], tuple[Any, ...]]]] = {
    "fill_": (lambda t, _, value: t.fill_(value), _number),
    "mul_": (lambda t, _, value: t.mul_(value), _number),
    "add_": (lambda t, _, value: t.add_(value), _number),
    "multiply_": (lambda t, _, value: t.multiply_(value), _number),
    "neg_": (lambda t, _: t.neg_(), lambda *_: ()),
    "zero_": (lambda t, _: t.zero_(), lambda *_: ()),
    "copy_": (lambda t, other: t.copy_(other.clone()), lambda *_: ()),
    "add_ other": (lambda t, other: t.add_(other * 2), lambda *_: ()),
    "setitem": (_put, lambda d, t: (_index(d, t), d.randrange(9))),
    "setitem tensor": (_put_tensor, lambda d, t: (_index(d, t), d.randrange(3))),
    "foreach": (_foreach, _number),
    "out": (_add_out, _number),
    "index_fill_": (_index_put, lambda d, t: (d.randrange(t.shape[0]), d.randrange(5))),
    "setitem list": (_put, lambda d, t: (([0, -1],), d.randrange(9))),
    "masked_fill_": (lambda t, _, value: t.masked_fill_(t > value, value - 1), _number),
    "clamp_": (lambda t, _, value: t.clamp_(min=value), _number),
    "cumsum_": (lambda t, _, dim: t.cumsum_(dim), lambda d, t: (_dim(d, t),)),
    "data": (lambda t, _, value: t.data.add_(value), _number),
    "no_grad": (lambda t, _, value: _without_grad(t, value), _number),
}


def _without_grad(t: torch.Tensor, value: int) -> None:
    with torch.no_grad():
        t.mul_(value)
