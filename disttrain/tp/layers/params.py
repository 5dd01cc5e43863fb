"""Layouts of a module's parameters on the axis, and the parts of them that a rank computes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Spec, distribute_tensor
from disttrain.dtensor.foreign import check_ours
from disttrain.dtensor.local_part import spec_of
from disttrain.errors import ShardingError
from disttrain.tp.layers.axis import Axis

_LAID_OUT_AS = "_disttrain_laid_out_as"
"""The outcome for a parameter: other modules that share it are given the same."""


@dataclass(frozen=True)
class Piece:
    """The part of a replicated tensor that one rank computes with: `size` from `start` on in each of `num_blocks`
    equal blocks of dim `dim`."""

    dim: int
    start: int
    size: int
    num_blocks: int = 1

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view where there is one block, else a copy."""
        view: torch.Tensor = self._view(whole)
        return view.flatten(self.dim, self.dim + 1)

    def put_into(self, whole: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """`whole`, where this part is now `piece`."""
        view = self._view(whole)
        view.copy_(piece.view(view.shape))
        return whole

    def _view(self, whole: torch.Tensor) -> torch.Tensor:
        blocks: torch.Tensor = whole.unflatten(self.dim, (self.num_blocks, -1))
        return blocks.narrow(self.dim + 1, self.start, self.size)


@dataclass(frozen=True)
class Cut:
    """The cut of one parameter along the axis.

    `is_term`: a rank's gradient is one term of the parameter's, which all ranks hold. `piece`: of a replicated
    parameter a rank computes with a part only; its gradient is a term too.
    """

    placement: Placement
    is_term: bool = False
    piece: Piece | None = None

    def used(self, parameter: Any) -> torch.Tensor:
        """The plain tensor that this rank computes with; no gradient goes through."""
        local: torch.Tensor | None = getattr(parameter, "_local_tensor", None)
        if local is None or parameter._spec.mesh.ndim != 1:
            lies = "is a plain tensor now" if local is None else f"lies as {parameter._spec.layout} now"
            raise ShardingError(
                "tensor parallel",
                f"a parameter of shape {tuple(parameter.shape)}, cut as [{self.placement}], {lies}.",
                "Leave it a DTensor on its axis, and call the module that fully_shard was given, which gathers it.",
            )
        return local if self.piece is None else self.piece.of(local)

    def used_with_grad(self, parameter: Any) -> torch.Tensor:
        """The same, through which the gradient goes."""
        term = [Partial()] if self.is_term or self.piece is not None else None
        local: torch.Tensor = parameter.to_local(grad_placements=term)
        return local if self.piece is None else self.piece.of(local)

    def grad(self, grad: torch.Tensor, spec: Spec) -> DTensor:
        """The gradient of a parameter of `spec`, from that of what this rank used."""
        if self.piece is not None:
            grad = self.piece.put_into(grad.new_zeros(spec.local_shape), grad)
        elif not self.is_term:
            return DTensor(grad, spec)
        return DTensor(grad, spec.with_layout(spec.layout.with_placements((Partial(),))))


REPLICATED = Cut(Replicate())
TERM = Cut(Replicate(), is_term=True)


def lay_out(module: nn.Module, cuts: Mapping[str, Cut], axis: Axis, src_data_rank: int | None) -> None:
    """Replace the module's own parameters by DTensors, by `cuts`; those without a cut are replicated.

    Raises: ShardingError when a parameter is a DTensor already, or shared with a module that has cut it otherwise.
    Collective, where src_data_rank is not None.
    """
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        cut = cuts.get(name, REPLICATED)
        module.register_parameter(name, _laid_out(name, module, parameter, cut, axis, src_data_rank))


def _laid_out(
    name: str, module: nn.Module, parameter: nn.Parameter, cut: Cut, axis: Axis, src_data_rank: int | None
) -> nn.Parameter:
    what = f"{name} of {type(module).__name__}"
    check_uncut_parameter(what, parameter, axis)
    shared: nn.Parameter | None = parameter.__dict__.get(_LAID_OUT_AS)
    if shared is not None:
        spec = spec_of(shared)
        if spec.layout is not axis.layout(cut.placement):
            refuse_other_cut(what, spec.placements[0], cut.placement, axis)
        return shared
    whole = distribute_tensor(parameter.detach(), axis.mesh, [cut.placement], src_data_rank=src_data_rank)
    made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    parameter.__dict__[_LAID_OUT_AS] = made
    return made


def check_uncut_parameter(what: str, parameter: nn.Parameter, axis: Axis) -> None:
    """Raise ShardingError for a DTensor, LayoutError for one of torch's."""
    check_ours("parallelize_module", what, parameter)
    if isinstance(parameter, DTensor):
        _refuse(
            f"{what} is a DTensor already and lies as {parameter._spec.layout}.",
            "Apply each style once, and parallelize_module before fully_shard.",
            axis,
        )


def refuse_other_cut(what: str, others: Placement, wanted: Placement, axis: Axis) -> NoReturn:
    """For a parameter that two modules share and cut in two ways."""
    _refuse(
        f"{what} is shared with a module that lays it out as {others}, and is wanted as {wanted}.",
        "Cut both along one dim, an embedding by RowwiseParallel and its head by ColwiseParallel; or untie them.",
        axis,
    )


def refuse_left(what: str, axis: Axis) -> NoReturn:
    """For a parameter of which one owner is cut and the other is not."""
    _refuse(
        f"{what} is shared with a module of the plan, and its own module is not in it.",
        "Add a style for that module, or untie the two.",
        axis,
    )


def check_none_is_left(module: nn.Module, axis: Axis) -> None:
    """Raise ShardingError where a submodule still has a parameter that others, who share it, have as a DTensor."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if _LAID_OUT_AS in parameter.__dict__:
            refuse_left(name, axis)


def _refuse(problem: str, remedy: str, axis: Axis) -> NoReturn:
    raise ShardingError("parallelize_module", problem, remedy, rank=axis.world_rank, where=str(axis.mesh.layout))
