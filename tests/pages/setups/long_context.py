"""What the code of docs/long_context.md takes for granted."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import disttrain
from disttrain.kernels import linear_cross_entropy
from tests.pages.models import LAYERS, VOCABULARY, WIDTH, Block

NUM_RANKS = 2


class Model(nn.Module):
    """Gives the sum of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + positions.unsqueeze(-1).sin()
        for block in self.blocks:
            x = block(x)
        return linear_cross_entropy(x, self.head.weight, targets, reduction="sum")


def names(section: str) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2, 15))
    found: dict[str, Any] = {
        "disttrain": disttrain,
        "mesh": disttrain.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")),
        "model": Model(),
        "num_targets": 28,
        "qkv": torch.randn(3, 1, 4, 16, 8),
        "tokens": tokens,
        "torch": torch,
    }
    if section == "Models of transformers":
        import transformers  # only where the page has such a model

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        found["llama"] = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return found
