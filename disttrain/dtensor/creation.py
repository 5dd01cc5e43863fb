"""DTensors from sizes: `zeros`, `ones`, `full`, `empty`, `rand` and `randn`, under torch.distributed.tensor's names.

Each rank makes its own part. Random values are those of one process with the same seed, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttrain.dtensor._torch import as_one_call
from disttrain.dtensor.draws import draw_part
from disttrain.dtensor.dtensor import DTensor
from disttrain.dtensor.spec.checked_layouts import checked_layout
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Placement
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh

Make = Callable[[Spec, torch.device], torch.Tensor]


@as_one_call
def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of global shape `size` with all elements 0. Default placements: Replicate."""
    return _filled("zeros", size, 0, dtype, device_mesh, placements, requires_grad)


@as_one_call
def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of global shape `size` with all elements 1. Default placements: Replicate."""
    return _filled("ones", size, 1, dtype, device_mesh, placements, requires_grad)


@as_one_call
def full(
    size: Any,
    fill_value: complex,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of global shape `size` with all elements `fill_value`; dtype as `torch.full` chooses it."""
    dtype = torch.full((), fill_value).dtype if dtype is None else dtype
    return _filled("full", (size,), fill_value, dtype, device_mesh, placements, requires_grad)


@as_one_call
def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of global shape `size` whose elements may be anything. Default placements: Replicate."""
    return _made("empty", size, _empty, dtype, device_mesh, placements, requires_grad)


def _empty(spec: Spec, device: torch.device) -> torch.Tensor:
    return torch.empty(spec.local_shape, dtype=spec.dtype, device=device)


@as_one_call
def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Uniform in [0, 1): the values of `torch.rand(size)` in one process, if all ranks have its random state."""
    return _drawn("rand", size, torch.Tensor.uniform_, dtype, device_mesh, placements, requires_grad)


@as_one_call
def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Normal: the values of `torch.randn(size)` in one process, if all ranks have its random state."""
    return _drawn("randn", size, torch.Tensor.normal_, dtype, device_mesh, placements, requires_grad)


def _filled(
    operation: str,
    size: tuple[Any, ...],
    value: complex,
    dtype: torch.dtype | None,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    requires_grad: bool,
) -> DTensor:
    def make(spec: Spec, device: torch.device) -> torch.Tensor:
        return torch.full(spec.local_shape, value, dtype=spec.dtype, device=device)

    return _made(operation, size, make, dtype, mesh, placements, requires_grad)


def _drawn(
    operation: str,
    size: tuple[Any, ...],
    fill: Callable[[torch.Tensor], object],
    dtype: torch.dtype | None,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    requires_grad: bool,
) -> DTensor:
    return _made(
        operation, size, lambda spec, device: draw_part(fill, spec, device), dtype, mesh, placements, requires_grad
    )


def _made(
    operation: str,
    size: tuple[Any, ...],
    make: Make,
    dtype: torch.dtype | None,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    requires_grad: bool,
) -> DTensor:
    shape = _shape(size)
    layout = checked_layout(operation, mesh, placements, len(shape))
    if layout.has_partial:
        raise LayoutError(
            operation,
            f"placements {layout.placements} include Partial, of which new values have no parts.",
            "Use Shard or Replicate, or DTensor.from_local with each rank's part.",
            rank=mesh.get_rank(),
        )
    spec = Spec.of(layout, shape, _dtype(dtype))
    return DTensor(make(spec, mesh.world.device), spec, requires_grad=requires_grad)


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes given one by one, or as one sequence."""
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype
