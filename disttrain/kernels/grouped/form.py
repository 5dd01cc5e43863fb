"""The form of a gated expert: its activation and how its weights lie."""

from __future__ import annotations

from dataclasses import dataclass

from disttrain.errors import ShapeError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped")


@dataclass(frozen=True)
class GatedForm:
    """The form in which an expert computes `down(activation(gate(x)) * up(x))`.

    Args: activation      silu, gelu, gelu_tanh; clamped is gpt-oss's: gate and up are clamped to `limit`, and
                          (up + 1) * gate * sigmoid(alpha * gate) is the product.
          is_interleaved  the rows of gate and up take turns in `gate_up`; else all of gate come first.
          is_transposed   weights are (experts, in, out); else (experts, out, in) as nn.Linear has them.
    Raises: ShapeError for an activation that is not there, or clamped without a limit.
    """

    activation: str = "silu"
    is_interleaved: bool = False
    is_transposed: bool = False
    limit: float = 0.0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            problem = f"activation is {self.activation!r}."
            raise ShapeError("GatedForm", problem, f"Give one of {', '.join(ACTIVATIONS)}.")
        if self.activation == "clamped" and self.limit <= 0:
            raise ShapeError("GatedForm", f"limit is {self.limit} of a clamped activation.", "Give a positive one.")
