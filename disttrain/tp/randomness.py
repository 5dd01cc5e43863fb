"""Random numbers of a rank's own, for dropout on activations that are cut.

Megatron-LM (arXiv 1909.08053) keeps a second state of the generator beside the common one. Here it is made anew from
the common one each time: nothing has to be kept beside torch's state, which activation checkpointing sets back itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from disttrain.mesh import DeviceMesh
from disttrain.tp.layers.axis import Axis

_NUM_SEEDS = 1 << 62


@contextmanager
def own_randomness(mesh: DeviceMesh) -> Iterator[None]:
    """Within it each rank of the mesh's one axis draws random numbers of its own, on the CPU and on the mesh's device.

        with own_randomness(mesh["tp"]):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)  # on this rank's heads

    Each entry takes one number from torch's generator of the CPU, whose state must be the same along the axis; with the
    rank's place it is the seed of what is drawn within. So all follows from the common seed; what is drawn outside
    depends neither on what is drawn within nor on how many ranks there are; and what activation checkpointing computes
    again draws the same. For plain tensors: DTensors draw as a single process does, by a state that all ranks share.
    A graph of torch.compile may be called within, and breaks where it would enter.

    Raises: MeshError when `mesh` is no mesh, or has several axes. No communication.
    """
    axis = Axis.of("own_randomness", mesh)
    seed = int(torch.randint(_NUM_SEEDS, (), device="cpu")) + axis.rank
    device_type = axis.mesh.device_type
    if device_type == "cpu":
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            yield
        return
    device = torch.get_device_module(device_type)
    with torch.random.fork_rng(devices=[device.current_device()], device_type=device_type):
        torch.default_generator.manual_seed(seed)
        device.manual_seed(seed)
        yield
