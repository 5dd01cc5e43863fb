"""Which judges this torch has."""

from __future__ import annotations

import torch

# They stand on private parts of torch 2.13.
collect_ignore = (
    []
    if torch.__version__ >= "2.13"
    else ["test_context_parallel_of_torch.py", "test_dtensor_ops.py", "test_dtensor_rules.py"]
)
