"""Experts over the ranks of a mesh axis."""

from __future__ import annotations

from torch import nn

from disttrain.dtensor import DTensor, Shard
from disttrain.dtensor.foreign import check_ours
from disttrain.errors import DisttrainError
from disttrain.experts.exchange.base import NAME
from disttrain.experts.exchange.dispatch import exchange_along, problem_of_capacity
from disttrain.experts.expert_layer import ExpertLayer
from disttrain.experts.faults import let_tell, tell_of
from disttrain.experts.hidden_cut import cut_further
from disttrain.experts.tensor_parallel import ExpertTensorParallel, check_hidden, layers_in, refuse
from disttrain.mesh import DeviceMesh
from disttrain.tp import ParallelStyle


def shard_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    tp: DeviceMesh | None = None,
    cuts_tokens: bool = False,
    capacity: float | None = None,
    exchange: str = "auto",
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Divides the experts in `module` among the ranks of a mesh axis, in place.

    Each rank keeps a contiguous part of every layer's experts, as DTensor's Shard(0) cuts them: the last ranks may have
    fewer, or none. Their parameters become DTensors; each rank has tokens of its own, whose rows go to their experts'
    ranks and back. A rank whose modules raise tells the others.

    Args:    mesh           a mesh of one axis, such as mesh["ep"].
             tp             another axis of the same mesh, over which each expert's hidden dim is cut, as
                            `ExpertTensorParallel` does; the modules around the experts are for a plan.
             cuts_tokens    the ranks of `tp` have each a part of the tokens, as with sequence parallel.
             capacity       an expert takes at most so many times its even share of each rank's assignments. The
                            earliest tokens' are kept, and `num_dropped` of a layer counts the others of its last
                            forward. None: all are kept.
             exchange       "all_to_all": of the sizes that are needed, which the host reads; "padded": of one size,
                            which takes more memory and needs no word of the host, for steps that are captured;
                            "peers": likewise, and between GPUs of one host, which write to each other's memory what
                            there is, and no more.
             src_data_rank  the rank along the axis whose parameters count; None: all have the same, nothing is sent.
    Returns: `module`.
    Raises:  MeshError for a mesh of several axes; ShardingError when `module` has no experts, or they are cut already,
             or the capacity is no positive number; before anything is changed, and the other ranks are told.
    Collective: every rank of the axis.
    """
    made = exchange_along(mesh, exchange)
    try:
        layers = _checked_layers(module, mesh, tp, capacity)
    except DisttrainError as error:
        # The others may be about to send parameters.
        tell_of(error, mesh.get_group())
        raise
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for layer in layers:
        _shard(layer, mesh, src_data_rank, parts)
        layer.exchange, layer.capacity = made, capacity
    if made is not None:
        let_tell(module, made.group)
    if any("divided_along" in vars(layer) for layer in layers):
        _mark(module, mesh)
    if tp is not None:
        ExpertTensorParallel(cuts_tokens=cuts_tokens).apply_to(module, tp, src_data_rank)
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


def _checked_layers(
    module: nn.Module, mesh: DeviceMesh, tp: DeviceMesh | None, capacity: float | None
) -> list[ExpertLayer]:
    problem = problem_of_capacity(capacity)
    if problem is not None:
        refuse(*problem, mesh)
    layers = layers_in(module, mesh)
    for layer in layers:
        _check(layer, mesh)
        if tp is not None:
            check_hidden(layer, tp)
    return layers


def _check(layer: ExpertLayer, mesh: DeviceMesh) -> None:
    for _, name, parameter in layer.expert_tensors():
        check_ours(NAME, name, parameter)
        if isinstance(parameter, DTensor) and layer.hidden_cut is None:
            refuse(
                f"{name} of {type(layer).__name__} is a DTensor already and lies as {parameter._spec.layout}.",
                "Call shard_experts once, and before fully_shard.",
                mesh,
            )
        num_experts = layer.count_experts()
        rows, rest = divmod(len(parameter), num_experts)
        if rest or (rows > 1 and num_experts % mesh.size()):
            refuse(
                f"{name} of {type(layer).__name__} has shape {tuple(parameter.shape)} for {num_experts} experts; there"
                f" are {mesh.size()} ranks.",
                "Give each parameter the experts as its first dim, or as many experts to each rank.",
                mesh,
            )
    if layer.exchange is not None:
        refuse(f"{type(layer).__name__} is divided already.", "Call shard_experts once, and before fully_shard.", mesh)


def _shard(
    layer: ExpertLayer, mesh: DeviceMesh, src_data_rank: int | None, parts: dict[nn.Parameter, nn.Parameter]
) -> None:
    """`parts`: of parameters that were cut already, which layers may share."""
    for holder, name, parameter in list(layer.expert_tensors()):
        if parameter not in parts:
            parts[parameter] = cut_further(parameter, mesh, Shard(0), src_data_rank)
        setattr(holder, name, parts[parameter])
    layer.keep_part(mesh, src_data_rank)


def _mark(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let optimizers see by any parameter that there are such as this rank has not: it may have no expert at all."""
    for part in module.modules():
        part.beside_divided = mesh  # type: ignore[assignment]
        for parameter in part.parameters(recurse=False):
            parameter.beside_divided = mesh  # type: ignore[attr-defined]
