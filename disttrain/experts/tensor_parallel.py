"""The style of layers of experts whose hidden dims are cut over a mesh axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

from torch import nn

from disttrain.dtensor import Placement
from disttrain.dtensor.foreign import check_ours
from disttrain.dtensor.spec.shard_sizes import num_blocks
from disttrain.errors import DisttrainError, ShardingError
from disttrain.experts.exchange.base import NAME
from disttrain.experts.faults import is_layer, let_tell, tell_of
from disttrain.experts.hidden_cut import HiddenCut, cut_further
from disttrain.mesh import DeviceMesh
from disttrain.tp import ParallelStyle


class CutLayer(Protocol):
    """A layer of experts, as far as it is asked how to cut it."""

    hidden_cut: HiddenCut | None

    def hidden_cuts(self) -> Sequence[Placement] | None: ...

    def expert_tensors(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]: ...


class ExpertTensorParallel(ParallelStyle):
    """Cuts each expert along its hidden dim over a mesh axis, whose ranks sum up what they have of each token.

    In a plan of parallelize_module it may come before or after `shard_experts` along another axis of the same mesh, and
    is what tp.plan_for proposes for layers of experts.
    """

    crossings = 2.0, 2.0
    """The times that a step sends the tokens' hidden vectors, in the planner's count: forward, and backward."""

    def __init__(self, *, cuts_tokens: bool = False) -> None:
        """`cuts_tokens`: each rank has its part of the tokens, all of one size, as with sequence parallel; then
        tp.ReplicatedParallel is the style of their router."""
        self.cuts_tokens = cuts_tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply_to(module, device_mesh, self.src_data_rank)

    def apply_to(self, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Module:
        """Cut the layers of experts in `module`, which may be one, in place. Collective: every rank of the axis."""
        try:
            layers = layers_in(module, mesh)
            for layer in layers:
                check_hidden(layer, mesh)
        except DisttrainError as error:
            tell_of(error, mesh.get_group())
            raise
        if mesh.size() == 1:
            return module
        parts: dict[nn.Parameter, nn.Parameter] = {}  # that layers may share
        for layer in layers:
            cuts = layer.hidden_cuts()
            assert cuts is not None
            for (holder, name, parameter), cut in zip(list(layer.expert_tensors()), cuts, strict=True):
                if parameter not in parts:
                    parts[parameter] = cut_further(parameter, mesh, cut, src_data_rank)
                setattr(holder, name, parts[parameter])
            layer.hidden_cut = HiddenCut(mesh, self.cuts_tokens)
        let_tell(module, mesh.get_group())
        return module


def layers_in(module: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Finds the layers of experts in `module`, which may be one. Raises ShardingError where there are none."""
    layers = [layer for layer in module.modules() if is_layer(layer)]
    if not layers:
        refuse(
            f"{type(module).__name__} has no experts.",
            "Give a model with disttrain.experts.Experts, or call use_experts first.",
            mesh,
        )
    return layers


def check_hidden(layer: CutLayer, mesh: DeviceMesh) -> None:
    """Raise ShardingError where experts cannot be cut along their hidden dim over the axis of `mesh`."""
    cuts, name = layer.hidden_cuts(), type(layer).__name__
    if cuts is None:
        refuse(
            f"the outputs of {name} are more than sums along a hidden dim, or its experts are modules of their own.",
            "Leave its experts whole: have ranks of the axis compute other tokens, as along ep.",
            mesh,
        )
    if layer.hidden_cut is not None:
        refuse(f"{name} is cut along its hidden dim already.", "Cut it once.", mesh)
    for (_, of_parameter, parameter), cut in zip(layer.expert_tensors(), cuts, strict=True):
        check_ours(NAME, of_parameter, parameter)
        blocks = num_blocks(cut)
        if cut.cut_dim is not None and parameter.shape[cut.cut_dim] // blocks % mesh.size():
            refuse(
                f"{of_parameter} of {name} has shape {tuple(parameter.shape)}: a hidden dim of"
                f" {parameter.shape[cut.cut_dim] // blocks}, and the axis has {mesh.size()} ranks.",
                "Give a hidden dim that they divide.",
                mesh,
            )


def refuse(problem: str, remedy: str, mesh: DeviceMesh) -> NoReturn:
    """Raise ShardingError."""
    raise ShardingError("shard_experts", problem, remedy, rank=mesh.get_rank(), where=str(mesh.layout))
