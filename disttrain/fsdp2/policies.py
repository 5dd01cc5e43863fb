"""What the user chooses about precision."""

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
