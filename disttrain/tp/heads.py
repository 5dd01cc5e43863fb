"""Numbers that a module has for each of its heads: a rank computes with those of its own heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from torch import nn

from disttrain.dtensor import Replicate, Shard
from disttrain.errors import ShardingError
from disttrain.mesh import DeviceMesh
from disttrain.tp._torch import shown_as
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.layers import Parallel, become
from disttrain.tp.layers.params import TERM, Cut, Piece, lay_out
from disttrain.tp.styles import ParallelStyle, check_uncut


class HeadParallel(ParallelStyle):
    """Cut a module's own parameters that hold numbers of each head, such as an attention's sinks.

    For a module whose query, key and value are `ColwiseParallel(head_dim=...)`, and whose forward computes with plain
    tensors of this rank's heads: `HeadParallel({"sinks": 0})`.
    """

    def __init__(self, dims: Mapping[str, int | None], *, head_dim: int = 1) -> None:
        """
        Args: dims      the dim that heads lie along, by name of a parameter, or of a buffer; None: all heads have the
                        same, and the gradient is the sum of the ranks'. Names that a module has not are passed over.
              head_dim  numbers of one head along that dim.
        """
        self.dims = dict(dims)
        self.head_dim = head_dim

    def _cuts(self, module: nn.Module, axis: Axis) -> Mapping[str, Cut]:
        check_uncut(self, module, axis)
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        missing = [name for name in parameters if name not in self.dims]
        if missing:
            self._refuse(f"{missing[0]} of {type(module).__name__} has no dim.", axis)
        for name in self.dims:
            self._cut(name, getattr(module, name, None), axis)
        return {name: self._cut(name, parameter, axis) for name, parameter in parameters.items()}

    def _cut(self, name: str, tensor: Any, axis: Axis) -> Cut:
        dim = self.dims[name]
        if tensor is None or dim is None:
            return TERM
        if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] % self.head_dim:
            self._refuse(f"{name} of shape {tuple(tensor.shape)} has no heads of {self.head_dim} along {dim}.", axis)
        num_heads = tensor.shape[dim] // self.head_dim
        if num_heads % axis.size == 0:
            return Cut(Shard(dim % tensor.ndim))
        if axis.size % num_heads:
            self._refuse(f"{name} is of {num_heads} heads, among {axis.size} ranks.", axis)
        # Ranks share a head, as those of keys and values.
        first = axis.rank * num_heads // axis.size * self.head_dim
        return Cut(Replicate(), piece=Piece(dim % tensor.ndim, first, self.head_dim))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of("parallelize_module", device_mesh)
        cuts = self._cuts(module, axis)
        for name, buffer in list(module.named_buffers(recurse=False)):
            dim = self.dims.get(name)
            if dim is not None:
                cut = self._cut(name, buffer, axis)
                share = buffer.shape[dim] // axis.size
                piece = cut.piece or Piece(dim % buffer.ndim, axis.rank * share, share)
                setattr(module, name, piece.of(buffer).clone())
        if cuts:
            lay_out(module, cuts, axis, self.src_data_rank)
            become(module, OfOwnHeads, _State(cuts))
        return module

    def _refuse(self, problem: str, axis: Axis) -> NoReturn:
        raise ShardingError("HeadParallel", problem, _REMEDY, rank=axis.world_rank)


_REMEDY: Final = (
    "Name each of the module's own parameters, with the dim that heads lie along or None; whole heads must divide among"
    " the ranks, or be shared by a whole number of them."
)


@dataclass(frozen=True)
class _State:
    cuts: Mapping[str, Cut]


class OfOwnHeads(Parallel):
    """A module whose forward sees of its own parameters the numbers of this rank's heads."""

    _tp: _State

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cuts = self._tp.cuts
        parameters = self.named_parameters(recurse=False, remove_duplicate=False)
        with shown_as(self, {name: cuts[name].used_with_grad(parameter) for name, parameter in parameters}):
            return super().forward(*args, **kwargs)


class Together(ParallelStyle):
    """Several styles of one module, applied in turn. One of them at most may cut its parameters."""

    def __init__(self, *styles: ParallelStyle) -> None:
        self.styles = styles

    def _cuts(self, module: nn.Module, axis: Axis) -> Mapping[str, Cut] | None:
        of_styles = [cuts for style in self.styles if (cuts := style._cuts(module, axis)) is not None]
        return {name: cut for cuts in of_styles for name, cut in cuts.items()} if of_styles else None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.styles:
            style.src_data_rank = self.src_data_rank
            module = style._apply(module, device_mesh)
        return module
