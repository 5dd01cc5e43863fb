"""A library has initialised torch.distributed, and the script that uses it asks disttrain."""

from __future__ import annotations

import torch
import torch.distributed as dist

import disttrain
from disttrain.testing.pytest_plugin import on_ranks


@on_ranks(2)
def test_a_job_that_a_library_has_initialised_needs_no_word() -> None:
    """As `accelerate.Accelerator()` does in a script of which the rest has moved over."""
    world = disttrain.current_world()
    rank, size = world.rank, world.world_size
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port[0] = server.port
    disttrain.all_reduce(port)
    disttrain.destroy_process_group()
    torch_store = dist.TCPStore("127.0.0.1", int(port.item()), is_master=False, wait_for_workers=False)
    for name in ("asked", "ended"):
        assert not disttrain.is_initialized()
        dist.init_process_group("gloo", store=dist.PrefixStore(name, torch_store), rank=rank, world_size=size)
        assert disttrain.is_initialized()
        # One rank alone may ask.
        if rank == 0:
            assert (disttrain.get_rank(), disttrain.get_world_size()) == (0, size)
        if name == "asked":
            tensor = torch.tensor([rank + 1.0])
            disttrain.all_reduce(tensor)
            assert tensor.item() == 3
            assert disttrain.init_device_mesh("cpu", (2,)).size() == 2
            disttrain.destroy_process_group()
            dist.barrier()
            dist.destroy_process_group()
        else:
            disttrain.destroy_process_group()
            assert not dist.is_initialized()
    if rank == 0:
        del server
