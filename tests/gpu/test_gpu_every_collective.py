"""Every collective over NCCL: the cases of all transports, on each rank's own GPU."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain import ReduceOp
from disttrain.errors import BackendError, ShapeError
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.collectives import CASES
from tests.cases.objects import CASES as OBJECT_CASES
from tests.gpu.ranks import NUM_GPU_RANKS

# NCCL neither receives from anybody nor reduces bit by bit.
OF_NCCL = sorted(set(CASES) - {"messages_from_anybody_and_in_batches", "every_reduction", "reductions_of_truth"})

pytestmark = pytest.mark.skipif(NUM_GPU_RANKS < 2, reason="needs two GPUs")


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("case", OF_NCCL)
def test_over_nccl(case: str) -> None:
    with disttrain.current_world().device:
        CASES[case]()


@on_ranks(NUM_GPU_RANKS, backend="nccl")
@pytest.mark.parametrize("case", list(OBJECT_CASES))
def test_objects_over_nccl(case: str) -> None:
    OBJECT_CASES[case]()


@on_ranks(NUM_GPU_RANKS)
def test_a_ring_of_messages_in_one_launch() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    with disttrain.current_world().device:
        received, mine = torch.zeros(3), torch.full((3,), float(rank))
        works = disttrain.batch_isend_irecv(
            [
                disttrain.P2POp(disttrain.isend, mine, (rank + 1) % size),
                disttrain.P2POp(disttrain.irecv, received, (rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()
        assert received.tolist() == [(rank - 1) % size] * 3


@on_ranks(NUM_GPU_RANKS)
def test_what_nccl_lacks_is_said() -> None:
    with disttrain.current_world().device:
        with pytest.raises(ShapeError, match="nccl cannot reduce int32 by BXOR"):
            disttrain.all_reduce(torch.ones(2).int(), ReduceOp.BXOR)
        with pytest.raises(BackendError, match="nccl cannot receive from any source"):
            disttrain.recv(torch.ones(2))
        disttrain.barrier()
