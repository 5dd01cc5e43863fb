"""fully_shard: per-parameter sharding of a module over the ranks of a mesh (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import nn

from disttrain.arguments import arguments_of
from disttrain.dtensor import Placement, Shard
from disttrain.dtensor.foreign import check_ours
from disttrain.dtensor.spec.placement import converted
from disttrain.errors import ArgumentError, ShardingError
from disttrain.fsdp2._torch import compile_forward_alone, own_parameters
from disttrain.fsdp2.module import FSDPModule
from disttrain.fsdp2.modules.parametrized import keep_parametrizations
from disttrain.fsdp2.modules.structure import unmanaged_modules
from disttrain.fsdp2.modules.sync_batch_norm import on_cpus
from disttrain.fsdp2.params.extensions import ExtensionGroup, has_gather_hooks
from disttrain.fsdp2.params.param import Owner, ShardedParam, check_can_shard, divided_along
from disttrain.fsdp2.params.param_group import ParamGroup
from disttrain.fsdp2.params.sharding import Sharding
from disttrain.fsdp2.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, TransferPolicy
from disttrain.fsdp2.state import ShardState, set_state, state_of
from disttrain.mesh import DeviceMesh, init_device_mesh
from disttrain.process_group import current_world

Module = TypeVar("Module", bound=nn.Module | list[Any])

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def fully_shard(
    module: Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    transfer_policy: TransferPolicy | None = None,
) -> Module:
    """Shard the module's parameters, and gather them only while it computes.

    Apply it to blocks, then to the root. Each call makes one group: the parameters of the module that no call on a part
    of it has taken. A group is gathered by one all-gather before forward and before backward, and its gradients are
    averaged by one reduce-scatter. The parameters become DTensors, before and after computing; build the optimizer
    after the last call.

    Args:    module                 a module, or a list of modules that run one after the other and make one group: that
                                    is gathered before the first of them and freed after the last.
             mesh                   one axis, whose ranks share the parameters; of two axes, the first one's ranks hold
                                    copies (hybrid sharding). Default: all ranks share. Parameters move to its device,
                                    but those on "meta".
             reshard_after_forward  free what was gathered between forward and backward. A number: keep it on that
                                    many neighbouring ranks in between, so that the second gather is among these.
                                    Default: True, but False for the root, whose backward comes at once.
             shard_placement_fn     says for a parameter which of its dims is cut: Shard(dim); None, the default: dim 0.
                                    Where it is to lie on another mesh, as experts do, an object with `placement` and
                                    `mesh_info.mesh`, such as torch's ShardPlacementResult: those of a mesh are a group.
             mp_policy              dtypes for computing and reducing.
             offload_policy         where shards, gradients and so the optimizer's state are kept between uses.
             ignored_params         parameters to leave as they are.
             transfer_policy        the form of gathers and reductions; values do not depend on it.
    Parameters may be DTensors on other axes of the mesh that `mesh` was sliced from, as of tensor parallelism: what is
    sharded is each rank's part of them. Where such an axis lies within `mesh`, as that of expert parallelism may, they
    are sharded over the other axes, in a group of their own; their gradients, which that parallelism has summed along
    its axis, are divided by all of the mesh's ranks, as others are. Of a module that is compiled already, as by
    `module.compile()`, the forward is compiled alone: gathering and freeing stay outside.
    Returns: the module or list, changed in place; its class now derives from FSDPModule as well.
    Raises:  ShardingError for a module that is sharded already or has no forward of its own, a mesh of more axes, a
             number that does not divide the ranks, a parameter that is a scalar, lies on a mesh of its own, or is
             shared with a part that is sharded already.
    Every rank of the mesh calls it, with equal parameter values; it communicates nothing.
    """
    modules = _topmost(module if isinstance(module, list) else [module])
    together = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    mesh = mesh if mesh is not None else _whole_world(together)
    for each in modules:
        _check(each, mesh, reshard_after_forward)
    policies = (mp_policy, MixedPrecisionPolicy), (offload_policy, OffloadPolicy), (transfer_policy, TransferPolicy)
    for value, kind in policies:
        _check_policy(value, kind)
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    offload = offload_policy if offload_policy is not None else OffloadPolicy()
    device = torch.device("cpu") if mesh.device_type == "cpu" else mesh.world.device
    with arguments_of("fully_shard", mesh.get_rank(), "Give ignored_params as a set of parameters."):
        ignored = set() if ignored_params is None else set(ignored_params)
    _check_placement_fn(shard_placement_fn)
    managed = list(_managed(together, ignored))
    dims, shardings, with_hooks = {}, {}, set()
    for fqn, parameter, owners in managed:
        check_ours("fully_shard", f"parameter {fqn}", parameter)
        check_can_shard(fqn, parameter, device, mesh.get_rank())
        placement, own_mesh = _placement_of(parameter, shard_placement_fn, mesh)
        if own_mesh != mesh:
            _check_mesh(own_mesh, reshard_after_forward)
        sharding = shardings[fqn] = Sharding.beside(own_mesh, parameter, divided_along(owners))
        dims[fqn] = _cut_dim(fqn, parameter, placement, mesh.get_rank(), sharding.dim_to_cut(parameter))
        sharding.spec_of(fqn, parameter, dims[fqn])
        if has_gather_hooks(fqn, parameter, owners, dims[fqn], mesh.get_rank()):
            with_hooks.add(fqn)
    # Parameters that are kept on the host are sharded there, and need not fit onto the device unsharded.
    shard_device = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device
    _move_to(together, device, {parameter: shard_device for _, parameter, _ in managed})
    kinds: dict[tuple[torch.dtype, bool, Sharding], list[ShardedParam]] = {}
    for fqn, parameter, owners in managed:
        param = ShardedParam(owners, fqn, parameter, shardings[fqn], dims[fqn])
        kinds.setdefault((parameter.dtype, fqn in with_hooks, shardings[fqn]), []).append(param)
    groups = [
        (ExtensionGroup if have_hooks else ParamGroup)(params, sharding, policy, offload, device)
        for (_, have_hooks, sharding), params in kinds.items()
    ]
    taken = {(owner.module, owner.name) for _, _, owners in managed for owner in owners}
    left_alone = {(child, name) for child in unmanaged_modules(together) for name, _ in own_parameters(child)} - taken
    transfers = transfer_policy if transfer_policy is not None else TransferPolicy()
    state = ShardState(modules, groups, policy, device, reshard_after_forward, left_alone, transfers)
    for child in unmanaged_modules(together):
        on_cpus(child)
    for each in modules:
        compile_forward_alone(each)
        set_state(each, state)
        keep_parametrizations(each)
        each.__class__ = _sharded_class(cast(Any, type(each)))
    return module


@cache
def _sharded_class(cls: type) -> Any:
    """The class of sharded modules of class `cls`; one for all of them, so that torch.compile compiles it once."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def _whole_world(module: nn.Module) -> DeviceMesh:
    devices = {parameter.device.type for parameter in module.parameters()}
    device_type = (
        "cpu" if devices == {"cpu"} and not torch.cuda.is_available() else current_world("fully_shard").device.type
    )
    return init_device_mesh(device_type, (current_world("fully_shard").world_size,))


