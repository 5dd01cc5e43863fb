"""One parameter: its shard, which optimizer and user hold, and the gathered whole, which the module computes with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from disttrain.dtensor import DTensor, Spec
from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import registered_parameter, swap_parameter
from disttrain.fsdp2.flat import FlatSlot
from disttrain.fsdp2.sharding import Sharding

_SHARDED_AS = "_disttrain_sharded_as"
"""Marks a parameter of which a shard was made: a module that still has it would train a copy of its own."""


@dataclass(frozen=True, eq=False)
class Owner:
    """A module that has the parameter, and under which name. Shared parameters have several."""

    module: nn.Module
    name: str


class ShardedParam:
    """A parameter that is cut along dim `dim`.

    `sharded` is a DTensor whose local part is a view of the group's flat buffer. `unsharded` keeps its identity from
    step to step, since autograd saves views of it: only its storage comes and goes. Where the parameter was a DTensor
    already, of another parallelism, the whole is this rank's part of that, and `unsharded` a DTensor again.
    """

    def __init__(self, owners: list[Owner], fqn: str, parameter: nn.Parameter, sharding: Sharding, dim: int) -> None:
        """`check_can_shard` has been asked about `parameter`."""
        parameter.__dict__[_SHARDED_AS] = fqn
        self.owners = owners
        self.fqn = fqn
        self.dim = dim
        self.orig_dtype = parameter.dtype
        self._whole_spec: Spec | None = getattr(parameter, "_spec", None)
        whole = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
        self.shape = tuple(whole.shape)
        """Of the whole, as the module computes with it on this rank."""
        self._spec = sharding.spec_of(fqn, parameter, dim)
        rows = self._spec.local_shape[dim]
        first_row = min(-(-self.shape[dim] // sharding.num_shards) * sharding.shard_rank, self.shape[dim])
        local = whole.narrow(dim, first_row, rows)
        self.sharded = nn.Parameter(DTensor(local, self._spec), requires_grad=parameter.requires_grad)
        self._shard_view: torch.Tensor | None = None
        self.unsharded: nn.Parameter | None = None
        self._buffer: torch.Tensor | None = None
        self._buffer_bytes = 0
        self.show_sharded()

    def __getstate__(self) -> dict[str, object]:
        """What a deep copy takes over: the shard alone."""
        return {**self.__dict__, "unsharded": None, "_buffer": None, "_shard_view": None}

    @property
    def front_shape(self) -> tuple[int, ...]:
        """The whole's shape with the cut dim in front."""
        return (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :])

    def is_laid_out(self) -> bool:
        """False once something, such as `to_empty` or loading by assignment, has given the parameter other memory."""
        owner = self.owners[0]
        return (
            registered_parameter(owner.module, owner.name) is self.sharded
            and self.sharded._local_tensor is self._shard_view  # type: ignore[attr-defined]
        )

    def adopt_registered(self) -> None:
        """Take over the parameter that the module has now, if it has been replaced, and its dtype."""
        owner = self.owners[0]
        registered = registered_parameter(owner.module, owner.name)
        if registered is not None and registered is not self.sharded:
            self._check_fits(registered)
            self.sharded = registered
            self.show_sharded()
        self._spec = self.sharded._spec  # type: ignore[attr-defined]
        self.orig_dtype = self._spec.dtype

    def _check_fits(self, registered: nn.Parameter) -> None:
        spec: Spec | None = getattr(registered, "_spec", None)
        if spec is None or spec.layout != self._spec.layout or spec.shape != self._spec.shape:
            raise ShardingError(
                "fully_shard",
                f"parameter {self.fqn} has become a {type(registered).__name__} of shape {tuple(registered.shape)}.",
                f"Assign a DTensor of shape {self._spec.shape} that lies as {self._spec.layout}.",
                rank=self._spec.mesh.get_rank(),
            )

    def lay_out(self, view: torch.Tensor) -> None:
        """Make `view`, a part of the flat buffer that holds the local values, the memory of the sharded parameter."""
        self.sharded._local_tensor = view  # type: ignore[attr-defined]
        self._shard_view = view

    def slot_view(self, flat: torch.Tensor, slot: FlatSlot) -> torch.Tensor:
        """This parameter's part of a rank's flat buffer, without padding."""
        rows = self._spec.local_shape[self.dim]
        view = flat.narrow(0, slot.offset, rows * slot.row_numel).view(rows, *slot.shape[1:])
        return view if self.dim == 0 else view.movedim(0, self.dim)

    def make_unsharded(self, slot: FlatSlot, num_shards: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate the whole, with its padding where the first dim is cut, and return its memory, to be written to."""
        if self._buffer is None or self._buffer.dtype != dtype or self._buffer.device != device:
            numel = num_shards * slot.padded_numel if self.dim == 0 else slot.shape[0] * slot.row_numel
            buffer = torch.empty(numel, dtype=dtype, device=device)
            self._buffer_bytes = buffer.untyped_storage().nbytes()
            # `.data` gives each alias a version counter of its own: gathering again must not look like an in-place
            # change to autograd, which holds views of the parameter from the forward pass.
            whole = buffer[: slot.shape[0] * slot.row_numel].view(self.shape).data
            self._buffer = buffer.data.view(num_shards, slot.padded_numel) if self.dim == 0 else buffer.data
            if self._whole_spec is not None:
                spec = self._whole_spec
                whole = DTensor(whole, Spec(spec.layout, spec.shape, spec.stride, dtype))
            self.unsharded = nn.Parameter(whole, requires_grad=self.sharded.requires_grad)
        else:
            self._buffer.untyped_storage().resize_(self._buffer_bytes)
        return self._buffer

    def take_gathered(self, rows: torch.Tensor, slot: FlatSlot) -> None:
        """Write all ranks' `rows` (num_shards, padded elements) of this parameter into its memory."""
        assert self._buffer is not None
        if self.dim == 0:
            self._buffer.copy_(rows)
            return
        front = rows.reshape(-1, *slot.shape[1:]).narrow(0, 0, slot.shape[0])
        self._buffer.view(self.shape).copy_(front.movedim(0, self.dim))

    def rows_of_whole(self, slot: FlatSlot, first: int, count: int) -> torch.Tensor:
        """The rows of shards `first` to `first + count` of the gathered whole, as flat buffers have them."""
        assert self._buffer is not None
        if self.dim == 0:
            return self._buffer.narrow(0, first, count)
        front = self._buffer.view(self.shape).movedim(self.dim, 0)
        start, stop = (min(rank * slot.padded_rows, slot.shape[0]) for rank in (first, first + count))
        rows = front.new_zeros((count * slot.padded_rows, *slot.shape[1:]))
        rows.narrow(0, 0, stop - start).copy_(front.narrow(0, start, stop - start))
        return rows.view(count, slot.padded_numel)

    def free_unsharded(self) -> None:
        """Give back the memory of the whole."""
        if self._buffer is not None:
            self._buffer.untyped_storage().resize_(0)

    def show_unsharded(self) -> None:
        """Let the modules compute with the whole."""
        assert self.unsharded is not None
        if self.unsharded.requires_grad != self.sharded.requires_grad:
            self.unsharded.requires_grad_(self.sharded.requires_grad)
        for owner in self.owners:
            swap_parameter(owner.module, owner.name, self.unsharded)

    def show_sharded(self) -> None:
        """Let the modules, and so the user, see the shard."""
        for owner in self.owners:
            swap_parameter(owner.module, owner.name, self.sharded)

    @property
    def is_trained(self) -> bool:
        """True where the whole has elements, and gradients that are asked for."""
        return self.unsharded is not None and self.unsharded.requires_grad and self.unsharded.numel() > 0

    def drop_grad(self) -> None:
        """Forget the gradient of the whole."""
        if self.unsharded is not None:
            self.unsharded.grad = None

    def whole_grad(self) -> torch.Tensor | None:
        """The gradient of the whole, with the cut dim in front; of a DTensor, this rank's part of it. Collective where
        another parallelism has left it to be summed."""
        if self.unsharded is None or self.unsharded.grad is None:
            return None
        grad = self.unsharded.grad
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=self.unsharded.placements)._local_tensor  # type: ignore[attr-defined]
        return grad if self.dim == 0 else grad.movedim(self.dim, 0).contiguous()

    def accumulate_grad(self, local_grad: torch.Tensor) -> None:
        """Add this rank's part of a reduced gradient to the sharded parameter's."""
        if self.sharded.grad is None:
            self.sharded.grad = DTensor(local_grad, self._spec)
        else:
            self.sharded.grad._local_tensor.add_(local_grad)  # type: ignore[attr-defined]


def check_can_shard(fqn: str, parameter: nn.Parameter, rank: int) -> None:
    """Raise ShardingError for a parameter that `fully_shard` cannot take."""
    if parameter.ndim == 0:
        problem = f"parameter {fqn} is a scalar, which has no dim to shard."
        remedy = "Make it one-dimensional, or leave it out by ignored_params."
    elif _SHARDED_AS in parameter.__dict__:
        other = parameter.__dict__[_SHARDED_AS]
        problem = f"parameter {fqn} is shared with a module that is sharded already, as its {other}."
        remedy = "Leave that part to the call on a module that holds all owners of the parameter."
    else:
        return
    raise ShardingError("fully_shard", problem, remedy, rank=rank)
