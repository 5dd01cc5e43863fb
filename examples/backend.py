"""A transport of one's own in one page: tensors go as bytes through the job's store, and `fully_shard` runs on it.

    disttrain-launch --standalone --nproc-per-node 2 examples/backend.py

An installed package names its transport by an entry point in `disttrain.backends`, and needs no `register_backend`.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

import disttrain
from disttrain import ReduceOp
from disttrain.errors import BackendError
from disttrain.fsdp2 import fully_shard
from disttrain.process_group import Backend, CompletedWork, Membership, register_backend

DONE = CompletedWork()  # nothing here goes on in the background


class PostBackend(Backend):
    """Slow, and easy to understand: for each operation a rank posts its bytes, and reads those of all others."""

    devices = ("cpu",)

    def __init__(self, membership: Membership) -> None:
        self._store, self._rank, self._size = membership.store, membership.rank, membership.size
        self._numbers = itertools.count()
        self._messages = {(way, peer): itertools.count() for way in "<>" for peer in range(self._size)}

    def _posted(self, tensor: torch.Tensor | None) -> list[torch.Tensor]:
        """What each rank has posted, as flat bytes; ranks without anything to say give None."""
        number = next(self._numbers)
        self._store.set(f"{number}/{self._rank}", b"" if tensor is None else bytes(_bytes_of(tensor)))
        read = [self._store.get(f"{number}/{rank}") for rank in range(self._size)]
        # All have come here, so nobody will read what was posted before.
        self._store.delete_key(f"{number - 1}/{self._rank}")
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0) for data in read]

    def _reduced(self, tensor: torch.Tensor, op: object) -> torch.Tensor:
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise BackendError("post", f"it does not reduce by {op}.", "Take SUM or AVG.")
        total = sum(part.view(tensor.dtype).view(tensor.shape) for part in self._posted(tensor))
        return total / self._size if op == ReduceOp.AVG else total

    def all_reduce(self, tensor, op, async_op):
        tensor.copy_(self._reduced(tensor, op))
        return DONE

    def reduce_scatter_tensor(self, output, input, op, async_op):
        output.copy_(self._reduced(input, op).view(self._size, *output.shape)[self._rank])
        return DONE

    def all_gather_into_tensor(self, output, input, async_op):
        torch.cat(self._posted(input), out=_bytes_of(output))
        return DONE

    def broadcast(self, tensor, src_rank, async_op):
        parts = self._posted(tensor if self._rank == src_rank else None)
        _bytes_of(tensor).copy_(parts[src_rank])
        return DONE

    def barrier(self, device):
        self._posted(None)
        return DONE

    def send(self, tensor, dst_rank, tag):
        number = next(self._messages[">", dst_rank])
        self._store.set(f"{self._rank}>{dst_rank}/{tag}/{number}", bytes(_bytes_of(tensor)))
        return DONE

    def recv(self, tensor, src_rank, tag):
        key = f"{src_rank}>{self._rank}/{tag}/{next(self._messages['<', src_rank])}"
        _bytes_of(tensor).copy_(torch.frombuffer(bytearray(self._store.get(key)), dtype=torch.uint8))
        self._store.delete_key(key)
        return DONE

    def shutdown(self, wait_s: float) -> None:
        """The store is the job's, and stays."""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def trained(backend: str) -> list[float]:
    """Losses of a small sharded network whose collectives all go by one transport."""
    disttrain.init_process_group(backend=backend)
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        x = torch.randn(4 * size, 8, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        disttrain.all_reduce(mean := loss.detach(), ReduceOp.AVG)
        losses.append(mean.item())
    if rank == 0:
        print(f"{backend}: losses {[f'{loss:.5f}' for loss in losses]}", flush=True)
    disttrain.destroy_process_group()
    return losses


def main() -> None:
    register_backend("post", PostBackend)
    assert trained("cpu:post") == trained("cpu:gloo")


if __name__ == "__main__":
    main()
