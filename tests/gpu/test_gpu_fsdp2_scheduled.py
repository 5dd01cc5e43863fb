"""Scheduled modules on CUDA streams: whoever is slow, gradients are those of a single process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import disttrain
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, share_comm_ctx
from disttrain.fsdp2.state import state_of
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.fsdp2_scheduled import (
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    Pipeline,
    backward_of,
    own_tokens,
    schedule,
    shard,
    two_stages,
)
from tests.gpu.ranks import NUM_GPU_RANKS

CYCLES = 20_000_000
"""About 10 ms: longer than the host needs for what it queues meanwhile."""

OPTIONS: dict[str, Callable[[], dict[str, object]]] = {
    "one axis": dict,
    "copies": lambda: {"mesh": disttrain.init_device_mesh("cuda", (disttrain.get_world_size(), 1))},
    "host": lambda: {"offload_policy": CPUOffloadPolicy()},
    "cast": lambda: {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float64)},
}


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("who", ["compute", "gathering", "reducing", "replicating"])
@pytest.mark.parametrize("kind", sorted(OPTIONS))
@pytest.mark.parametrize("text", [ONE_F_ONE_B, ZERO_BUBBLE], ids=["1f1b", "zero bubble"])
def test_gradients_equal_those_of_a_single_process(text: str, kind: str, who: str) -> None:
    device = disttrain.current_world().device
    reference = two_stages().to(device)
    stages = [shard(copy.deepcopy(stage), **OPTIONS[kind]()) for stage in reference]
    share_comm_ctx(stages)
    schedule(*stages)
    streams = state_of(stages[0]).comm.streams
    for step in range(2):
        pipeline = Pipeline(stages, own_tokens(step))
        for word in text.split():
            if word.endswith(("0", "UNSHARD", "REDUCE_GRAD")):
                if who == "compute":
                    torch.cuda._sleep(CYCLES)
                else:
                    with getattr(streams, who)():
                        torch.cuda._sleep(CYCLES)
            pipeline.run(word)
        pipeline.finish()
        backward_of(reference, step)
    for stage, whole in zip(stages, reference, strict=True):
        for (name, p), q in zip(stage.named_parameters(), whole.parameters(), strict=True):
            found = p.grad.to(device).full_tensor()
            torch.testing.assert_close(found, q.grad, rtol=1e-3, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}")
