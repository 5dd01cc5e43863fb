"""What the code of docs/debugging.md takes for granted."""

from __future__ import annotations

from typing import Any

import disttrain

NUM_RANKS = 2


def names(_: str) -> dict[str, Any]:
    return {"mesh": disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))}
