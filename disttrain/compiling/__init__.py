"""Fewer launches: torch.compile for models made of repeated blocks, and a whole step as one CUDA graph.

from disttrain.compiling import compile_blocks

print(compile_blocks(model))    # what was found; the first step compiles it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.compiling.blocks import CompiledBlocks as CompiledBlocks
    from disttrain.compiling.blocks import compile_blocks as compile_blocks
    from disttrain.compiling.capture.step import CapturedStep as CapturedStep
    from disttrain.compiling.capture.step import capture_step as capture_step
    from disttrain.compiling.kinds import Kind as Kind

__getattr__, __dir__, __all__ = lazily(__name__)
