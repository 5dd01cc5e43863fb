"""clip_grad_norm_ of gradients that lie in every way, also on several meshes at once: as of plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard, distribute_tensor
from disttrain.testing import run_threads
from tests.cases.shardings import laid_out, mesh_of, normal

SHAPES = [(5, 3), (4, 6), (7,), (1, 2), ()]
CLIPPED = [
    *((1.0, True, 0.5), (2.0, True, 0.5), (2.0, False, 0.5), (2.0, None, 0.5)),
    *((3.0, False, 0.5), (float("inf"), True, 0.5), (float("inf"), None, 0.5)),
]
"""The type of norm, whether all gradients are taken at once (None: torch decides), and the largest norm."""

Lay = Callable[[int, torch.Tensor], torch.Tensor]
"""Makes a gradient, given its place in the list and its value."""


def parameters(lay: Lay, *, bad: int | None = None) -> list[nn.Parameter]:
    made = []
    for place, shape in enumerate(SHAPES):
        grad = normal(*shape, seed=place)
        if place == bad:
            grad = grad * float("inf")
        made.append(nn.Parameter(lay(place, torch.zeros_like(grad))))
        made[-1].grad = lay(place, grad)
    return made


def plain(place: int, grad: torch.Tensor) -> torch.Tensor:
    return grad.clone()


def check(lay: Lay) -> None:
    # Whether a norm is too large does not depend on its type.
    for norm_type, foreach, max_norm in (*CLIPPED, (2.0, True, 100.0)):
        expected, found = parameters(plain), parameters(lay)
        total = clip_grad_norm_(expected, max_norm, norm_type, foreach=foreach)
        norm = clip_grad_norm_(found, max_norm, norm_type, foreach=foreach)
        torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, total)
        assert float(norm) == pytest.approx(float(total))
        for one, other in zip(found, expected, strict=True):
            assert one.grad is not None
            grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
            torch.testing.assert_close(grad, other.grad)
    assert float(get_total_norm([])) == 0.0


def check_nonfinite(lay: Lay) -> None:
    for foreach in (True, False):
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(parameters(lay, bad=0), 1.0, error_if_nonfinite=True, foreach=foreach)
        assert not torch.isfinite(torch.tensor(float(clip_grad_norm_(parameters(lay, bad=1), 1.0, foreach=foreach))))


def on(mesh: disttrain.DeviceMesh, *choices: tuple[Placement, ...]) -> Lay:
    """Lay out by the choices in turn; dims that a tensor does not have are not cut."""

    def lay(place: int, grad: torch.Tensor) -> torch.Tensor:
        chosen = choices[place % len(choices)]
        kept = [one if one.cut_dim is None or one.cut_dim < grad.ndim else Replicate() for one in chosen]
        return laid_out(grad, mesh, kept)

    return lay


class _Called(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.name())
        return func(*args, **kwargs or {})


def test_all_are_taken_at_once_where_nobody_says() -> None:
    """torch asks by class: of those that it does not know, it takes one gradient after the other."""

    def body() -> None:
        grads = parameters(on(mesh_of((2,)), (Shard(0),)))
        with _Called() as called:
            clip_grad_norm_(grads, 1.0)
        assert {"aten::_foreach_norm.Scalar", "aten::_foreach_mul_.Tensor"} <= called.names

    run_threads(2, body)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_along_one_axis(num_ranks: int) -> None:
    def body() -> None:
        mesh = mesh_of((num_ranks,))
        for choices in ([(Shard(0),)], [(Replicate(),)], [(Shard(0),), (Shard(1),), (Replicate(),)]):
            check(on(mesh, *choices))
        check_nonfinite(on(mesh, (Shard(0),)))

    run_threads(num_ranks, body)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2), (1, 3), (2, 1)])
def test_along_two_axes(mesh_shape: tuple[int, int]) -> None:
    def body() -> None:
        mesh = mesh_of(mesh_shape)
        check(on(mesh, (Shard(0), Shard(1))))
        check(on(mesh, (Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate()), (Replicate(),) * 2))
        check_nonfinite(on(mesh, (Shard(0), Shard(1))))

    run_threads(mesh_shape[0] * mesh_shape[1], body)


def test_cut_by_two_kinds_of_parallelism() -> None:
    def body() -> None:
        mesh = mesh_of((2, 2))

        def lay(place: int, grad: torch.Tensor) -> torch.Tensor:
            if grad.ndim == 2 and grad.shape[0] % 2 == 0:
                return distribute_tensor(grad, mesh, [StridedShard(0, 2), Shard(0)], src_data_rank=None)
            return distribute_tensor(grad, mesh, src_data_rank=None)

        check(lay)

    run_threads(4, body)


def test_beside_plain_gradients_and_partial_ones() -> None:
    def body() -> None:
        mesh = mesh_of((2, 2))
        sharded = on(mesh, (Shard(0), Shard(1)))
        for first in (0, 1):
            check(lambda place, grad, first=first: (sharded if place % 2 == first else plain)(place, grad))

        def partial(place: int, grad: torch.Tensor) -> torch.Tensor:
            kinds: tuple[Placement, ...] = (Shard(0), Partial()) if grad.any() else (Shard(0), Replicate())
            return on(mesh, kinds)(place, grad)

        check(partial)

    run_threads(4, body)


def test_on_several_meshes_at_once() -> None:
    def body() -> None:
        both = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        across = mesh_of((4,))
        kinds = [
            on(both, (Shard(0), Shard(1))),
            on(both["tp"], (Shard(0),)),
            on(across, (Shard(0),)),
            on(both["dp"], (Replicate(),)),
            plain,
        ]
        for shift in range(len(kinds)):
            check(lambda place, grad, shift=shift: kinds[(place + shift) % len(kinds)](place, grad))
        check_nonfinite(lambda place, grad: kinds[place % len(kinds)](place, grad))

    run_threads(4, body)
