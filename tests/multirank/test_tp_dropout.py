"""Dropout on activations that are cut along the sequence draws what a single process draws."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Shard
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import SequenceParallel, parallelize_module
from tests.cases.tensor_parallel import scattered


@pytest.mark.parametrize("as_dtensor", [False, True])
@on_ranks(2, 3)
def test_dropout_of_a_cut_sequence_draws_as_one_process_does(as_dtensor: bool) -> None:
    num_ranks = disttrain.get_world_size()
    mesh = disttrain.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    module = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel())
    whole = torch.ones(2, 6, 8)
    x = scattered(1)(whole, mesh)
    x = DTensor.from_local(x, mesh, [Shard(1)]) if as_dtensor else x
    torch.manual_seed(7)
    found = [module(x) for _ in range(2)]
    torch.manual_seed(7)
    for one in found:
        torch.testing.assert_close(one.full_tensor(), nn.functional.dropout(whole, 0.5))
