"""Layout: placements on a mesh. Spec: a layout plus the global tensor's shape, strides and dtype.

Both are interned: equal ones are one object, so that comparing them is `is`, and looking up what was decided for them
hashes an address. Decisions hang on them (`plans`) and go when the last tensor that lies so goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any, Final, Self, cast
from weakref import WeakValueDictionary, ref

import torch

from disttrain.dtensor.spec.placement import Placement, Placements, Replicate, StridedShard
from disttrain.dtensor.spec.shard_sizes import (
    contiguous_strides,
    local_shape,
    local_shape_and_offset,
    num_blocks,
)
from disttrain.dtensor.views.view_copy import ViewCopy
from disttrain.mesh import DeviceMesh

_Key = tuple["Layout", tuple[int, ...], tuple[int, ...], torch.dtype]

_INTS = {int}


class Form:
    """What specs have in common of which calls are planned alike: layout, dtype, order, and which sizes are zero, one,
    or one on each rank."""

    __slots__ = ("is_contiguous", "plans")

    def __init__(self, *, is_contiguous: bool) -> None:
        self.is_contiguous = is_contiguous
        self.plans: dict[Any, Any] = {}
        """The plans of dispatch for a first operand of this form, whatever its sizes."""


class Layout:
    """Placements on a mesh, one per mesh axis. Says nothing about sizes."""

    __slots__ = (
        "__weakref__",
        "_replicated",
        "even_cuts",
        "forms",
        "has_partial",
        "is_replicated",
        "is_symbolic",
        "mesh",
        "placements",
    )

    mesh: DeviceMesh
    placements: Placements
    is_replicated: bool
    """True when every rank holds the whole value."""
    has_partial: bool
    even_cuts: tuple[tuple[int, int], ...] | None
    """Each dim that is cut, and into how many pieces; None where a cut is strided."""
    is_symbolic: bool
    """True when a placement counts blocks by a symbol, as the compiler traces a flattened dim."""
    forms: dict[Any, Form]
    """The forms of specs with this layout."""
    _replicated: Layout | None

    def __new__(cls, mesh: DeviceMesh, placements: Sequence[Placement]) -> Self:
        key = (mesh, tuple(placements))
        layout = _LAYOUTS.get(key)
        if layout is None:
            layout = super().__new__(cls)
            layout.mesh, layout.placements = key
            layout.is_replicated = all(isinstance(placement, Replicate) for placement in layout.placements)
            layout.has_partial = any(placement.is_partial() for placement in layout.placements)
            layout.even_cuts = _even_cuts(mesh, layout.placements)
            layout.is_symbolic = any(type(num_blocks(placement)) is not int for placement in layout.placements)
            layout.forms = {}
            layout._replicated = None
            layout = _LAYOUTS.setdefault(key, layout)
        return cast(Self, layout)

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        return Layout(self.mesh, placements)

    def replicated(self) -> Layout:
        """The same mesh, whole on every rank."""
        if self._replicated is None:
            whole = Layout(self.mesh, (Replicate(),) * len(self.placements))
            if whole is self:
                return self
            self._replicated = whole
        return self._replicated

    def even_part(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of each rank's part of a tensor that is cut evenly, into pieces that are no blocks of others."""
        sizes = [*shape]
        for dim, num_pieces in self.even_cuts or ():
            sizes[dim] //= num_pieces
        return tuple(sizes)

    def form_of(self, shape: Sequence[int], part: Sequence[int], dtype: torch.dtype, *, is_contiguous: bool) -> Form:
        """The form of specs of such sizes, of which each rank has a part of shape `part`."""
        key = (dtype, is_contiguous, _ones(shape, part) if 1 in part or 0 in part else len(part))
        form = self.forms.get(key)
        return self.forms.setdefault(key, Form(is_contiguous=is_contiguous)) if form is None else form

    def concrete(self) -> Layout:
        """The same for the sizes at hand: a graph in which this is asked for is for these alone."""
        if not self.is_symbolic:
            return self
        return self.with_placements(
            [
                replace(placement, num_blocks=int(placement.num_blocks))
                if isinstance(placement, StridedShard)
                else placement
                for placement in self.placements
            ]
        )

    def __deepcopy__(self, _: object) -> Layout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.mesh, self.placements)

    def __repr__(self) -> str:
        return f"Layout({self})"

    def __str__(self) -> str:
        return f"{list(self.placements)} on {self.mesh.layout}"


