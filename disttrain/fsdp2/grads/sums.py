"""Gradients of several microbatches, added up in the dtype of their reduction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from disttrain.fsdp2._torch import call_when_added
from disttrain.fsdp2.params.param import ShardedParam


class GradSums:
    """Adds the gradients of each microbatch, when they come, to sums in the dtype of their reduction.

    A first gradient is read once and written once, in the wider dtype; each further one costs 10 bytes of traffic per
    element of bfloat16 summed in float32, where autograd's own sum in bfloat16 costs 6.
    """

    def __init__(self, params: Sequence[ShardedParam], dtype: torch.dtype) -> None:
        self._params = params
        self._dtype = dtype
        self._watched: dict[ShardedParam, tuple[nn.Parameter, RemovableHandle]] = {}

    def watch(self) -> None:
        """Ask to be told of each gradient of the unsharded parameters that there are now."""
        for param in self._params:
            whole = param.unsharded
            watched = self._watched.get(param)
            if whole is not None and whole.requires_grad and (watched is None or watched[0] is not whole):
                handle = call_when_added(whole, param, partial(ShardedParam.keep_grad, dtype=self._dtype))
                self._watched[param] = (whole, handle)

    def stop(self) -> None:
        """Leave further gradients to autograd."""
        for _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()
