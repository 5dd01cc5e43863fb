"""Unscales gradients, as torch.amp.GradScaler does it: each rank its own parts; all learn whether any value was not
finite.

The step that follows is skipped if one was found, so the ranks tell each other: one number per mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch.call_plan import Wrap
from disttrain.dtensor.dispatch.mixed import is_plain
from disttrain.dtensor.dispatch.whole import values_of
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.rules.parts import largest
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Replicate
from disttrain.dtensor.views.view_copy import count_writes
from disttrain.mesh import DeviceMesh

UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def unscale(wrap: Wrap, op: OpOverload, grads: Sequence[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply `grads`, on any meshes or on none, by `inv_scale`, and set `found_inf` to 1.0 on all ranks of all
    meshes if anything is infinite or nan on any. Collective over the meshes, in the order of their sizes."""
    flag, scale = values_of([found_inf, inv_scale])
    flag = flag.clone()
    # The sum counts: it may be infinite even if all its terms are finite.
    whole = [_reduced(wrap, grad) if _is_partial(grad) else grad for grad in grads]
    op([getattr(grad, "_local_tensor", grad) for grad in whole], flag, scale)
    for grad, unscaled in zip(grads, whole, strict=True):
        if grad is not unscaled:
            torch.ops.aten.copy_(grad, unscaled)
    count_writes(grads)
    for mesh in _meshes(grads):
        flag = largest(flag.reshape(1), mesh, range(mesh.ndim)).reshape(flag.shape)
    _write(wrap, flag, found_inf)


def _write(wrap: Wrap, value: torch.Tensor, scalar: Any) -> None:
    if not is_plain(scalar):
        value = wrap(value, Spec.of(scalar._spec.layout.replicated(), tuple(value.shape), value.dtype))
    torch.ops.aten.copy_(scalar, value)


def _is_partial(grad: Any) -> bool:
    return not is_plain(grad) and grad._spec.layout.has_partial


def _reduced(wrap: Wrap, grad: Any) -> torch.Tensor:
    spec: Spec = grad._spec
    layout = spec.layout.with_placements(
        [Replicate() if placement.is_partial() else placement for placement in spec.placements]
    )
    return wrap(redistribute_local(grad._local_tensor, spec, layout), spec.with_layout(layout))


def _meshes(grads: Sequence[Any]) -> list[DeviceMesh]:
    """The meshes that this rank is on, smaller ones first, so that a finding in one part of a mesh reaches the whole
    mesh."""
    meshes = dict.fromkeys(grad._spec.mesh for grad in grads if not is_plain(grad))
    return sorted((mesh for mesh in meshes if mesh.get_coordinate() is not None), key=lambda mesh: mesh.size())