class Spec:
    """A DTensor's global shape, strides, dtype and layout: all of it but the values.

    With sizes that are symbols, as the compiler traces them, a spec is an object of its own and nothing is kept for it.
    """

    __slots__ = (
        "__weakref__",
        "_form",
        "_local_shape",
        "dtype",
        "is_symbolic",
        "layout",
        "mesh",
        "placements",
        "plans",
        "shape",
        "stride",
        "view_copy",
    )

    layout: Layout
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    mesh: DeviceMesh
    placements: Placements
    is_symbolic: bool
    view_copy: ViewCopy | None
    """The link of a view copy to its owner; such a spec is an object of its own, without plans."""
    plans: dict[Any, Any]
    """The plans of dispatch for a first operand of this spec, by operator and other operands."""
    _local_shape: tuple[int, ...] | None
    _form: Form | None

    def __new__(cls, layout: Layout, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Self:
        sizes, strides = tuple(shape), tuple(stride)
        if {*map(type, sizes), *map(type, strides)} - _INTS:
            return cls._made(layout, sizes, strides, dtype, is_symbolic=True)
        return cls.interned(layout, sizes, strides, dtype)

    @classmethod
    def interned(cls, layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Self:
        """The one spec of these; there are no symbols among the sizes."""
        key = (layout, shape, stride, dtype)
        reference = _SPECS.get(key)
        spec: Any = None if reference is None else reference()
        return cast(Self, cls._made(*key, is_symbolic=False)._first(key) if spec is None else spec)

    @classmethod
    def even(cls, layout: Layout, shape: tuple[int, ...], part: tuple[int, ...], dtype: torch.dtype) -> Self:
        """The one spec of a contiguous tensor of which each rank has a part of shape `part`."""
        key = (layout, shape, _strides(shape), dtype)
        reference = _SPECS.get(key)
        spec: Any = None if reference is None else reference()
        if spec is None:
            made = cls._made(*key, is_symbolic=False)
            made._local_shape, made._form = part, layout.form_of(shape, part, dtype, is_contiguous=True)
            return cast(Self, made._first(key))
        return cast(Self, spec)

    @classmethod
    def _made(
        cls, layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, *, is_symbolic: bool
    ) -> Self:
        made = super().__new__(cls)
        made.layout, made.shape, made.stride, made.dtype = layout, shape, stride, dtype
        made.mesh, made.placements = layout.mesh, layout.placements
        made.is_symbolic = is_symbolic
        made.view_copy = None
        made.plans = {}
        made._local_shape = None
        made._form = _UNKNOWN
        return made

    def _first(self, key: _Key) -> Any:
        """The spec of this key that was first, of several threads."""
        reference = _Reference(self, _forget)
        reference.key = key
        first = _SPECS.setdefault(key, reference)()
        if first is None:  # it went, and nobody has forgotten it yet
            _SPECS[key], first = reference, self
        return first

    @classmethod
    def of(cls, layout: Layout, shape: Sequence[int], dtype: torch.dtype) -> Spec:
        """A spec with contiguous strides."""
        return cls(layout, shape, contiguous_strides(shape), dtype)

    @property
    def is_contiguous(self) -> bool:
        """True for the strides that a new tensor has; sizes are no symbols."""
        return self.stride == _strides(self.shape)

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @property
    def form(self) -> Form | None:
        """What it has in common with specs of other sizes; None where a cut is uneven."""
        if self._form is _UNKNOWN:
            self._form = self._found_form()
        return self._form

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part; all zeros on a rank that is not on the mesh."""
        if self._local_shape is None:
            coordinate = self.mesh.get_coordinate()
            if coordinate is None:
                self._local_shape = (0,) * len(self.shape)
            elif self.is_even:
                self._local_shape = self.layout.even_part(self.shape)
            else:
                self._local_shape = local_shape(self.shape, self.mesh.shape, coordinate, self.placements)
        return self._local_shape

    @property
    def local_offset(self) -> tuple[int, ...]:
        """The index in the whole of this rank's first element; no placement may be StridedShard."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return (0,) * len(self.shape)
        return local_shape_and_offset(self.shape, self.mesh.shape, coordinate, self.placements)[1]

    def with_layout(self, layout: Layout) -> Spec:
        if layout is self.layout:
            return self
        return Spec(layout, self.shape, self.stride, self.dtype)

    @property
    def is_even(self) -> bool:
        """True where all ranks have parts of one shape, which are no blocks of others; sizes are no symbols."""
        cuts = self.layout.even_cuts
        if cuts is None or self.is_symbolic:
            return False
        for dim, num_pieces in cuts:
            size = self.shape[dim]
            if not size or size % num_pieces:
                return False
        return True

    def _found_form(self) -> Form | None:
        if self.view_copy is not None:
            return None
        if self._local_shape is None and self.is_even and self.mesh.get_coordinate() is not None:
            self._local_shape = self.layout.even_part(self.shape)
        elif not (self.is_even or self._has_even_blocks()):
            return None
        return self.layout.form_of(self.shape, self.local_shape, self.dtype, is_contiguous=self.is_contiguous)

    def _has_even_blocks(self) -> bool:
        """As `is_even`, where cuts are strided."""
        if self.is_symbolic or self.layout.even_cuts is not None:
            return False
        sizes = list(self.shape)
        for num_pieces, placement in zip(self.mesh.shape, self.placements, strict=True):
            dim = placement.cut_dim
            if dim is not None:
                if not sizes[dim] or sizes[dim] % (num_pieces * num_blocks(placement)):
                    return False
                sizes[dim] //= num_pieces
        return True

    def as_view_copy(self, view_copy: ViewCopy) -> Spec:
        """The same, of a view that is a copy."""
        spec = Spec._made(self.layout, self.shape, self.stride, self.dtype, is_symbolic=self.is_symbolic)
        spec.view_copy = view_copy
        return spec

    def owned(self) -> Spec:
        """The same, of a tensor that has its values to itself."""
        return self if self.view_copy is None else Spec(self.layout, self.shape, self.stride, self.dtype)

    def __deepcopy__(self, _: object) -> Spec:
        return self.owned()

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (self.layout, self.shape, self.stride, self.dtype)

    def __repr__(self) -> str:
        return f"Spec({self.layout}, {self.shape}, stride={self.stride}, {self.dtype})"


_UNKNOWN: Final = Form(is_contiguous=False)
"""In place of a form that is not looked up yet."""


class _Reference(ref[Spec]):
    """Of the table of specs, to one that is alive."""

    __slots__ = ("key",)
    key: _Key


def _forget(reference: _Reference) -> None:
    if _SPECS.get(reference.key) is reference:
        del _SPECS[reference.key]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Contiguous strides of sizes that are no symbols."""
    if not shape or 0 in shape:
        return contiguous_strides(shape)
    return tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1]


def _ones(shape: Sequence[int], part: Sequence[int]) -> tuple[int, ...]:
    """Of each dim 2 where its size is one, 1 where that of parts is: parts would be broadcast where wholes are not. -1
    where it is zero."""
    return tuple([(size == 1) + (length == 1) if size else -1 for size, length in zip(shape, part, strict=True)])


def _even_cuts(mesh: DeviceMesh, placements: Placements) -> tuple[tuple[int, int], ...] | None:
    cuts: dict[int, int] = {}
    for num_pieces, placement in zip(mesh.shape, placements, strict=True):
        dim = placement.cut_dim
        if isinstance(placement, StridedShard):
            return None
        if dim is not None:
            cuts[dim] = cuts.get(dim, 1) * num_pieces
    return tuple(cuts.items())


# Tables of values that are alive, not state: who holds an equal one gets the same object.
_LAYOUTS: WeakValueDictionary[tuple[DeviceMesh, Placements], Layout] = WeakValueDictionary()
_SPECS: dict[_Key, _Reference] = {}
"""As a WeakValueDictionary, whose methods are Python: a new length asks for several new specs."""


def forget_plans() -> None:
    """Plan every call anew: what plans were made by has changed."""
    # By their references, which are listed in one step: other threads add to the tables meanwhile.
    for reference in _LAYOUTS.valuerefs():
        if (layout := reference()) is not None:
            for form in [*layout.forms.values()]:
                form.plans.clear()
    for spec_reference in [*_SPECS.values()]:
        if (spec := spec_reference()) is not None:
            spec.plans.clear()
