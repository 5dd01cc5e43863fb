"""Memory for what is received is used again as soon as nobody keeps it, and not before."""

from __future__ import annotations

import torch

from disttrain.pipelining.runtime.buffers import Buffers

CPU = torch.device("cpu")


def test_what_is_free_is_used_again() -> None:
    buffers = Buffers(CPU)
    for _ in range(3):
        first = buffers.take((2, 3), torch.float32)
        second = buffers.take((2, 3), torch.float32)
        assert first.data_ptr() != second.data_ptr()
        del first, second
    assert buffers.num_bytes == 48
    buffers.take((3, 2), torch.float32)
    buffers.take((2, 3), torch.bfloat16)
    assert buffers.num_bytes == 48 + 24 + 12
    buffers.clear()
    assert buffers.num_bytes == 0


def test_what_somebody_keeps_is_not_written_over() -> None:
    buffers = Buffers(CPU)
    whole = buffers.take((4, 2), torch.float32).fill_(1)
    keepers = {
        "view": whole[1:].t(),
        "detached": whole.detach(),
        "graph": (whole.detach().requires_grad_() ** 2).sum(),
        "numpy": whole.numpy(),
        "storage": whole.untyped_storage(),
    }
    address = whole.data_ptr()
    del whole
    while keepers:
        assert buffers.take((4, 2), torch.float32).data_ptr() != address
        keepers.popitem()
    assert buffers.take((4, 2), torch.float32).data_ptr() == address


def test_what_was_made_in_inference_mode_can_be_trained_with() -> None:
    buffers = Buffers(CPU)
    with torch.inference_mode():
        buffers.take((2,), torch.float32)
    leaf = buffers.take((2,), torch.float32).fill_(3).detach().requires_grad_()
    (leaf * leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [6, 6]
    assert buffers.num_bytes == 8


def test_nothing_takes_no_memory() -> None:
    buffers = Buffers(CPU)
    first, second = (buffers.take((0, 3), torch.float32) for _ in range(2))
    assert first.shape == second.shape == (0, 3)
    assert buffers.num_bytes == 0
