"""What the user chooses about precision and about where shards are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
class OffloadPolicy:
    """Shards and their gradients stay on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and their gradients, and so the optimizer's state, are kept in the host's memory.

    `pin_memory`: in pages that stay where they are, so that copies run beside the computation.
    """

    pin_memory: bool = True