def _topmost(modules: list[Any]) -> list[nn.Module]:
    """The modules without those that are part of others."""
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ShardingError(
                "fully_shard",
                f"a {type(module).__name__} is no module.",
                "Give an nn.Module, such as a block of the model, or a list of them.",
            )
    if not modules:
        raise ShardingError("fully_shard", "the list of modules is empty.", "Give one module at least.")
    below = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in dict.fromkeys(modules) if module not in below]


def _check_policy(policy: object, kind: type) -> None:
    if policy is not None and not isinstance(policy, kind):
        raise ShardingError(
            "fully_shard",
            f"a {type(policy).__module__}.{type(policy).__qualname__} is no {kind.__name__} of disttrain.",
            f"Import {type(policy).__name__} from disttrain.fsdp2.",
        )


def _check(module: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool | int | None) -> None:
    name = type(module).__name__
    if not isinstance(mesh, DeviceMesh):
        raise ShardingError(
            "fully_shard",
            f"the mesh is a {type(mesh).__module__}.{type(mesh).__qualname__}.",
            "Make it by disttrain.init_device_mesh.",
        )
    rank = mesh.get_rank()
    if state_of(module) is not None:
        raise ShardingError("fully_shard", f"this {name} is sharded already.", "Call it once per module.", rank=rank)
    if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
        raise ShardingError(
            "fully_shard", f"a {name} has no forward of its own.", "Shard each of its modules instead.", rank=rank
        )
    _check_mesh(mesh, reshard_after_forward)


