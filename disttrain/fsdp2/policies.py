"""Policies of the user: precision, and where shards are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from disttrain.errors import ShardingError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computing and communicating; the sharded parameters keep their own.

    `param_dtype`: of the gathered parameters and so of forward and backward. `reduce_dtype`: in which gradients are
    reduced. `output_dtype`: to which a module's floating-point outputs are cast. None: leave as it is.
    `cast_forward_inputs`: cast a module's floating-point inputs to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class TransferPolicy:
    """Policy of transfers over the wire. None: as is best for the ranks' hosts and the network between them, which the
    first forward measures.

    `form`: "in_place" brings each parameter where it is used, by a collective of its own in one launch; "flat" all as
    one message, which is copied to where it is used; "mixed" what is large in place, and the rest as one message.
    `together`: how many modules that run one after the other are gathered, and reduced, as one message; 1: each by
    itself. Each is freed by itself. `reduces_apart`: reductions have a communicator of their own, and wait for no
    gather. Values and gradients are the same.
    """

    form: Literal["flat", "in_place", "mixed"] | None = None
    together: int | None = None
    reduces_apart: bool | None = None

    def __post_init__(self) -> None:
        if self.form not in (None, "flat", "in_place", "mixed"):
            raise ShardingError(
                "TransferPolicy", f"there is no form {self.form!r}.", 'Give "flat", "in_place" or "mixed".'
            )
        if self.together is not None and self.together < 1:
            raise ShardingError(
                "TransferPolicy", f"together={self.together} is no number of modules.", "Give 1 or more."
            )


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards and their gradients stay on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and their gradients, and so the optimizer's state, are kept in the host's memory.

    `pin_memory`: in pages that stay where they are, so that copies run beside the computation.
    """

    pin_memory: bool = True
