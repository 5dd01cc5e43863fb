"""The only file of `context_parallel` that uses torch's private names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch.utils.checkpoint
from torch._higher_order_ops.flex_attention import flex_attention

FLEX: Final = flex_attention
"""What torch's flex_attention calls, also where it is compiled."""
Function = Callable[..., Any]


@contextmanager
def checkpointing(wrapped: Callable[[Function], Function]) -> Iterator[None]:
    """Has `torch.utils.checkpoint.checkpoint`, however it was imported, compute `wrapped(function)` within the block.

    The backward computes what was given here anew, wherever it runs.
    """
    module: Any = torch.utils.checkpoint
    kind: Any = module.CheckpointFunction
    generate, forward = module._checkpoint_without_reentrant_generator, kind.forward

    def generate_wrapped(function: Function, *args: Any, **kwargs: Any) -> Any:
        return generate(wrapped(function), *args, **kwargs)

    def forward_wrapped(ctx: Any, function: Function, *args: Any) -> Any:
        return forward(ctx, wrapped(function), *args)

    module._checkpoint_without_reentrant_generator = generate_wrapped
    kind.forward = staticmethod(forward_wrapped)
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generate
        kind.forward = staticmethod(forward)
