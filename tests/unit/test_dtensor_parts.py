"""from_local and to_local: memory, shapes that ranks agree on, gradients as they are said to lie."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain.dtensor import CommDebugMode, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.errors import LayoutError
from disttrain.testing import run_threads
from tests.cases.shardings import collectives_of, mesh_of, normal

X = normal(5, 3)


def test_parts_share_memory_both_ways() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        part = torch.zeros(2, 3)
        tensor = DTensor.from_local(part, mesh, [Shard(0)])
        assert tuple(tensor.shape) == (4, 3)
        tensor.add_(1)
        part.add_(1)
        tensor.to_local().add_(1)
        assert part.eq(3).all()
        assert collectives_of(lambda: DTensor.from_local(part, mesh, [Shard(0)]).to_local()) == []
        with pytest.raises(LayoutError, match="a DTensor is given for a part"):
            DTensor.from_local(tensor, mesh, [Shard(0)])

    run_threads(2, body)


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2), (1, 3)])
def test_a_check_finds_the_shape_of_uneven_parts(mesh_shape: tuple[int, ...]) -> None:
    def body() -> None:
        mesh = mesh_of(mesh_shape)
        layouts: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()]]
        if mesh.ndim == 2:
            layouts = [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Partial()]]
        for size in (5, 1):
            for placements in layouts:
                whole = distribute_tensor(X[:size], mesh, src_data_rank=None).redistribute(placements=placements)
                made = DTensor.from_local(whole.to_local(), mesh, placements, run_check=True)
                assert tuple(made.shape) == (size, 3)
                torch.testing.assert_close(made.full_tensor(), X[:size])

    run_threads(torch.Size(mesh_shape).numel(), body)


def test_a_check_gives_all_ranks_the_first_ones_copy() -> None:
    def body() -> None:
        mesh = mesh_of((2, 2))
        rank = disttrain.get_rank()
        local = torch.full((3, 2), float(rank)).t()
        made = DTensor.from_local(local, mesh, [Replicate(), Shard(1)], run_check=True)
        assert made.full_tensor().tolist() == [[0.0] * 3 + [1.0] * 3] * 2
        # The memory is still the caller's.
        assert local.eq(rank % 2).all()

    run_threads(4, body)


def test_what_does_not_fit_together_is_refused_on_all_ranks() -> None:
    def body() -> None:
        mesh = mesh_of((3,))
        rank = disttrain.get_rank()

        def refuses(
            message: str, local: torch.Tensor, placement: Placement, shape: tuple[int, ...] | None = None
        ) -> None:
            with pytest.raises(LayoutError, match=message):
                DTensor.from_local(local, mesh, [placement], run_check=True, shape=shape)

        def ones(*sizes: int) -> torch.Tensor:
            """As many rows as are given for this rank."""
            return torch.ones(sizes[rank], 2)

        refuses(
            r"rank 1 brings shape \(1, 2\), where .* want \(2, 2\) as its part of \(5, 2\)", ones(2, 1, 2), Shard(0)
        )
        refuses(r"rank 2 brings shape \(3, 2\), where .* want \(2, 2\)", ones(2, 2, 3), Replicate())
        refuses("rank 2 brings torch.float64 of", ones(2, 2, 2).to([torch.float32, torch.float64][rank // 2]), Shard(0))
        refuses(r"rank 2 brings .* of a whole of shape \(7, 2\)", ones(2, 2, 2), Shard(0), (6 + rank // 2, 2))
        refuses(
            r"rank 1 brings torch.float32 of shape \(2,\)", ones(2, 2, 2)[0] if rank == 1 else ones(2, 2, 2), Shard(0)
        )

    run_threads(3, body)


def test_gradients_lie_as_they_are_said_to() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        rank = disttrain.get_rank()
        weight = distribute_tensor(normal(2, 3, seed=1), mesh, [Shard(0)], src_data_rank=None)
        # (placement, grad_placements): how the gradient of the part is taken from the whole's, which is all `weight`.
        for placement, wanted, expected in (
            (Shard(0), None, weight.to_local()),
            (Replicate(), None, normal(2, 3, seed=1)),
            (Partial(), None, normal(2, 3, seed=1)),
            (Replicate(), [Partial()], None),
        ):
            local = torch.ones((1, 3) if placement == Shard(0) else (2, 3), dtype=X.dtype, requires_grad=True)
            tensor = DTensor.from_local(local, mesh, [placement], grad_placements=wanted)
            loss = (tensor * weight).sum()
            loss.backward()
            assert local.grad is not None
            if expected is not None:
                torch.testing.assert_close(local.grad, expected)
                continue
            total = local.grad.clone()
            disttrain.all_reduce(total)
            torch.testing.assert_close(total, normal(2, 3, seed=1))
        whole = distribute_tensor(X, mesh, src_data_rank=None).requires_grad_()
        for wanted, factor in (
            (None, [1.0, 2.0][rank]),
            ([Partial()], 3.0),
            ([Partial("avg")], 1.5),
            ([Partial("max")], 2),
        ):
            whole.grad = None
            (whole.to_local(grad_placements=wanted).sum() * (rank + 1)).backward()
            assert isinstance(whole.grad, DTensor)
            gradient = whole.grad.to_local() if wanted is None else whole.grad.full_tensor()
            assert gradient.eq(factor).all()
        whole.grad = None
        (whole.full_tensor(grad_placements=[Partial()]).sum() * (rank + 1)).backward()
        assert whole.grad.full_tensor().eq(3).all()

    run_threads(2, body)


def test_gradients_are_cut_as_their_tensor_is() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        local = torch.ones(2, 2, requires_grad=True)
        tensor = DTensor.from_local(local, mesh, [Shard(0)])
        for wanted in (Replicate(), Shard(1), Partial()):
            with pytest.raises(LayoutError, match=r"grad_placements .* cut other dims than .*Shard\(0\)"):
                tensor.to_local(grad_placements=[wanted])
            with pytest.raises(LayoutError, match=r"from_local: grad_placements .* cut other dims"):
                DTensor.from_local(local, mesh, [Shard(0)], grad_placements=[wanted])

    run_threads(2, body)


def test_values_and_gradients_travel_in_the_dtypes_that_are_asked_for() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        x = distribute_tensor(X.float(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        for forward_dtype, backward_dtype in (
            (None, None),
            (torch.bfloat16, None),
            (None, torch.bfloat16),
            (torch.float64, torch.float16),
        ):
            x.grad = None
            sizes: list[int] = []
            with CommDebugMode() as comms:
                whole = x.redistribute(
                    placements=[Replicate()], forward_dtype=forward_dtype, backward_dtype=backward_dtype
                )
                sizes.append(comms.get_total_bytes())
                part = DTensor.from_local(torch.ones_like(whole.to_local()), mesh, [Partial()])
                whole.backward(part)
                sizes.append(comms.get_total_bytes() - sizes[0])
            assert whole.dtype == (forward_dtype or torch.float32)
            torch.testing.assert_close(whole.full_tensor(), X.float().to(whole.dtype))
            assert x.grad is not None
            assert x.grad.dtype == torch.float32
            assert x.grad.full_tensor().eq(2).all()
            # Three rows of three, padded to four rows where halves are kept.
            assert sizes == [9 * whole.dtype.itemsize, 18 * (backward_dtype or torch.float32).itemsize]

    run_threads(2, body)
