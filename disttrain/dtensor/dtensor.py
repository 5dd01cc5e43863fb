"""DTensor: a tensor whose parts lie on the ranks of a mesh, and which computes as the whole would."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch

from disttrain.dtensor._torch import (
    as_one_call,
    is_traced,
    make_wrapper,
    no_torch_function,
    use_foreach_for,
)
from disttrain.dtensor.dispatch.beneath import catch_all
from disttrain.dtensor.dispatch.dispatch import dispatch
from disttrain.dtensor.dispatch.implicit import replicates_plain
from disttrain.dtensor.dispatch.lone_errors import tell_of
from disttrain.dtensor.foreign import check_ours
from disttrain.dtensor.gradients.settled import AsParameter
from disttrain.dtensor.gradients.zeros import repeated
from disttrain.dtensor.outside import Outside
from disttrain.dtensor.rank_comparison import before_redistribution
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.spec.agreement import agreed_shape, spread_first
from disttrain.dtensor.spec.checked_layouts import checked_layout, gradient_layout, gradient_placements
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.placement import Placement, Placements, Replicate, Shard
from disttrain.dtensor.spec.shard_sizes import contiguous_strides
from disttrain.dtensor.traced import Traced
from disttrain.dtensor.views.calls import up_to_date
from disttrain.dtensor.views.data import data_of
from disttrain.dtensor.views.sequences import has_places, with_places
from disttrain.errors import ArgumentError, BackendError, LayoutError
from disttrain.mesh import DeviceMesh
from disttrain.process_group._torch import dispatches, keep_dynamo_out


@dispatches
class DTensor(Traced, AsParameter, Outside, torch.Tensor):
    """A tensor with a global shape and global values, of which this rank holds the part that its placements define.

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
            return dispatch(_made, func, args, kwargs or _NOTHING)
        except Exception as error:
            check_ours(func.name(), "an operand", *args, *(kwargs or _NOTHING).values())
            tell_of(error, func, (args, kwargs))
            raise

    @staticmethod
    @as_one_call
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The DTensor of which every rank brings its part, whose memory it shares. Differentiable.

        Args: placements       one per mesh axis, default Replicate.
              run_check        compare the parts' shapes and dtypes first, find the whole's shape even if it is cut
                               unevenly, and give all ranks the first one's values along Replicate axes; collective.
              shape, stride    of the whole; without a check needed where parts are not all of one size, else found by
                               multiplying.
              grad_placements  how the gradient of the part is taken from the whole's; default: as the tensor lies,
                               where a partial tensor's gradient is whole on every rank.
        Raises: LayoutError when this rank's part is not of the shape that the whole implies; with a check on all ranks.
        """
        if isinstance(local_tensor, DTensor):
            raise LayoutError("from_local", "a DTensor is given for a part.", "Give its to_local().")
        if not isinstance(local_tensor, torch.Tensor):
            raise ArgumentError("from_local", f"the part is {type(local_tensor).__name__}.", "Give a tensor.")
        if not is_traced():
            check_ours("from_local", "the part", local_tensor)
        layout = checked_layout("from_local", device_mesh, placements, local_tensor.ndim)
        grad_layout = gradient_layout("from_local", layout, grad_placements, local_tensor.ndim)
        if run_check:
            if is_traced():
                raise LayoutError("from_local", "run_check compares ranks, which no graph can.", "Check outside of it.")
            shape = agreed_shape(local_tensor, layout, shape)
            spread_first(local_tensor, layout)
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
        return cast(DTensor, _FromLocal.apply(local_tensor, spec, grad_layout))  # type: ignore[no-untyped-call]

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, as a view: no copy, no communication. Differentiable.

        Of a view across a cut, `x[0]` of a tensor sharded along dim 0, it is this rank's copy: what is written to it
        does not reach `x`, and where `x` has been written to since, ranks fetch it again, which is collective.

        `grad_placements` say how the parts' gradients make up the whole's; default: as the tensor lies, where a partial
        tensor's gradient is whole on every rank.
        """
        if not torch.is_grad_enabled() or not self.requires_grad:
            return up_to_date(self).detach()
        layout = gradient_layout("to_local", self._spec.layout, grad_placements, self.ndim)
        return cast(torch.Tensor, _ToLocal.apply(self, layout))  # type: ignore[no-untyped-call]

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same values laid out by `placements` on the same mesh. Differentiable. Collective over the mesh.

        Values travel as `forward_dtype`, which the result has then, their gradients as `backward_dtype`; default for
        both: the tensor's own, which the gradient has in the end. What comes back can be used at
        once, with `async_op` too.
        """
        layout = checked_layout("redistribute", device_mesh or self.device_mesh, placements, self.ndim)
        before_redistribution(self, layout)
        return cast(DTensor, _Redistribute.apply(self, layout, forward_dtype, backward_dtype))  # type: ignore[no-untyped-call]

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
        """`f"{loss:.3f}"` is the number, as of a plain tensor; with dims it is as `str`. Collective both."""
        return format(self.item() if self.ndim == 0 else str(self), format_spec)

    def __str__(self) -> str:
        """The whole, as `print` shows it. Collective over the mesh; `repr` is not, and shows this rank's part."""
        if self._local_tensor.device.type == "meta" or type(self._local_tensor) is not torch.Tensor:
            return repr(self)  # there is no value: so it is while a compiler traces
        try:
            whole = cast(DTensor, self.detach()).full_tensor()
        except BackendError as error:
            error.add_note("str() of a DTensor is the whole, and collective; print(repr(x)) where one rank prints.")
            raise
        indented = repr(whole).replace("\n", "\n" + " " * len("DTensor("))
        return f"DTensor({indented}, {self._spec.layout})"

    def register_hook(self, hook: Callable[[DTensor], torch.Tensor | None]) -> Any:
        """Call `hook` with the gradient, a DTensor, once it is known; what it returns, if a DTensor, takes its place.

        A plain tensor is refused: it may be a part or the whole. Within `implicit_replication()` it is the whole.
        """

        @functools.wraps(hook)
        def run(grad: DTensor) -> torch.Tensor | None:
            result = hook(grad)
            return result if result is None or isinstance(result, DTensor) else _as_gradient(result, grad)

        return super().register_hook(run)  # type: ignore[no-untyped-call]

    def __copy__(self) -> Self:
        """A new DTensor with the same part."""
        copied = cast(Self, torch.Tensor.requires_grad_(self.detach(), self.requires_grad))
        vars(copied).update({name: value for name, value in vars(self).items() if name not in vars(copied)})
        return copied

    def __getitem__(self, index: Any) -> Any:
        return _getitem(self, with_places(index, self._replicated) if has_places(index) else index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _setitem(self, with_places(index, self._replicated) if has_places(index) else index, value)

    def repeat(self, *sizes: Any, repeats: Any = None) -> torch.Tensor:
        if repeats is None:
            repeats = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        return repeated(self, repeats)

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]  # there it is of the class
        """Of sizes a DTensor, as `new_empty`, which LBFGS asks for; of values a plain tensor, as torch's."""
        sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        if sizes and all(type(size) is int for size in sizes):
            return self.new_empty(sizes, **kwargs)
        return cast(torch.Tensor, super().new(*args, **kwargs))

    def _replicated(self, value: torch.Tensor) -> DTensor:
        """`value`, which all ranks have alike, beside this tensor."""
        return DTensor(value.to(self.device), Spec.of(self._spec.layout.replicated(), tuple(value.shape), value.dtype))

    @property
    def data(self) -> torch.Tensor:  # the stubs have it as an attribute
        """The same memory without autograd's history; assigning a DTensor takes over its part and layout."""
        return data_of(self)

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
        vars(self).pop("_kin", None)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh the tensor lies on."""
        return self._spec.mesh

    @property
    def placements(self) -> Placements:
        """One placement per mesh axis."""
        return self._spec.placements

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DTensor(local={self._local_tensor!r}, shape={tuple(self.shape)}, {self._spec.layout})"


use_foreach_for(DTensor)
catch_all()
_getitem, _setitem = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_NOTHING: dict[str, Any] = {}
_WAYS = ("forward", "backward")


def _made(local: torch.Tensor, spec: Spec) -> DTensor:
    """A DTensor that requires no gradient. As the class does it, but on the shortest way: every operator ends here."""
    tensor: DTensor = make_wrapper(
        DTensor, spec.shape, spec.stride, None, None, local.dtype, torch.strided, local.device
    )
    tensor._local_tensor = local
    tensor._spec = spec
    return tensor


def _as_part(grad: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part of gradient `grad` in layout `layout`; differentiable if gradients are recorded."""
    _check_gradient(grad, layout.mesh)
    assert isinstance(grad, DTensor)
    if torch.is_grad_enabled():
        return grad.redistribute(placements=layout.placements).to_local()
    return redistribute_local(up_to_date(grad), grad._spec, layout)


