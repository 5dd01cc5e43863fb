"""What the code of docs/experts.md takes for granted."""

from __future__ import annotations

from typing import Any

import torch

NUM_RANKS = 2


def names(section: str) -> dict[str, Any]:
    import transformers  # only where the page adopts a model

    import disttrain

    found: dict[str, Any] = {"torch": torch, "disttrain": disttrain}
    if section == "Models as they are":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        found["model"] = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    return found