def _check_mesh(mesh: DeviceMesh, reshard_after_forward: bool | int | None) -> None:
    rank, device_type = mesh.get_rank(), mesh.world.device.type
    if mesh.device_type not in ("cpu", device_type):
        raise ShardingError(
            "fully_shard",
            f"the mesh is one of {mesh.device_type!r}, and this rank computes on {device_type!r}.",
            f"Make it for the device that is there: init_device_mesh({device_type!r}, ...).",
            rank=rank,
        )
    if mesh.ndim > 2:
        raise ShardingError(
            "fully_shard",
            f"the mesh has {mesh.ndim} axes ({mesh.layout}); parameters are cut along one, copied along one before it.",
            "Give one or two axes of it, such as mesh['dp'].",
            rank=rank,
        )
    num_ranks = mesh.shape[-1]
    if type(reshard_after_forward) is int and (reshard_after_forward < 1 or num_ranks % reshard_after_forward):
        raise ShardingError(
            "fully_shard",
            f"reshard_after_forward={reshard_after_forward} does not divide the {num_ranks} ranks that share them.",
            f"Give a divisor of {num_ranks}, such as the number of ranks on one machine, or True or False.",
            rank=rank,
        )


def _check_placement_fn(function: object) -> None:
    if function is not None and not callable(function):
        problem = f"shard_placement_fn is {type(function).__name__}."
        raise ArgumentError("fully_shard", problem, "Give a function of a parameter.")


def _placement_of(
    parameter: nn.Parameter, shard_placement_fn: Callable[[nn.Parameter], Any] | None, mesh: DeviceMesh
) -> tuple[Any, DeviceMesh]:
    """Returns the dim along which a parameter is cut, and the mesh over which."""
    answer: Any = shard_placement_fn(parameter) if shard_placement_fn is not None else None
    own_mesh = getattr(getattr(answer, "mesh_info", None), "mesh", None)
    return (converted(answer.placement), own_mesh) if isinstance(own_mesh, DeviceMesh) else (converted(answer), mesh)


def _cut_dim(fqn: str, parameter: nn.Parameter, placement: Placement | None, rank: int, default: int) -> int:
    if placement is None:
        return default
    if not isinstance(placement, Shard) or not -parameter.ndim <= placement.dim < parameter.ndim:
        raise ShardingError(
            "fully_shard",
            f"shard_placement_fn gave {placement} for parameter {fqn} of shape {tuple(parameter.shape)}.",
            f"Return Shard(dim) with a dim from {-parameter.ndim} to {parameter.ndim - 1}, or None for dim 0.",
            rank=rank,
        )
    dim: int = placement.dim % parameter.ndim
    return dim


def _move_to(module: nn.Module, device: torch.device, places: dict[nn.Parameter, torch.device]) -> None:
    """Move parameters to their places, and others and buffers to `device`; those on "meta" stay."""
    for child in unmanaged_modules(module):
        for tensor in (*(parameter for _, parameter in own_parameters(child)), *child.buffers(recurse=False)):
            target = places.get(cast(nn.Parameter, tensor), device)
            if tensor.device not in (target, torch.device("meta")):
                tensor.data = tensor.data.to(target)


def _managed(module: nn.Module, ignored: set[nn.Parameter]) -> Iterator[tuple[str, nn.Parameter, list[Owner]]]:
    """Parameters that this call takes, each once, with all modules that share it."""
    names = {child: name for name, child in module.named_modules()}
    owners: dict[nn.Parameter, list[Owner]] = {}
    fqns: dict[nn.Parameter, str] = {}
    for child in unmanaged_modules(module):
        for name, parameter in own_parameters(child):
            if parameter not in ignored:
                owners.setdefault(parameter, []).append(Owner(child, name))
                fqns.setdefault(parameter, f"{names[child]}.{name}".lstrip("."))
    for parameter, sharers in owners.items():
        yield fqns[parameter], parameter, sharers
