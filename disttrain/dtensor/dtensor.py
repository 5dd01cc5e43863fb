"""DTensor: a tensor whose parts lie on the ranks of a mesh, and which computes as the whole would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch

from disttrain.dtensor._torch import make_wrapper, no_torch_function, use_foreach_for
from disttrain.dtensor.beneath import catch_all
from disttrain.dtensor.dispatch import dispatch
from disttrain.dtensor.layout import Layout, Spec
from disttrain.dtensor.lone_errors import tell_of
from disttrain.dtensor.placement import Partial, Placement, Placements, Replicate, Shard, normalized
from disttrain.dtensor.redistribute import redistribute_local
from disttrain.dtensor.sequences import has_places, with_places
from disttrain.dtensor.shard_sizes import contiguous_strides
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh


class DTensor(torch.Tensor):
    """A distributed tensor: global shape and values, of which this rank holds the part that its placements say.

    Made by `DTensor.from_local`, `distribute_tensor`, or `fully_shard`. `device_mesh` and `placements` say how it lies.
    """

    _local_tensor: torch.Tensor
    _spec: Spec

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, local: torch.Tensor, spec: Spec, *, requires_grad: bool = False) -> Self:
        tensor: Self = make_wrapper(
            cls,
            spec.shape,
            strides=spec.stride,
            dtype=local.dtype,
            layout=local.layout,
            device=local.device,
            requires_grad=requires_grad,
        )
        tensor._local_tensor = local
        tensor._spec = spec
        return tensor

    def __init__(self, local: torch.Tensor, spec: Spec, *, requires_grad: bool = False) -> None:
        """`local` has `spec.local_shape`; it does not require a gradient itself."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs leave out that it is a class method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            # The usual calls are looked up right here; see `dispatch` for what a key is made of.
            num_args = len(args)
            if not kwargs and 0 < num_args < 3:
                spec = getattr(args[0], "_spec", None)
                if spec is not None:
                    if num_args == 1:
                        run = spec.plans.get((func,))
                    else:
                        other = args[1]
                        kind = type(other)
                        if kind is DTensor:
                            run = spec.plans.get((func, other._spec))
                        elif kind is float:
                            run = spec.plans.get((func, float))
                        else:
                            run = None
                    if run is not None:
                        return run(args, _NOTHING)
            return dispatch(_made, func, args, kwargs or {})
        except Exception as error:
            tell_of(error, func, (args, kwargs))
            raise

    # How torch.compile and torch.utils.swap_tensors take a wrapper apart and put it together again.

    def __tensor_flatten__(self) -> tuple[list[str], Spec]:
        return ["_local_tensor"], self._spec.owned()

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], spec: Spec, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> DTensor:
        return DTensor(inner["_local_tensor"], Spec(spec.layout, tuple(outer_size), tuple(outer_stride), spec.dtype))

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement] | None = None,
        *,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
    ) -> DTensor:
        """The DTensor of which every rank brings its part. Differentiable.

        Args: placements  one per mesh axis, default Replicate;  shape, stride  of the whole; needed where the parts are
        not all of one size, else found by multiplying. Raises LayoutError when this rank's part is not of the shape
        that the whole implies.
        """
        layout = _layout("from_local", device_mesh, placements, local_tensor.ndim)
        if shape is None:
            whole = list(local_tensor.shape)
            for axis_size, placement in zip(device_mesh.shape, layout.placements, strict=True):
                if isinstance(placement, Shard):
                    whole[placement.dim] *= axis_size
            shape = whole
        strides = contiguous_strides(shape) if stride is None else tuple(stride)
        spec = Spec(layout, tuple(shape), strides, local_tensor.dtype)
        if spec.local_shape != tuple(local_tensor.shape):
            raise LayoutError(
                "from_local",
                f"this rank brings shape {tuple(local_tensor.shape)}, its part of {spec.shape} is {spec.local_shape}.",
                "Give the shape of the whole; pieces are cut as torch.chunk cuts.",
                rank=device_mesh.get_rank(),
                where=str(device_mesh.layout),
            )
        return cast(DTensor, _FromLocal.apply(local_tensor, spec))  # type: ignore[no-untyped-call]

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, as a view: no copy, no communication. Differentiable.

        Of a view across a cut, `x[0]` of a tensor sharded along dim 0, it is this rank's copy: what is written to it
        does not reach `x`, and where `x` has been written to since, ranks fetch it again, which is collective.

        `grad_placements` say how the parts' gradients make up the whole's; default: as the tensor lies, where a partial
        tensor's gradient is whole on every rank.
        """
        if not torch.is_grad_enabled() or not self.requires_grad:
            return _up_to_date(self).detach()
        wanted = grad_placements if grad_placements is not None else _gradient_placements(self.placements)
        layout = _layout("to_local", self.device_mesh, wanted, self.ndim)
        return cast(torch.Tensor, _ToLocal.apply(self, layout))  # type: ignore[no-untyped-call]

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """The same values laid out by `placements` on the same mesh. Differentiable. Collective over the mesh."""
        layout = _layout("redistribute", device_mesh or self.device_mesh, placements, self.ndim)
        return cast(DTensor, _Redistribute.apply(self, layout))  # type: ignore[no-untyped-call]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole, as a plain tensor on every rank. Differentiable. Collective over the mesh."""
        return self.redistribute(placements=[Replicate()] * self.device_mesh.ndim).to_local(
            grad_placements=grad_placements
        )

    def numpy(self, *, force: bool = False) -> Any:
        """The whole as a numpy array, which shares no memory with this. Collective over the mesh."""
        return self.full_tensor().clone().numpy(force=force)

    def tolist(self) -> Any:
        """The whole as nested lists, or as a number. Collective over the mesh."""
        return self.full_tensor().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __format__(self, format_spec: str) -> str:
        """`f"{loss:.3f}"` is the whole's number, and collective; without a format it is the `repr`, and is not."""
        return format(self.item(), format_spec) if format_spec and self.ndim == 0 else format(repr(self), format_spec)

    def __getitem__(self, index: Any) -> Any:
        return _getitem(self, with_places(index, self._replicated) if has_places(index) else index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _setitem(self, with_places(index, self._replicated) if has_places(index) else index, value)

    def _replicated(self, value: torch.Tensor) -> DTensor:
        """`value`, which all ranks have alike, beside this tensor."""
        layout = self._spec.layout.replicated()
        return DTensor(value.to(self.device), Spec.of(layout, tuple(value.shape), value.dtype))

    @property
    def data(self) -> torch.Tensor:  # the stubs have it as an attribute
        """The same memory without autograd's history; assigning a DTensor takes over its part and layout."""
        return cast(torch.Tensor, torch.Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor):
            raise LayoutError(
                "data",
                f"a plain tensor of shape {tuple(value.shape)} is assigned to a DTensor.",
                "Make it a DTensor with distribute_tensor or DTensor.from_local.",
                rank=self.device_mesh.get_rank(),
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local_tensor, self._spec = value._local_tensor, value._spec

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh the tensor lies on."""
        return self._spec.mesh

    @property
    def placements(self) -> Placements:
        """One placement per mesh axis."""
        return self._spec.placements

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DTensor(local={self._local_tensor}, shape={tuple(self.shape)}, {self._spec.layout})"


use_foreach_for(DTensor)
catch_all()
_getitem, _setitem = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_NOTHING: dict[str, Any] = {}


def _made(local: torch.Tensor, spec: Spec) -> DTensor:
    """A DTensor that requires no gradient. As the class does it, but on the shortest way: every operator ends here."""
    tensor: DTensor = make_wrapper(
        DTensor, spec.shape, spec.stride, None, None, local.dtype, torch.strided, local.device
    )
    tensor._local_tensor = local
    tensor._spec = spec
    return tensor


def _up_to_date(tensor: DTensor) -> torch.Tensor:
    """This rank's part; of a view that had to move, as what it views is now."""
    if tensor._spec.loan is not None:
        tensor._spec.loan.refresh()
    return tensor._local_tensor


def _layout(operation: str, mesh: DeviceMesh, placements: Sequence[Placement] | None, num_dims: int) -> Layout:
    try:
        return Layout(mesh, normalized(placements, mesh.ndim, num_dims))
    except ValueError as error:
        raise LayoutError(operation, f"{error}.", rank=mesh.get_rank(), where=str(mesh.layout)) from None


def _gradient_placements(placements: Placements) -> Placements:
    """How the gradient of a tensor lies: a partial tensor's is whole, since every part counts in full."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


def _as_part(grad: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The part of gradient `grad` that belongs to a tensor of spec `spec`."""
    if not isinstance(grad, DTensor):
        raise LayoutError("backward", "a plain gradient came for a DTensor.", rank=spec.mesh.get_rank())
    wanted = spec.layout.with_placements(_gradient_placements(spec.placements))
    return redistribute_local(grad._local_tensor, grad._spec, wanted)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec) -> DTensor:
        ctx.spec = spec
        # Below dispatch, nobody looks at the bit that says that a tensor stands for its conjugate.
        part = local.detach().resolve_conj().resolve_neg()
        return DTensor(part, spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        return _as_part(grads[0], ctx.spec), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_layout: Layout) -> torch.Tensor:
        ctx.spec = tensor._spec
        ctx.grad_layout = grad_layout
        return _up_to_date(tensor).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[DTensor, None]:
        spec: Spec = ctx.spec
        # The gradient of a sum is one number, expanded: it could not be written to, as clipping does.
        grad = grads[0].contiguous()
        return DTensor(grad, Spec(ctx.grad_layout, spec.shape, spec.stride, grad.dtype)), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, layout: Layout) -> DTensor:
        ctx.spec = tensor._spec
        local = redistribute_local(_up_to_date(tensor), tensor._spec, layout)
        return DTensor(local.detach(), tensor._spec.with_layout(layout), requires_grad=tensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[DTensor, None]:
        spec: Spec = ctx.spec
        layout = spec.layout.with_placements(_gradient_placements(spec.placements))
        return DTensor(_as_part(grads[0], spec), Spec(layout, spec.shape, spec.stride, grads[0].dtype)), None
