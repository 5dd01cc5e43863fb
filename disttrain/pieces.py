"""Cuts a size into pieces as `torch.chunk` does: all of ceil(size / num_pieces), the last ones shorter or empty.
Torch-free."""

from __future__ import annotations


def piece(size: int, num_pieces: int, position: int) -> tuple[int, int]:
    """(size, offset) of the piece at `position` when `size` elements are cut into `num_pieces`."""
    step = piece_size(size, num_pieces)
    if step * num_pieces == size:
        return step, position * step
    offset = min(position * step, size)
    return min(step, size - offset), offset


def piece_size(size: int, num_pieces: int) -> int:
    """The size of the first, largest piece."""
    # Where sizes are symbols, a compiler can work with what divides evenly.
    return size // num_pieces if size % num_pieces == 0 else -(-size // num_pieces)
