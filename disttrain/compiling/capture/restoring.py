"""Restores what torch leaves behind where a recording fails: the current stream, and random numbers.

A step that has the host wait invalidates the recording, and `CUDAGraph.capture_end` then raises before it has ended
what `capture_begin` began: the current stream is the recording's, the generator refuses to give numbers ("Offset
increment outside graph capture"), and no other graph can be recorded into the same pool ("already recording to
mempool_id"), which cannot be mended from Python: take another. Seen with torch 2.11.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored_if_failed() -> Iterator[None]:
    """Within it a graph is recorded."""
    stream = torch.cuda.current_stream()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        _end_recording_of_numbers()
        raise


def _end_recording_of_numbers() -> None:
    """A recording that does not fail ends the generator's, and takes no number."""
    torch.cuda.synchronize()
    number = torch.zeros((), device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        number.add_(1)
