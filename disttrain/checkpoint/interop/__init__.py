"""Other formats of checkpoints: torch.distributed.checkpoint's folders, Hugging Face's safetensors, torch.save's files.

Each is asked for by name: `load` alone never takes another format's folder for a save of ours. They have no checksums
and, but for a name, no commit, so a damaged or half-written one may load; `convert` makes a save of it that has both.
Reading runs nothing that the files bring along.
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
