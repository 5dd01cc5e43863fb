"""Draws the steps of a program one by one, each tried on plain tensors: what torch refuses is not kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from disttrain.dtensor import Partial, Placement, Replicate, Shard
from tests.dtensor_programs.execute import Run, function_named, plain_leaf, plain_redistribute, tensors_in
from tests.dtensor_programs.program import Leaf, Ref, Step, leaves_of, mapped

SIZES = (1, 2, 3, 3, 4, 5, 6, 7)
MAX_ELEMENTS = 300
MAX_VALUE = 1e5
FLOATS = (torch.float64, torch.float64, torch.float64, torch.float64, torch.float32, torch.bfloat16)
REDUCTIONS = ("sum", "sum", "avg", "max", "min", "product")


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor that the program has made: how it is called, and its plain value."""

    ref: Ref
    tensor: torch.Tensor
    is_exact: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def is_float(self) -> bool:
        return self.tensor.is_floating_point()


class Draw:
    """The program so far, and what may come next."""

    def __init__(self, seed: int, mesh_shape: tuple[int, ...]) -> None:
        self.random = random.Random(seed)
        self.mesh_shape = mesh_shape
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self._run = Run(plain_leaf, plain_redistribute)
        self._number = 0

    # What is there

    def pick(self, suits: Callable[[Value], bool] = lambda value: True) -> Value | None:
        """One of the tensors that suit, rather a late one."""
        found = [value for value in self.values if suits(value)]
        if not found:
            return None
        return self.random.choice(found[-4:] if self.random.random() < 0.6 else found)

    def floating(self, min_dims: int = 0, max_dims: int = 5) -> Value:
        """A float tensor, made where there is none."""
        value = self.pick(lambda value: value.is_float and min_dims <= value.ndim <= max_dims and value.tensor.numel())
        if value is None or self.random.random() < 0.05:
            value = self.leaf(self.shape(max(1, min_dims), max(min(max_dims, 3), min_dims, 1)))
        return value

    def any(self, min_dims: int = 0) -> Value:
        value = self.pick(lambda value: value.ndim >= min_dims and not value.tensor.is_complex())
        return self.leaf(self.shape(max(min_dims, 1), max(min_dims, 3))) if value is None else value

    def name(self, names: str) -> str:
        """One of these, which blanks separate."""
        return self.random.choice(names.split())

    def shape(self, min_dims: int = 1, max_dims: int = 3) -> tuple[int, ...]:
        num_dims = self.random.randint(min_dims, max_dims)
        return tuple(self.random.choice(SIZES) for _ in range(num_dims))

    def dim(self, value: Value) -> int:
        dim = self.random.randrange(value.ndim) if value.ndim else 0
        return dim - value.ndim if self.random.random() < 0.3 and value.ndim else dim

    def broadcastable(self, shape: Sequence[int], floating: bool = True, dtype: torch.dtype | None = None) -> Value:
        """A tensor that broadcasts to `shape`: one that is there, or a new one."""

        def suits(value: Value) -> bool:
            if (floating and not value.is_float) or (dtype is not None and value.tensor.dtype != dtype):
                return False
            if value.ndim > len(shape):
                return False
            return all(size in (1, wanted) for size, wanted in zip(value.shape[::-1], list(shape)[::-1], strict=False))

        value = self.pick(suits) if self.random.random() < 0.6 else None
        if value is not None:
            return value
        shape = tuple(shape)
        cut = self.random.choice((0, 0, 0, 1, len(shape)))
        own = tuple(1 if self.random.random() < 0.15 else size for size in shape[cut:])
        return self.leaf(own, dtype, bound=2 if dtype == torch.bool else None)

    def exactly(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Value:
        value = self.pick(lambda value: value.shape == tuple(shape) and value.tensor.dtype == dtype)
        return self.leaf(tuple(shape), dtype) if value is None or self.random.random() < 0.3 else value

    # What is made

    def leaf(self, shape: tuple[int, ...], dtype: torch.dtype | None = None, bound: int | None = None) -> Value:
        dtype = dtype or self.random.choice(FLOATS)
        may_need_grad = dtype.is_floating_point and bound is None
        needs_grad = may_need_grad and self.random.random() < 0.6
        leaf = Leaf(shape, dtype, self.random.randrange(1000), bound, needs_grad)
        self._number += 1
        step = Step(self._number, "leaf", (leaf, self.placements(len(shape), dtype)))
        self._run.do(step)
        self.steps.append(step)
        value = Value(Ref(step.number), self._run.values[step.number], True)
        self.values.append(value)
        return value

    def indices(self, shape: Sequence[int], bound: int) -> Value:
        return self.leaf(tuple(shape), torch.int64, bound=max(1, bound))

    def placements(self, num_dims: int, dtype: torch.dtype) -> tuple[Placement, ...]:
        """Any placements of such a tensor."""
        return tuple(self._placement(num_dims, dtype) for _ in self.mesh_shape)

    def _placement(self, num_dims: int, dtype: torch.dtype) -> Placement:
        kind = self.random.random()
        if num_dims and kind < 0.6:
            return Shard(self.random.randrange(num_dims))
        if kind < 0.8 or dtype == torch.bool:
            return Replicate()
        if not dtype.is_floating_point:
            return Partial(self.random.choice(("sum", "max", "min")))
        return Partial(self.random.choice(REDUCTIONS))

    def move(self, value: Value) -> None:
        self.do("redistribute", value, self.placements(value.ndim, value.tensor.dtype))

    def do(
        self, function: str, *args: Any, rounds: bool = False, may_overlap: bool = True, **kwargs: Any
    ) -> list[Value]:
        """Take this step if torch takes it, and if what comes of it is small. Returns what it has made."""
        is_exact = not rounds and all(
            leaf.is_exact for leaf in leaves_of((args, list(kwargs.values()))) if isinstance(leaf, Value)
        )
        written = _written(function, args, kwargs)
        if written and not self._may_write(function, written, args, kwargs, may_overlap):
            return []
        # torch lets whole numbers take values that require a gradient, and loses its way then.
        loses_way = any(not value.is_float for value in written)
        step = Step(
            self._number + 1,
            function,
            mapped(_reference, args),
            tuple((name, mapped(_reference, value)) for name, value in kwargs.items()),
            without_grad=loses_way
            or self.random.random() < (0.1 if not written else 0.5 if _needs_no_grad(written) else 0.1),
        )
        try:
            with torch.set_grad_enabled(not step.without_grad):
                result = self._run.result_of(step)
        except Exception:  # noqa: BLE001 -- whatever torch refuses is no step
            return []
        tensors = tensors_in(result)
        if not written and not all(map(_is_small, tensors)):
            return []
        self._number += 1
        self._run.values[step.number] = result
        is_exact = is_exact and all(map(_is_dyadic, tensors_in(result) or [value.tensor for value in written]))
        self.steps.append(replace(step, rounds=not is_exact and not _is_view(function)))
        if written:
            self._became(written, is_exact)
            return []
        return self._added(step, result, is_exact)

    def _added(self, step: Step, result: Any, is_exact: bool) -> list[Value]:
        named = (
            [(Ref(step.number), result)]
            if isinstance(result, torch.Tensor)
            else [(Ref(step.number, item), value) for item, value in enumerate(result or ())]
            if isinstance(result, list | tuple)
            else []
        )
        values = [
            Value(ref, tensor, is_exact and _is_dyadic(tensor))
            for ref, tensor in named
            if isinstance(tensor, torch.Tensor)
        ]
        self.values += values
        return values

    def _became(self, written: list[Value], is_exact: bool) -> None:
        """Whatever shares memory with what was written to may have become inexact."""
        storages = {_memory_of(value) for value in written}
        self.values = [
            Value(value.ref, value.tensor, value.is_exact and is_exact and _is_dyadic(value.tensor))
            if _memory_of(value) in storages
            else value
            for value in self.values
            if _is_usable(value.tensor)
        ]

    def _may_write(self, function: str, written: list[Value], args: Any, kwargs: Any, may_overlap: bool) -> bool:
        """Try it on copies: would what is written be small?"""
        operands = [leaf for leaf in leaves_of((args, list(kwargs.values()))) if isinstance(leaf, Value)]
        if _overlaps(written, operands, may_be_same=may_overlap):
            return False
        copies: dict[int, torch.Tensor] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            return copies.setdefault(id(leaf.tensor), leaf.tensor.detach().clone())

        try:
            with torch.no_grad():
                function_named(function)(
                    *mapped(copy, args), **{name: mapped(copy, value) for name, value in kwargs.items()}
                )
        except Exception:  # noqa: BLE001 -- whatever torch refuses is no step
            return False
        new = [copies[id(value.tensor)] for value in written]
        return all(one.shape == value.tensor.shape and _is_small(one) for one, value in zip(new, written, strict=True))


def _memory_of(value: Value) -> int:
    return value.tensor.untyped_storage().data_ptr()


def _overlaps(written: list[Value], operands: list[Value], *, may_be_same: bool) -> bool:
    """Whether it depends on the order of elements what comes of this write."""
    for place, value in enumerate(written):
        elements = _elements_of(value)
        if len(elements) < value.tensor.numel():
            return True
        if any(elements & _elements_of(other) for other in written[:place]):
            return True
        if not may_be_same and sum(other is value for other in operands) > 1:
            return True
        for other in operands:
            is_same = _geometry_of(other) == _geometry_of(value) and (may_be_same or other is value)
            if not is_same and elements & _elements_of(other):
                return True
    return False


def _elements_of(value: Value) -> set[tuple[int, int]]:
    tensor = value.tensor.detach()
    storage = tensor.untyped_storage()
    places = torch.arange(storage.nbytes() // tensor.itemsize).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    return {(storage.data_ptr(), place) for place in places.flatten().tolist()}


def _geometry_of(value: Value) -> tuple[object, ...]:
    tensor = value.tensor
    return _memory_of(value), tensor.storage_offset(), tensor.shape, tensor.stride()


def _reference(leaf: Any) -> Any:
    return leaf.ref if isinstance(leaf, Value) else leaf


def _written(function: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Value]:
    found = [value for value in leaves_of(kwargs.get("out")) if isinstance(value, Value)]
    if function == "operator.setitem" or (function.endswith("_") and not function.endswith("requires_grad_")):
        found += [value for value in leaves_of(args[0]) if isinstance(value, Value)]
    return found


def _needs_no_grad(written: list[Value]) -> bool:
    return any((value.tensor.is_leaf or value.tensor._is_view()) and value.tensor.requires_grad for value in written)


_VIEWS = (
    ".t .transpose .permute .view .unsqueeze .squeeze .expand .select .narrow .unfold .diagonal .movedim .unflatten"
    " .swapaxes .view_as .expand_as .detach .split .chunk .unbind .tensor_split operator.getitem .reshape .flatten"
    " .reshape_as .contiguous redistribute"
)


def _is_view(function: str) -> bool:
    return function in _VIEWS.split()


def _is_usable(tensor: torch.Tensor) -> bool:
    """Whether autograd still knows what it is: a view from before a write may have become ambiguous.

    That of a view which got its gradient by `requires_grad_` is taken for one of the whole, which has none.
    """
    try:
        return tensor.grad_fn is None or not tensor._is_view() or tensor._base is None or tensor._base.requires_grad
    except RuntimeError:
        return False


def _is_small(tensor: torch.Tensor) -> bool:
    if tensor.numel() > MAX_ELEMENTS or tensor.ndim > 5 or tensor.layout != torch.strided:
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.dtype == torch.bool or not tensor.numel() or int(tensor.abs().max()) < MAX_VALUE
    # A comparison that nan does not pass either.
    return bool((tensor.detach().abs() < MAX_VALUE).all())


def _is_dyadic(tensor: torch.Tensor) -> bool:
    """Whether sums of such values are exact, whatever their order."""
    if not tensor.is_floating_point():
        return not tensor.is_complex()
    bits = {torch.float64: (20, 22), torch.float32: (6, 10)}.get(tensor.dtype, (3, 2))
    value = tensor.detach().double()
    scaled = value * 2.0 ** bits[0]
    return bool((scaled == scaled.round()).all() and (value.abs() < 2.0 ** bits[1]).all())
