"""Linear layers that compute on their parts: which way a call goes, and what comes in and out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

from disttrain._python.made_classes import made_by
from disttrain.autocast import is_within_autocast
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, Spec, StridedShard
from disttrain.dtensor.local_part import spec_of
from disttrain.errors import LayoutError
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.columns import Column, Columns, columns
from disttrain.tp.layers.exchange import exchange_for
from disttrain.tp.layers.gathering import Cutting
from disttrain.tp.layers.graph import WISHES, columns_in_graph, row_in_graph
from disttrain.tp.layers.linears import Matrix
from disttrain.tp.layers.params import Cut
from disttrain.tp.layers.rows import Row, row


@dataclass(frozen=True)
class ColumnLayer:
    """A linear layer cut by its outputs. `output` None: as they come, each rank its own."""

    axis: Axis
    matrix: Matrix
    weight: Cut
    bias: Cut
    num_blocks: int
    input: Placement
    output: Placement | None
    use_local_output: bool
    overlap: bool | None

    _plans: dict[Any, Columns | None] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        plan = None
        if not (self.matrix.has_own_backward or takes_the_long_way(x)):
            plan = kept_plan(self._plans, form_of(x), lambda: self._plan(x, weight))
        if plan is None:
            return self._the_long_way(x, weight, bias)
        (result,) = columns(x, plan, (weight, bias))
        return self.finished(result)

    def is_laid_out(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """False where the parameters are, for now, cut by something else as well."""
        return all(
            parameter is None or spec_of(parameter).layout is self.axis.layout(cut.placement)
            for parameter, cut in ((weight, self.weight), (bias, self.bias))
        )

    def _plan(self, x: torch.Tensor, weight: torch.Tensor) -> Columns | None:
        """For inputs like `x`, if they come in one of the ways that need no DTensor's help."""
        spec = spec_on(self.axis, x)
        placement = self.input if spec is None else spec.placements[0]
        if placement.is_replicate():
            return Columns(self.axis, None, spec, (self.column(x, None, weight),))
        cutting = cutting_of(x, placement, self.axis, self.overlap)
        return None if cutting is None else Columns(self.axis, cutting, spec, (self.column(x, cutting, weight),))

    def column(self, x: torch.Tensor, cutting: Cutting | None, weight: torch.Tensor) -> Column:
        """This layer's part in a plan for inputs like `x`, which are whole or gathered."""
        if self.output is None and self.use_local_output:
            return Column(self.matrix, self.weight, self.bias, None)
        rows = list(x.shape[:-1])
        if cutting is not None and not isinstance(x, DTensor):
            rows[cutting.dim] *= self.axis.size
        spec = self.axis.spec(self._cut_outputs(x.ndim), (*rows, self.num_outputs(weight)), x.dtype)
        return Column(self.matrix, self.weight, self.bias, spec)

    def finished(self, result: torch.Tensor) -> torch.Tensor:
        """The result as the layer is asked to give it."""
        if not isinstance(result, DTensor):
            return result
        return given_out(result, self.output or self._cut_outputs(result.ndim), self.use_local_output)

    def _the_long_way(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        dim = None if self.matrix.has_own_backward else dim_in_graph(x, self.input, self.axis)
        if dim is not None:
            part = redistributed_part(x, self.input, self.axis)
            _, result = self.in_graph(part, dim, [self], [weight], [bias])
            return self.given_from_part(result, self.num_outputs(weight))
        whole = _input_of(self, x, weight).redistribute(placements=[Replicate()])
        local = whole.to_local(grad_placements=[Partial()])
        used_bias = None if bias is None else self.bias.used_with_grad(bias)
        part = self.matrix.times(local, self.weight.used_with_grad(weight), used_bias)
        return self.given_from_part(part, self.num_outputs(weight))

    def given_from_part(self, part: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """The result as the layer is asked to give it, from this rank's outputs; differentiable by autograd alone."""
        if self.output is None and self.use_local_output:
            return part
        whole_shape = (*part.shape[:-1], num_outputs)
        cut = self._cut_outputs(part.ndim)
        return self.finished(DTensor.from_local(part, self.axis.mesh, [cut], shape=whole_shape))

    @staticmethod
    def in_graph(
        part: torch.Tensor,
        dim: int,
        layers: Sequence[ColumnLayer],
        weights: Sequence[Any],
        biases: Sequence[Any],
    ) -> tuple[torch.Tensor, ...]:
        """The whole input and all layers' outputs as one operator of a graph."""
        used = [layer.weight.used_with_grad(weight) for layer, weight in zip(layers, weights, strict=True)]
        used_biases = [
            None if bias is None else layer.bias.used_with_grad(bias)
            for layer, bias in zip(layers, biases, strict=True)
        ]
        out_dims = [layer.matrix.out_dim for layer in layers]
        overlap = next((layer.overlap for layer in layers if layer.overlap is not None), None)
        return columns_in_graph(part, used, used_biases, out_dims, dim, layers[0].axis.group_name, WISHES[overlap])

    def _cut_outputs(self, num_dims: int) -> Placement:
        last = num_dims - 1
        return Shard(last) if self.num_blocks == 1 else StridedShard(last, self.num_blocks)

    def num_outputs(self, weight: torch.Tensor) -> int:
        """Outputs of all ranks; where ranks share heads, each counts as often as it is computed."""
        piece = self.weight.piece
        return weight.shape[self.matrix.out_dim] if piece is None else piece.size * piece.num_blocks * self.axis.size


@dataclass(frozen=True)
class RowLayer:
    """A linear layer cut by its inputs."""

    axis: Axis
    matrix: Matrix
    weight: Cut
    bias: Cut
    input: Placement
    output: Placement
    use_local_output: bool
    overlap: bool | None

    _plans: dict[Any, Row | None] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        plan = None
        if not (self.matrix.has_own_backward or takes_the_long_way(x)):
            plan = kept_plan(self._plans, form_of(x), lambda: self._plan(x, weight))
        return self._the_long_way(x, weight, bias) if plan is None else row(x, plan, weight, bias)

    def _plan(self, x: torch.Tensor, weight: torch.Tensor) -> Row | None:
        """For inputs like `x`, if input and output lie in one of the ways that need no DTensor's help."""
        spec = spec_on(self.axis, x)
        last, width, size = x.ndim - 1, weight.shape[self.matrix.out_dim], self.axis.size
        if not _is_shard(self.input if spec is None else spec.placements[0], last, x.ndim):
            return None
        num_own = spec_of(weight).local_shape[self.matrix.in_dim]
        if spec is None and x.shape[last] != num_own:
            raise LayoutError(
                "RowwiseParallel",
                f"this rank's input has {x.shape[last]} columns, and its part of the layer takes {num_own} of "
                f"{weight.shape[self.matrix.in_dim]}.",
                f"Cut the layers before it into {size} parts without overlap: heads that ranks share, as with fewer "
                "query heads than ranks, are too many columns.",
                rank=self.axis.world_rank,
            )
        dim = None
        if isinstance(self.output, Shard):
            dim = dim_of(self.output, x.ndim)
            if dim == last or x.shape[dim] % size:
                return None
        elif not self.output.is_replicate():
            return None
        output = None
        if not self.use_local_output:
            output = self.axis.spec(Replicate() if dim is None else Shard(dim), (*x.shape[:-1], width), x.dtype)
        cutting = None
        if dim is not None:
            part_bytes = math.prod(x.shape[:-1]) // size * width * x.element_size()
            cutting = Cutting(self.axis.group, dim, exchange_for(self.axis.group, x.device, self.overlap, part_bytes))
        return Row(self.axis, self.matrix, self.weight, self.bias, cutting, spec, output)

    def _the_long_way(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        part = _input_of(self, x, weight).redistribute(placements=[Shard(x.ndim - 1)]).to_local()
        used = self.weight.used_with_grad(weight)
        dim = dim_in_graph(part, self.output, self.axis, is_whole=True)
        if dim is not None and not self.matrix.has_own_backward:
            wish = WISHES[self.overlap]
            scattered = row_in_graph(part, used, self.matrix.out_dim, dim, self.axis.group_name, wish)
            result = DTensor.from_local(scattered, self.axis.mesh, [self.output])
        else:
            term = self.matrix.times(part, used, None)
            result = DTensor.from_local(term, self.axis.mesh, [Partial()]).redistribute(placements=[self.output])
        if bias is not None:
            result = cast(DTensor, result + bias.to(result.dtype))
        return given_out(result, self.output, self.use_local_output)


def _input_of(layer: ColumnLayer | RowLayer, x: torch.Tensor, weight: torch.Tensor) -> DTensor:
    """`x` as a DTensor. Where its last dim is cut, perhaps unevenly, the weight tells how large the whole's is."""
    whole_shape = None
    if _is_shard(layer.input, x.ndim - 1, x.ndim):
        whole_shape = (*x.shape[:-1], weight.shape[layer.matrix.in_dim])
    return as_dtensor(x, layer.input, layer.axis, whole_shape)


def takes_the_long_way(x: torch.Tensor) -> bool:
    """Compilers follow autograd's own functions better than ours, and autocast converts only for these."""
    return torch.compiler.is_compiling() or x.ndim < 2 or is_within_autocast(x.device)


def form_of(x: torch.Tensor) -> Any:
    """The key of a plan: inputs of one form have one plan."""
    spec = getattr(x, "_spec", None)
    return (x.shape, x.dtype, x.device) if spec is None else (spec, x.device)


_Plan = TypeVar("_Plan")
_MOST_PLANS = 1024
"""Of one layer; sequences of ever other lengths would keep ever more."""


def kept_plan(plans: dict[Any, _Plan | None], form: Any, make: Callable[[], _Plan | None]) -> _Plan | None:
    """The plan for inputs of this form, made when the first one comes."""
    plan = plans.get(form)
    if plan is None and form not in plans:
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plan = plans[form] = make()
    return plan


def cutting_of(x: torch.Tensor, placement: Placement, axis: Axis, overlap: bool | None) -> Cutting | None:
    """The way to gather inputs like `x`, whose parts lie so; None where that takes DTensor's help."""
    if not isinstance(placement, Shard):
        return None
    dim = dim_of(placement, x.ndim)
    is_dtensor = isinstance(x, DTensor)
    if dim == x.ndim - 1 or (is_dtensor and x.shape[dim] % axis.size):
        return None
    part_bytes = x.nbytes // axis.size if is_dtensor else x.nbytes
    return Cutting(axis.group, dim, exchange_for(axis.group, x.device, overlap, part_bytes))


def dim_in_graph(x: torch.Tensor, placement: Placement, axis: Axis, *, is_whole: bool = False) -> int | None:
    """The dim along which ranks have parts, where a graph holds the multiplication and their exchange as one operator.

    `is_whole`: a plain `x` has that dim whole; else only a DTensor has.
    """
    if not torch.compiler.is_compiling() or x.ndim < 2 or not isinstance(placement, Shard):
        return None
    dim = dim_of(placement, x.ndim)
    if dim == x.ndim - 1 or ((is_whole or isinstance(x, DTensor)) and x.shape[dim] % axis.size):
        return None
    return dim


def redistributed_part(x: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    """This rank's part of `x`, laid out so; of a plain tensor, which lies so, itself."""
    return (
        as_dtensor(x, placement, axis).redistribute(placements=[placement]).to_local() if isinstance(x, DTensor) else x
    )


def _is_shard(placement: Placement, dim: int, num_dims: int) -> bool:
    return isinstance(placement, Shard) and dim_of(placement, num_dims) == dim


def dim_of(placement: Shard, num_dims: int) -> int:
    """The dim that is cut, counted from the front. Raises LayoutError where there is no such dim."""
    dim = placement.dim
    if not -num_dims <= dim < num_dims:
        raise LayoutError(
            "tensor parallel",
            f"{placement} is given for a tensor of {num_dims} dims.",
            f"Give a dim from {-num_dims} to {num_dims - 1}.",
        )
    return dim % num_dims


def spec_on(axis: Axis, x: torch.Tensor) -> Spec | None:
    """The spec of a DTensor on the axis, None of a plain tensor. Raises LayoutError for one on another mesh."""
    spec: Spec | None = getattr(x, "_spec", None)
    if spec is not None and spec.mesh != axis.mesh:
        raise LayoutError(
            "tensor parallel",
            f"the input lies on the mesh {spec.mesh.layout}, the module on {axis.mesh.layout}.",
            "Redistribute it, or give its local part.",
            rank=axis.world_rank,
        )
    return spec


def as_dtensor(x: torch.Tensor, placement: Placement, axis: Axis, shape: tuple[int, ...] | None = None) -> DTensor:
    """`x`, which lies as `placement` says if it is plain. `shape` of the whole, where cuts may be uneven."""
    if isinstance(x, DTensor):
        if not torch.compiler.is_compiling():
            spec_on(axis, x)
        return x
    return DTensor.from_local(x, axis.mesh, [placement], shape=shape)


def given_out(result: DTensor, placement: Placement, use_local_output: bool) -> torch.Tensor:
    """The result as it is asked for.

    Raises: LayoutError when a plain part is asked for and ranks would have parts of several sizes: nobody could tell
    the size of the whole from them.
    """
    mesh = result.device_mesh
    if use_local_output and isinstance(placement, Shard):
        dim, size = dim_of(placement, result.ndim), mesh.size()
        if dim != result.ndim - 1 and result.shape[dim] % size:
            raise LayoutError(
                "tensor parallel",
                f"dim {dim} of a result of shape {tuple(result.shape)} doesn't divide among {size} ranks, and plain "
                "parts don't say what they are parts of.",
                f"Pad it to a multiple of {size}, or set use_local_output=False.",
                rank=mesh.get_rank(),
            )
    # A compiler that reads this knows no layouts, but what redistribute does with them.
    if torch.compiler.is_compiling() or result.placements != (_from_front(placement, result.ndim),):
        result = result.redistribute(placements=[placement])
    return result.to_local() if use_local_output else result


def _from_front(placement: Placement, num_dims: int) -> Placement:
    return Shard(dim_of(placement, num_dims)) if isinstance(placement, Shard) else placement


class Parallel(nn.Module):
    """A module that one of the styles has cut. `isinstance` with its former class stays true."""

    _tp: Any


class ColumnLinear(Parallel):
    """A linear layer whose outputs are cut along the axis. nn.Linear calls its input `input`, GPT-2's layer `x`."""

    _tp: ColumnLayer
    _tp_shared: tuple[Any, int] | None = None
    """Who may have made the result already, for an input of several layers, and which of these this one is."""
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor | None = None, *, input: torch.Tensor | None = None) -> torch.Tensor:
        x = input if x is None else x
        assert x is not None
        if self._tp_shared is not None:
            sharing, index = self._tp_shared
            result = sharing.result_for(index, x)
            if result is not None:
                return self._tp.finished(result)
        return self._tp(x, self.weight, self.bias)


class RowLinear(Parallel):
    """A linear layer whose inputs are cut along the axis."""

    _tp: RowLayer
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor | None = None, *, input: torch.Tensor | None = None) -> torch.Tensor:
        x = input if x is None else x
        assert x is not None
        return self._tp(x, self.weight, self.bias)


def become(module: nn.Module, kind: type[Parallel], state: object) -> None:
    """Make `module` one of `kind`, in place."""
    module.__class__ = _joined(cast(Any, kind), cast(Any, type(module)))
    module._tp = state  # type: ignore[assignment]


@functools.cache
def _joined(kind: Any, cls: Any) -> type[nn.Module]:
    return made_by(type(f"{kind.__name__}Of{cls.__name__}", (kind, cls), {}), _joined, kind, cls)
