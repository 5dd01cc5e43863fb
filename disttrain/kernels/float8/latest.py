"""The latest cast of an input, for all products that read it: q, k and v of an attention, gate and up of an MLP.

In a graph the operator is traced once for equal arguments. Here is one slot for what is computed eagerly: an input is
known again by being the same object, not written to since. It is held weakly, and its cast until the next one, until
the input is gone, or until a backward comes.

torch counts no write to `x.data`, which changes the values alone. So the first inputs have digests: where one is used
again with other values, no cast of the process is used for a second product from then on. Who writes so does it in each
step, as a rule; a digest costs a launch, and to compare two has the host wait for the device.
"""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple
from weakref import ref

import torch

from disttrain.kernels._torch import are_plain
from disttrain.kernels.float8.operator import Cast
from disttrain.kernels.recording import current_recording

_NUM_WITH_DIGESTS: Final = 256
"""Inputs: those of the first steps of a model with some dozens of layers."""


class CastKey(NamedTuple):
    """An input, and all that its cast depends on."""

    x: ref[torch.Tensor]
    depends_on: tuple[Any, ...]
    wants_columns: bool

    @property
    def may_wait(self) -> bool:
        """True where the host may wait for the device: no graph is being recorded."""
        return self.depends_on[-3] is None


class LatestCast:
    """The slot. It is the process's, but no thread is given what another one has computed."""

    def __init__(self) -> None:
        self._entry: tuple[CastKey, Cast] | None = None
        self._digest: torch.Tensor | None = None
        """Of the input as it was cast, where it is one of the first."""
        self._num_digests = 0
        self._is_trusted = True
        """False once an input has had other values without a trace."""

    def key_of(
        self, x: torch.Tensor | None, dtype: torch.dtype, by_rows: bool, *, wants_columns: bool
    ) -> CastKey | None:
        """Of a cast of `x`, brought to `dtype` before; None where it can't be told whether `x` is as it was.

        So is what no step has computed: graphs that are replayed write to memory of their own, and torch counts none
        of that. Modes may count on seeing each operator.
        """
        if x is None or x.grad_fn is None or not self._is_trusted or not are_plain([x]):
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
        if not is_same or (key.wants_columns and not latest.wants_columns):
            return None
        x, digest = key.x(), self._digest
        if x is not None and digest is not None and not torch.equal(_digest(x), digest):
            self._is_trusted = False
            self.clear()
            return None
        return cast

    def put(self, key: CastKey, cast: Cast) -> None:
        """Knows this cast from now on, and no other."""
        if not self._is_trusted:
            return
        x, is_first = key.x(), self._num_digests < _NUM_WITH_DIGESTS and key.may_wait
        self._num_digests += is_first
        self._entry, self._digest = (key, cast), _digest(x) if is_first and x is not None else None

    def clear(self) -> None:
        """Knows none: nobody will ask for it again."""
        self._entry = self._digest = None

    def _forget(self, x: ref[torch.Tensor]) -> None:
        if self._entry is not None and self._entry[0].x is x:
            self.clear()


def _digest(x: torch.Tensor) -> torch.Tensor:
    """Sums of the bits as integers, of all and at a stride, so that positions count too. Nothing is cast, since that
    would take the memory of a copy."""
    with torch.no_grad():
        bits = x.detach().reshape(-1).view(_AS_INTEGERS[x.element_size()])
        return torch.stack([bits[::step].sum() for step in (1, 2, 3)])


_AS_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LATEST: Final = LatestCast()
