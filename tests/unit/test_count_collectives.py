"""What is handed to transports: counted by operation and by the layer that asks; as few as there can be."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard
from disttrain.fsdp2 import fully_shard
from disttrain.kernels.optimizers.total_norm import total_norm
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.tp import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.cases.shardings import laid_out, mesh_of, normal

WAYS: list[tuple[Placement, ...]] = [(Shard(0),), (Shard(1),), (Replicate(),)]


def test_a_list_is_one_launch_of_many_operations() -> None:
    def body() -> None:
        inputs = [torch.ones(3), torch.ones(2, 2)]
        outputs = [tensor.new_empty(2 * tensor.numel()) for tensor in inputs]
        with disttrain.count_collectives() as counted:
            disttrain.all_gather_into_tensor_coalesced([o.view(2, -1) for o in outputs], [i.view(-1) for i in inputs])
            with disttrain.coalescing_manager():
                for _ in range(3):
                    disttrain.all_reduce(inputs[0])
            disttrain.all_reduce(inputs[0])
        found = {key: (one.launches, one.operations, one.num_bytes) for key, one in counted.counts.items()}
        assert found == {
            ("other", "all_gather_into_tensor_coalesced"): (1, 2, 28),
            ("other", "all_reduce"): (2, 4, 48),
        }
        assert (counted.total.launches, counted.total.operations, counted.total.num_bytes) == (3, 6, 76)
        assert str(counted).splitlines() == [
            "layer  operation                         launches  operations  bytes",
            "other  all_gather_into_tensor_coalesced         1           2     28",
            "other  all_reduce                               2           4     48",
            "all                                             3           6     76",
        ]
        disttrain.all_reduce(inputs[0])
        assert counted.total.operations == 6
        with counted:
            pass
        assert counted.total.operations == 0

    run_threads(2, body)


def test_layers_are_told_apart() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        with disttrain.count_collectives() as counted:
            out = model(torch.ones(2, 4, requires_grad=True))
            out.sum().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            DTensor.from_local(torch.ones(2), mesh["dp"], [Partial()]).full_tensor()
        layers = {layer: counted.of(layer).operations for layer, _ in counted.counts}
        assert layers.pop("fully_shard") == 2
        assert layers.pop("tensor parallel") == 2
        assert layers.pop("dtensor") == 1
        assert set(layers) == {"norms"}

    run_threads(4, body)


def gradients(mesh: DeviceMesh) -> list[nn.Parameter]:
    """A few for each way in which they lie."""
    made = []
    for place in range(9):
        way = WAYS[place % len(WAYS)]
        made.append(nn.Parameter(laid_out(torch.zeros(4, 6, dtype=torch.float64), mesh, way)))
        made[-1].grad = laid_out(normal(4, 6, seed=place), mesh, way)
    return made


@pytest.mark.parametrize("order", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_that_lie_in_several_ways_are_clipped_by_one_reduction(order: float, foreach: bool) -> None:
    def body() -> None:
        made = gradients(mesh_of((2,)))
        with disttrain.count_collectives() as counted:
            # A look at the norm costs no more.
            norm = float(clip_grad_norm_(made, 1.0, order, foreach=foreach))
        whole = torch.stack([normal(4, 6, seed=place) for place in range(9)])
        assert norm == pytest.approx(torch.linalg.vector_norm(whole, order).item())
        assert counted.total.operations == counted.of("norms").operations == 1

    run_threads(2, body)


def test_an_optimizers_total_norm_is_one_reduction() -> None:
    # Computed before: norms are counted in all threads.
    expected = torch.linalg.vector_norm(torch.stack([normal(4, 6, seed=index) for index in range(9)])).item()

    def body() -> None:
        grads = [one.grad for one in gradients(mesh_of((2,))) if one.grad is not None]
        alone = patch.object(torch.linalg, "vector_norm", wraps=torch.linalg.vector_norm)
        with alone as norms, disttrain.count_collectives() as counted:
            norm = total_norm(grads).item()
        # Of all gradients in one launch; then of their norms, on each of two ranks.
        assert norms.call_count <= 4
        assert norm == pytest.approx(expected)
        assert counted.of("norms").operations == counted.total.operations == 1

    run_threads(2, body)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_small_partial_tensors_of_one_call_are_reduced_together(num_ranks: int) -> None:
    def body() -> None:
        mesh = mesh_of((num_ranks,))
        wholes = [normal(*shape, seed=place) for place, shape in enumerate([(5, 3), (7,), (), (0, 4), (2, 2)])]
        for kind in (Partial(), Partial("avg")):
            params = [laid_out(torch.zeros_like(whole), mesh, [Replicate()]) for whole in wholes]
            grads = [laid_out(whole, mesh, [kind]) for whole in wholes]
            with disttrain.count_collectives() as counted:
                torch._foreach_add_(params, grads, alpha=2.0)
            assert counted.total.operations == 1, kind
            for param, whole in zip(params, wholes, strict=True):
                torch.testing.assert_close(param.full_tensor(), 2.0 * whole)  # type: ignore[attr-defined]

    run_threads(num_ranks, body)


def test_large_partial_tensors_go_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttrain.dtensor.redistribute.many.MAX_TOGETHER_BYTES", 50)

    def body() -> None:
        mesh = mesh_of((2,))
        wholes = [normal(size, seed=size) for size in (4, 40, 6, 50)]
        params = [laid_out(torch.zeros_like(whole), mesh, [Replicate()]) for whole in wholes]
        with disttrain.count_collectives() as counted:
            torch._foreach_add_(params, [laid_out(whole, mesh, [Partial()]) for whole in wholes])
        assert counted.total.operations == 3
        for param, whole in zip(params, wholes, strict=True):
            torch.testing.assert_close(param.full_tensor(), whole)  # type: ignore[attr-defined]

    run_threads(2, body)
