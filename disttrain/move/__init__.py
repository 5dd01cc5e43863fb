"""Moves programs from torch.distributed to disttrain: their imports, and what is said of it to a person.

`python -m disttrain.move PATH` does so with a source tree; [moving over](../moving_over.md) tells the rest. Torch-free.
"""

from __future__ import annotations

from disttrain.move.commands import told_commands
from disttrain.move.findings import Finding
from disttrain.move.source import Moved, move_source

__all__ = ["Finding", "Moved", "move_source", "told_commands"]
