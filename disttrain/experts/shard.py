"""Experts over the ranks of a mesh axis."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from disttrain.dtensor import DTensor, Shard, distribute_tensor
from disttrain.dtensor.foreign import check_ours
from disttrain.errors import ShardingError
from disttrain.experts.exchange.base import NAME, Exchange
from disttrain.experts.exchange.dispatch import exchange_along
from disttrain.experts.expert_layer import ExpertLayer
from disttrain.experts.faults import tells
from disttrain.mesh import DeviceMesh
from disttrain.tp import ParallelStyle


def shard_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    capacity: float | None = None,
    exchange: str = "auto",
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Divides the experts in `module` among the ranks of a mesh axis, in place.

    Each rank keeps a contiguous part of every layer's experts, as DTensor's Shard(0) cuts them: the last ranks may have
    fewer, or none. Their parameters become DTensors; each rank has tokens of its own, whose rows go to their experts'
    ranks and back. A rank whose modules raise tells the others.

    Args:    mesh           a mesh of one axis, such as mesh["ep"].
             capacity       an expert takes at most so many times its even share of each rank's assignments. The
                            earliest tokens' are kept, and `num_dropped` of a layer counts the others of its last
                            forward. None: all are kept.
             exchange       "all_to_all": of the sizes that are needed, which the host reads; "padded": of one size,
                            which takes more memory and needs no word of the host, for steps that are captured.
             src_data_rank  the rank along the axis whose parameters count; None: all have the same, nothing is sent.
    Returns: `module`.
    Raises:  MeshError for a mesh of several axes; ShardingError when `module` has no experts, or they are cut already;
             before anything is changed.
    Collective: every rank of the axis.
    """
    made = exchange_along(mesh, exchange)
    if capacity is not None and not capacity > 0:
        _refuse(f"capacity is {capacity}.", "Give a positive factor of an expert's even share, or None.", mesh)
    layers = [layer for layer in module.modules() if isinstance(layer, ExpertLayer)]
    if not layers:
        _refuse(
            f"{type(module).__name__} has no experts.",
            "Give a model with disttrain.experts.Experts, or call use_experts first.",
            mesh,
        )
    for layer in layers:
        _check(layer, mesh)
    for layer in layers:
        _shard(layer, mesh, src_data_rank)
        layer.exchange, layer.capacity = made, capacity
    if made is not None:
        _let_tell(module, made)
    return module


class ExpertParallel(ParallelStyle):
    """The style of `shard_experts` in a plan of parallelize_module, for a layer of experts or what has some."""

    def __init__(self, *, capacity: float | None = None, exchange: str = "auto") -> None:
        """See `shard_experts`."""
        self.capacity = capacity
        self.exchange = exchange

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return shard_experts(
            module,
            device_mesh,
            capacity=self.capacity,
            exchange=self.exchange,
            src_data_rank=self.src_data_rank,
        )


def _check(layer: ExpertLayer, mesh: DeviceMesh) -> None:
    if layer.exchange is not None:
        _refuse(f"{type(layer).__name__} is divided already.", "Call shard_experts once, and before fully_shard.", mesh)
    for _, name, parameter in layer.expert_tensors():
        check_ours(NAME, name, parameter)
        if isinstance(parameter, DTensor):
            _refuse(
                f"{name} of {type(layer).__name__} is a DTensor already and lies as {parameter._spec.layout}.",
                "Call shard_experts once, and before fully_shard.",
                mesh,
            )
        num_experts = layer.count_experts()
        rows, rest = divmod(len(parameter), num_experts)
        if rest or (rows > 1 and num_experts % mesh.size()):
            _refuse(
                f"{name} of {type(layer).__name__} has shape {tuple(parameter.shape)} for {num_experts} experts; there"
                f" are {mesh.size()} ranks.",
                "Give each parameter the experts as its first dim, or as many experts to each rank.",
                mesh,
            )


def _shard(layer: ExpertLayer, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    for holder, name, parameter in list(layer.expert_tensors()):
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=src_data_rank)
        setattr(holder, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    layer.keep_part(mesh, src_data_rank)


def _let_tell(module: nn.Module, exchange: Exchange) -> None:
    """Of `module`, and of each module that has a layer of experts: routers raise there."""
    tells(module, exchange)
    for parent in list(module.modules()):
        if any(isinstance(child, ExpertLayer) for child in parent.children()):
            tells(parent, exchange)


def _refuse(problem: str, remedy: str, mesh: DeviceMesh) -> NoReturn:
    raise ShardingError("shard_experts", problem, remedy, rank=mesh.get_rank(), where=str(mesh.layout))
