"""One parameter: its shard, which the optimizer and the user hold, and the gathered parameter, with which the module
computes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import NoReturn, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from disttrain.dtensor import DTensor, Spec
from disttrain.dtensor.local_part import local_part, spec_of
from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import (
    are_same,
    is_functional_call,
    move_hooks,
    parameters_of,
    registered_parameter,
    versions_of,
)
from disttrain.fsdp2.params.flat import FlatSlot
from disttrain.fsdp2.params.sharding import Sharding
from disttrain.mesh import DeviceMesh

_EARLIER_GRAD = attrgetter("_earlier_grad")
_SHARD_OF = "_disttrain_shard_of"
"""Says whose shard a parameter is, by a number."""
_SHARDED_AS = "_disttrain_sharded_as"
"""Marks a parameter that was sharded: a module that still has it would train a copy of its own."""


def is_shard(tensor: object) -> bool:
    """True for the parameter of a sharded module, and for its copies."""
    return _SHARD_OF in getattr(tensor, "__dict__", ())


def is_given(tensors: Sequence[torch.Tensor | None]) -> bool:
    """True for a value that modules have for one call only."""
    return any(each is not None and not isinstance(each, nn.Parameter) for each in tensors) or is_functional_call()


@dataclass(frozen=True, eq=False)
class Owner:
    """A module that has the parameter, and under which name. Shared parameters have several."""

    module: nn.Module
    name: str


class ShardedParam:
    """A parameter that is cut along dim `dim`.

    `sharded` is a DTensor whose local part is a view of the group's flat buffer; `unsharded` is the whole, once it has
    been gathered for the first time. `unsharded_spec` is that of a whole which is a DTensor of another parallelism.
    """

    def __init__(self, owners: list[Owner], fqn: str, parameter: nn.Parameter, sharding: Sharding, dim: int) -> None:
        """`check_can_shard` has been asked about `parameter`."""
        parameter.__dict__[_SHARDED_AS] = fqn
        self.original: weakref.ref[nn.Parameter] | None = weakref.ref(parameter)
        """The parameter that the module had before, while something holds it."""
        self.owners = owners
        self.fqn = fqn
        self.dim = dim
        self.orig_dtype = parameter.dtype
        self.unsharded_spec: Spec | None = getattr(parameter, "_spec", None)
        whole = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
        self.shape = tuple(whole.shape)
        """Of the whole, as the module computes with it on this rank."""
        self.spec = sharding.spec_of(fqn, parameter, dim)
        rows = self.spec.local_shape[dim]
        first_row = min(-(-self.shape[dim] // sharding.num_shards) * sharding.shard_rank, self.shape[dim])
        local = whole.narrow(dim, first_row, rows)
        self.sharded = nn.Parameter(DTensor(local, self.spec), requires_grad=parameter.requires_grad)
        self.sharded.__dict__[_SHARD_OF] = id(self)
        for key in ("divided_along", "beside_divided"):
            if (axis := _said_of(owners, key)) is not None:
                # Optimizers ask for it.
                self.sharded.__dict__[key] = axis
        move_hooks(parameter, self.sharded)
        self._shard_view: torch.Tensor | None = None
        self.unsharded: nn.Parameter | None = None
        self._earlier_grad: torch.Tensor | None = None
        """The sum of unsharded gradients that are still to be reduced, where it has another dtype than they."""
        self.show(self.sharded)

    def __getstate__(self) -> dict[str, object]:
        """The state of a deep copy: the shard alone."""
        return {**self.__dict__, **dict.fromkeys(("original", "unsharded", "_shard_view", "_earlier_grad"))}

    @property
    def front_shape(self) -> tuple[int, ...]:
        """The whole's shape with the cut dim in front."""
        return (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @property
    def num_bytes(self) -> int:
        """Of the whole, as the module computes with it on this rank, in the parameter's own dtype."""
        return math.prod(self.shape) * self.orig_dtype.itemsize

    def is_laid_out(self) -> bool:
        """False once something, such as `to_empty` or loading by assignment, has given the parameter other memory."""
        owner, sharded = self.owners[0], self.sharded
        return registered_parameter(owner.module, owner.name) is sharded and local_part(sharded) is self._shard_view

    def is_as_laid_out(self) -> bool:
        """True while the shard has the dtype and device that it was given by `lay_out`."""
        local, view = local_part(self.sharded), self._shard_view
        return view is None or (local.dtype, local.device) == (view.dtype, view.device)

    def is_in_place(self) -> bool:
        """True while the shard's memory is what it was given by `lay_out`."""
        return local_part(self.sharded) is self._shard_view

    def adopt_registered(self) -> None:
        """Take over the parameter that the modules have now, if it has been replaced, and its dtype."""
        present = [registered_parameter(owner.module, owner.name) for owner in self.owners]
        others = [tensor for tensor in present if tensor is not None and tensor is not self.sharded]
        if any(tensor is None for tensor in present):
            self.refuse_removed()
        if others and not is_given(others):
            for registered in others:
                self._check_fits(registered, is_everywhere=len(others) == len(present))
            self.sharded = others[0]
            self.sharded.__dict__[_SHARD_OF] = id(self)
            self.show(self.sharded)
        spec = spec_of(self.sharded)
        if spec.layout != self.spec.layout or spec.shape != self.spec.shape:
            self._bring_back(spec)
        self.spec = spec_of(self.sharded)
        self.orig_dtype = self.spec.dtype

    def _bring_back(self, spec: Spec) -> None:
        """Restores the layout of the shard, whose `.data` has become a DTensor with another layout. Collective."""
        if spec.shape != self.spec.shape or spec.mesh != self.spec.mesh:
            self._check_fits(self.sharded, is_everywhere=True)
        with torch.inference_mode(False), torch.no_grad():
            data = cast(DTensor, self.sharded.detach())
            self.sharded.data = data.redistribute(placements=self.spec.placements)

    def _check_fits(self, registered: nn.Parameter, *, is_everywhere: bool) -> None:
        spec: Spec | None = getattr(registered, "_spec", None)
        problem, remedy = "", "Tie parameters, and untie them, before fully_shard."
        if spec is None or spec.layout != self.spec.layout or spec.shape != self.spec.shape:
            problem = f"has become a {type(registered).__name__} of shape {tuple(registered.shape)}"
            remedy = f"Assign a DTensor of shape {self.spec.shape} that lies as {self.spec.layout}."
        elif not is_everywhere:
            problem = "has been replaced in one of the modules that share it, and not in all"
        elif registered.__dict__.get(_SHARD_OF, id(self)) != id(self):
            problem = "has been replaced by one that is a sharded module's already"
            remedy = "Tie parameters before fully_shard, or assign a copy."
        if problem:
            raise ShardingError(
                "fully_shard", f"parameter {self.fqn} {problem}.", remedy, rank=self.spec.mesh.get_rank()
            )

    def refuse_removed(self) -> NoReturn:
        """Raise ShardingError: a module does not have the parameter any more."""
        raise ShardingError(
            "fully_shard",
            f"parameter {self.fqn} has been removed from its module.",
            "Remove it before fully_shard, or freeze it.",
            rank=self.spec.mesh.get_rank(),
        )

    def lay_out(self, view: torch.Tensor) -> None:
        """Make `view`, a part of the flat buffer that holds the local values, the memory of the sharded parameter."""
        if self.sharded.device != view.device:
            # The same parameter on the host, where its gradients will be.
            self.sharded.data = DTensor(view, self.spec)
        cast(DTensor, self.sharded)._local_tensor = view
        self._shard_view = view

    def slot_view(self, flat: torch.Tensor, slot: FlatSlot) -> torch.Tensor:
        """This parameter's part of a rank's flat buffer, without padding."""
        shape, strides = self.part_form
        return flat.as_strided(shape, strides, flat.storage_offset() + slot.offset)

    @cached_property
    def part_form(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of this parameter's part of a rank's flat buffer, without padding."""
        rows = self.spec.local_shape[self.dim]
        front = torch.empty((rows, *self.front_shape[1:]), device="meta")
        view = front.movedim(0, self.dim)
        return tuple(view.shape), view.stride()

    def show(self, parameter: nn.Parameter) -> None:
        """Let the modules, and so the user, have this one."""
        for owner in self.owners:
            parameters_of(owner.module)[owner.name] = parameter

    @property
    def is_trained(self) -> bool:
        """True where gradients of the whole are asked for."""
        return self.unsharded is not None and self.unsharded.requires_grad

    @property
    def has_grad(self) -> bool:
        """True when a backward pass has left a gradient of the whole that has not been reduced."""
        whole = self.unsharded
        return whole is not None and (whole.grad is not None or self._earlier_grad is not None)

    def drop_grad(self) -> None:
        """Forget the gradient of the whole."""
        self._earlier_grad = None
        if self.unsharded is not None:
            self.unsharded.grad = None

    def take_grad(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Forget the gradient of the unsharded parameter. Returns it, for `put_grad`."""
        grads = None if self.unsharded is None else self.unsharded.grad, self._earlier_grad
        self.drop_grad()
        return grads

    def put_grad(self, grads: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
        """Have it again."""
        grad, self._earlier_grad = grads
        if self.unsharded is not None:
            self.unsharded.grad = grad

    def unsharded_grad(self) -> torch.Tensor | None:
        """The gradient of the whole, with the cut dim in front; of a DTensor, this rank's part of it. Collective where
        another parallelism has left it to be summed."""
        if self._earlier_grad is None:
            grad = None if self.unsharded is None else self.unsharded.grad
            if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
                grad = self._own_grad()
        else:
            self.keep_grad(self._earlier_grad.dtype)
            grad = self._earlier_grad
        return grad if grad is None or self.dim == 0 else grad.movedim(self.dim, 0).contiguous()

    def keep_grad(self, dtype: torch.dtype) -> None:
        """Adds the gradient, if it has another dtype, to a sum in `dtype`: in a sum with few bits, many small terms
        would be lost."""
        grad = self._own_grad()
        if grad is None or self.unsharded is None or (grad.dtype == dtype and self._earlier_grad is None):
            return
        self._earlier_grad = grad.to(dtype) if self._earlier_grad is None else self._earlier_grad.add_(grad)
        self.unsharded.grad = None

    def _own_grad(self) -> torch.Tensor | None:
        if self.unsharded is None or self.unsharded.grad is None:
            return None
        grad = self.unsharded.grad
        if isinstance(grad, DTensor):
            grad = local_part(grad.redistribute(placements=spec_of(self.unsharded).placements))
        # The gradient of an embedding may be sparse, with other rows on each rank.
        return grad if grad.layout == torch.strided else grad.to_dense()


def have_earlier_grads(params: Sequence[ShardedParam]) -> bool:
    """True where one of them keeps a sum of unsharded gradients in another dtype than they have."""
    return not are_same(map(_EARLIER_GRAD, params), repeat(None))


class LaidOut:
    """Parameters as they have been laid out; asked before each gather."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        owners = [param.owners[0] for param in params]
        self._parameters = [parameters_of(owner.module) for owner in owners]
        self._names = [owner.name for owner in owners]
        self._shards = [param.sharded for param in params]
        self._views = [local_part(shard) for shard in self._shards]

    def holds(self) -> bool:
        """False once one of them is not `is_laid_out` any more."""
        return are_same(map(dict.get, self._parameters, self._names), self._shards) and are_same(
            map(local_part, self._shards), self._views
        )


def divided_along(owners: Sequence[Owner]) -> DeviceMesh | None:
    """The axis whose ranks have other parameters in the place of this one, as of experts that are modules of their own:
    modules say so by an attribute `divided_along`."""
    return _said_of(owners, "divided_along")


def _said_of(owners: Sequence[Owner], key: str) -> DeviceMesh | None:
    return next((axis for owner in owners if (axis := vars(owner.module).get(key)) is not None), None)


def check_can_shard(fqn: str, parameter: nn.Parameter, device: torch.device, rank: int) -> None:
    """Raise ShardingError for a parameter that `fully_shard` cannot take to shards on `device`."""
    if isinstance(parameter, UninitializedParameter):
        problem = f"parameter {fqn} has no shape yet."
        remedy = "Run the module once, or give it its sizes, before fully_shard."
    elif parameter.device not in (device, torch.device("cpu"), torch.device("meta")):
        problem = f"parameter {fqn} is on {parameter.device}, and this rank computes on {device}."
        remedy = (
            f"Make the mesh for it: init_device_mesh({parameter.device.type!r}, ...), or move the model first."
            if parameter.device.type != device.type
            else f"Build the model on 'cpu', 'meta' or {str(device)!r}."
        )
    elif parameter.ndim == 0:
        problem = f"parameter {fqn} is a scalar, which has no dim to shard."
        remedy = "Make it one-dimensional, or leave it out by ignored_params."
    elif _SHARDED_AS in parameter.__dict__:
        other = parameter.__dict__[_SHARDED_AS]
        problem = f"parameter {fqn} is shared with a module that is sharded already, as its {other}."
        remedy = "Leave that part to the call on a module that holds all owners of the parameter."
    else:
        return
    raise ShardingError("fully_shard", problem, remedy, rank=rank)


def versions(params: Sequence[ShardedParam], flat: torch.Tensor | None) -> tuple[int, ...]:
    """Versions that change when the shards are written to, or move to another buffer. A write through a DTensor does
    not count for `flat`, nor the other way round."""
    shards = [param.sharded for param in params]
    return (id(flat), *versions_of(shards if flat is None else [flat, *shards]))