def _check_gradient(grad: torch.Tensor, mesh: DeviceMesh) -> None:
    if not isinstance(grad, DTensor):
        raise LayoutError(
            "backward",
            f"a plain gradient of shape {tuple(grad.shape)} came for a DTensor.",
            "A function on the way made it; let it return a DTensor: distribute_tensor or DTensor.from_local.",
            rank=mesh.get_rank(),
        )


def _as_gradient(result: torch.Tensor, grad: DTensor) -> DTensor:
    """A plain tensor that a hook returns for `grad`, where all ranks are said to return the same."""
    mesh = grad.device_mesh
    if not replicates_plain(mesh.world):
        raise LayoutError(
            "register_hook",
            f"a hook returns a plain tensor of shape {tuple(result.shape)} for the gradient of a DTensor.",
            "Return a DTensor, made by distribute_tensor or DTensor.from_local, or, where all ranks return the same "
            "whole, call backward() within implicit_replication().",
            rank=mesh.get_rank(),
            where=str(mesh.layout),
        )
    return DTensor.from_local(result, mesh)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec, grad_layout: Layout) -> DTensor:
        ctx.grad_layout = grad_layout
        ctx.set_materialize_grads(False)  # autograd would make plain zeros in place of a missing gradient
        # Code below dispatch ignores the bit that marks a tensor as a conjugate.
        part = local.detach().resolve_conj().resolve_neg()
        return DTensor(part, spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, None, None]:
        return None if grads[0] is None else _as_part(grads[0], ctx.grad_layout), None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_layout: Layout) -> torch.Tensor:
        ctx.spec, ctx.grad_layout = tensor._spec, grad_layout
        return up_to_date(tensor).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[DTensor, None]:
        spec: Spec = ctx.spec
        # The gradient of a sum is one expanded number. Clipping, for example, could not write to that.
        grad = grads[0].contiguous()
        lies_alike = ctx.grad_layout is spec.layout and grad.dtype is spec.dtype and spec.view_copy is None
        grad_spec = spec if lies_alike else Spec(ctx.grad_layout, spec.shape, spec.stride, grad.dtype)
        if not torch.is_grad_enabled():
            return DTensor(grad, grad_spec), None
        layout = ctx.grad_layout.with_placements(gradient_placements(grad_spec.placements))
        return cast(DTensor, _FromLocal.apply(grad, grad_spec, layout)), None  # type: ignore[no-untyped-call]


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, layout: Layout, forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None
    ) -> DTensor:
        spec = ctx.spec = tensor._spec
        ctx.backward_dtype = backward_dtype or spec.dtype
        ctx.set_materialize_grads(False)
        local = up_to_date(tensor)
        if forward_dtype is not None and forward_dtype is not spec.dtype:
            local, spec = local.to(forward_dtype), Spec(spec.layout, spec.shape, spec.stride, forward_dtype)
        if spec.layout is layout and forward_dtype is None:
            return cast(DTensor, tensor.detach())
        part = redistribute_local(local, spec, layout).detach()
        return DTensor(part, spec.with_layout(layout), requires_grad=tensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, None, None, None]:
        if grads[0] is None:
            return None, None, None, None
        spec: Spec = ctx.spec
        layout = spec.layout.with_placements(gradient_placements(spec.placements))
        _check_gradient(grads[0], layout.mesh)
        grad = _Redistribute.apply(grads[0], layout, ctx.backward_dtype, None)  # type: ignore[no-untyped-call]
        return grad if grad.dtype is spec.dtype else grad.to(spec.dtype), None, None, None


keep_dynamo_out(DTensor.__torch_dispatch__, DTensor.full_tensor, DTensor.redistribute, DTensor.to_local)
keep_dynamo_out(*[getattr(crossing, way) for crossing in (_FromLocal, _ToLocal, _Redistribute) for way in _WAYS])
