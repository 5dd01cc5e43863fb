"""The latest cast of an input, for all products that read it: q, k and v of an attention, gate and up of an MLP.

In a graph the operator is traced once for equal arguments. Here is one slot for what is computed eagerly: an input is
known again by being the same object, not written to since. It is held weakly, and its cast until the next one, until
the input is gone, or until a backward comes.
"""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple
from weakref import ref

import torch

from disttrain.kernels._torch import are_plain
from disttrain.kernels.float8.operator import Cast
from disttrain.kernels.recording import current_recording


class CastKey(NamedTuple):
    """An input, and all that its cast depends on."""

    x: ref[torch.Tensor]
    depends_on: tuple[Any, ...]
    wants_columns: bool


class LatestCast:
    """The slot. It is the process's, but no thread is given what another one has computed."""

    def __init__(self) -> None:
        self._entry: tuple[CastKey, Cast] | None = None

    def key_of(
        self, x: torch.Tensor | None, dtype: torch.dtype, by_rows: bool, *, wants_columns: bool
    ) -> CastKey | None:
        """Of a cast of `x`, brought to `dtype` before; None where it can't be told whether `x` is as it was.

        So is what no step has computed: graphs that are replayed write to memory of their own, and torch counts none
        of that. Modes may count on seeing each operator.
        """
        if x is None or x.grad_fn is None or not are_plain([x]):
            return None
        stream = recording = None
        if x.is_cuda:
            # A graph's casts are there in its replays alone, and it computes nothing that was there before it.
            recording = current_recording()
            if recording is None and torch.cuda.is_current_stream_capturing():
                return None
            stream = torch.cuda.current_stream(x.device).cuda_stream
        # What is made in inference mode can't be saved for a backward.
        modes = stream, recording, threading.get_ident(), torch.is_inference_mode_enabled()
        return CastKey(ref(x, self._forget), (x._version, x.data_ptr(), dtype, by_rows, *modes), wants_columns)

    def get(self, key: CastKey) -> Cast | None:
        """The cast of this key, if it is still known."""
        if self._entry is None:
            return None
        latest, cast = self._entry
        is_same = latest.x() is key.x() and latest.depends_on == key.depends_on
        return cast if is_same and (latest.wants_columns or not key.wants_columns) else None

    def put(self, key: CastKey, cast: Cast) -> None:
        """Knows this cast from now on, and no other."""
        self._entry = key, cast

    def clear(self) -> None:
        """Knows none: nobody will ask for it again."""
        self._entry = None

    def _forget(self, x: ref[torch.Tensor]) -> None:
        if self._entry is not None and self._entry[0].x is x:
            self._entry = None


LATEST: Final = LatestCast()
