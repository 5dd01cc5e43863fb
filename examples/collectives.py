"""Collectives in one page: on tensors, on lists, on Python values, in the background, and with gradients.

disttrain-launch --standalone --nproc-per-node 4 examples/collectives.py
"""

from __future__ import annotations

import torch

import disttrain
from disttrain import ReduceOp
from disttrain.process_group import functional


def say(text: object) -> None:
    if disttrain.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    disttrain.init_process_group()
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    device = disttrain.current_world().device  # Gloo or NCCL is chosen by each tensor's device

    total = torch.full((3,), float(rank), device=device)
    disttrain.all_reduce(total)
    say(f"the sum of all ranks: {total.tolist()}")

    largest = torch.tensor([rank, -rank], device=device)
    disttrain.all_reduce(largest, ReduceOp.MAX)
    say(f"the largest of each: {largest.tolist()}")

    gathered = torch.empty(size, 2, device=device)
    disttrain.all_gather_into_tensor(gathered, torch.tensor([float(rank), rank**2], device=device))
    say(f"a row of each rank: {gathered.tolist()}")

    part = torch.empty(1, device=device)
    disttrain.reduce_scatter_tensor(part, torch.arange(float(size), device=device))
    say(f"each rank's part of the sum; rank 0 has {part.tolist()}")

    got = torch.empty(size, dtype=torch.int64, device=device)
    disttrain.all_to_all_single(got, torch.arange(size, device=device) + 10 * rank)
    say(f"one number to each rank, one from each: {got.tolist()}")

    facts: list[object] = [None] * size
    disttrain.all_gather_object(facts, {"rank": rank, "squares": [rank, rank**2]})  # as msgpack, never as pickles
    say(f"Python values: {facts[-1]}")

    if size > 1:  # no rank sends to itself
        # Messages go around a ring while this rank computes.
        received = torch.empty(1, device=device)
        sending = disttrain.isend(torch.tensor([float(rank)], device=device), (rank + 1) % size)
        receiving = disttrain.irecv(received, (rank - 1) % size)
        product = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        for work in (sending, receiving):
            work.wait()
        say(f"from the rank before: {received.item():.0f}, and meanwhile a product: {product[0, 0].item():.0f}")

    # The functional ones have gradients: that of a sum is the sum of the gradients.
    x = torch.tensor([1.0 + rank], device=device, requires_grad=True)
    y = functional.all_reduce(x, "sum")
    (y**2).sum().backward()
    say(f"with gradients: y = {y.item():.0f}, dy²/dx = {x.grad.item():.0f}")

    half = disttrain.new_group(list(range(max(1, size // 2))))
    if half is not disttrain.NON_GROUP_MEMBER:
        few = torch.ones((), device=device)
        disttrain.all_reduce(few, group=half)
        say(f"in a group of {half.group_size}: {few.item():.0f}")
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
