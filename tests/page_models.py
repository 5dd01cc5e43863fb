"""Small models that the code of several pages is run with."""

from __future__ import annotations

from torch import nn
from tp import HEAD, llama


def small_llama() -> nn.Sequential:
    """The one of examples/tp.py, whose attentions say their `head_dim`, as most models' do."""
    model = llama()
    for block in model.blocks:
        block.attention.head_dim = HEAD
    return model
