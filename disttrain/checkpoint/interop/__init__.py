"""Other formats of checkpoints: torch.distributed.checkpoint's folders, Hugging Face's safetensors, torch.save's files.

Each has its own functions: `load` never takes another format's folder for a save of ours. These formats have no
checksums, and no commit besides a rename, so a damaged or incomplete file may load. `convert` makes a save that has
both. Reading never runs code from the files.
"""

from __future__ import annotations

from disttrain.checkpoint.interop.calls import (
    convert,
    load_dcp,
    load_safetensors,
    load_torch,
    save_dcp,
    save_safetensors,
)
from disttrain.checkpoint.interop.names import torch_optimizer_names

__all__ = [
    "convert",
    "load_dcp",
    "load_safetensors",
    "load_torch",
    "save_dcp",
    "save_safetensors",
    "torch_optimizer_names",
]
