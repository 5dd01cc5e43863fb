"""Sizes of a Llama, or of a model with its blocks but with experts or latent attention in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from disttrain.errors import SettingError
from disttrain.plan.model.experts import ExpertSizes, LatentAttention, check_counts

_OPERATION = "plan --model"


@dataclass(frozen=True)
class LlamaSizes:
    """Grouped-query attention, or latent, and a gated MLP, or experts.

    Args: ffn_size  of blocks without experts;  is_tied  embedding and head are one matrix;  head_size  elements of a
          head; None: dim / num_heads, or latent attention's;  rotary_base  takes neither time nor memory;
          extra_elements  of a block beside matrices, two norms and experts: biases, gains of heads.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    head_size: int | None = None
    is_tied: bool = False
    rotary_base: float = 10_000.0
    experts: ExpertSizes | None = None
    latent: LatentAttention | None = None
    extra_elements: int = 0

    def __post_init__(self) -> None:
        numbers = ["dim", "num_layers", "num_heads", "num_kv_heads", "ffn_size", "vocab_size"]
        least = dict.fromkeys(numbers + ["head_size"] * (self.head_size is not None), 1) | {"extra_elements": 0}
        check_counts(_OPERATION, self, least)
        if not isinstance(self.is_tied, bool):
            raise SettingError(_OPERATION, f"is_tied is {self.is_tied!r}.", "Give true or false.")
        if not 0 < self.rotary_base < math.inf:
            raise SettingError(_OPERATION, f"rotary_base is {self.rotary_base!r}.", "Give a number above 0.")
        if self.latent is not None:
            object.__setattr__(self, "head_size", self.latent.head_size)
        if self.head_size is None:
            if self.dim % self.num_heads:
                problem = f"dim {self.dim} does not divide among {self.num_heads} heads."
                raise SettingError(_OPERATION, problem, "Say head_dim.")
            object.__setattr__(self, "head_size", self.dim // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            problem = f"{self.num_heads} heads cannot share {self.num_kv_heads} heads of keys and values evenly."
            raise SettingError(_OPERATION, problem, "Give a divisor.")
        if self.experts is not None and self.experts.num_dense >= self.num_layers:
            problem = f"{self.experts.num_dense} of {self.num_layers} blocks are without experts."
            raise SettingError(_OPERATION, problem, "Give fewer, or no experts.")

    @property
    def spelled(self) -> str:
        """As the example reads them; the vocabulary is its tokenizer's."""
        sizes: dict[str, object] = {
            "dim": self.dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "hidden_size": self.ffn_size,
        }
        if self.rotary_base != LlamaSizes.rotary_base:
            sizes["rotary_base"] = f"{self.rotary_base:g}"
        if self.is_tied:
            sizes["is_tied"] = True
        if self.experts is not None:
            names = ("num_experts", "top_k", *("shared_size",) * (self.experts.shared_size > 0))
            sizes |= {name: getattr(self.experts, name) for name in names} | {"expert_size": self.experts.ffn_size}
        return ",".join(f"{name}={value}" for name, value in sizes.items())

    @property
    def query_size(self) -> int:
        """Elements of all queries of a token."""
        assert self.head_size is not None
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Elements of all keys of a token, and of all values."""
        assert self.head_size is not None
        return self.num_kv_heads * self.head_size

    @property
    def value_size(self) -> int:
        """Elements of what attention returns for a token, of all heads."""
        return self.query_size if self.latent is None else self.num_heads * self.latent.value_size

    @property
    def attention_size(self) -> float:
        """Elements of all heads that attention multiplies: the mean of the products for scores and for values."""
        return (self.query_size + self.value_size) / 2

    @cached_property
    def without_experts(self) -> LlamaSizes:
        """A model of the blocks that have an MLP."""
        return replace(self, experts=None)

    @property
    def num_dense(self) -> int:
        """First blocks of a model with experts that have none."""
        return 0 if self.experts is None else self.experts.num_dense

    @property
    def attention_elements(self) -> int:
        """Matrices of attention in a block."""
        if self.latent is None:
            return self.dim * (2 * self.query_size + 2 * self.key_size)
        inner = sum(rows * columns for rows, columns in self.latent.matrices(self.dim, self.num_heads))
        return inner + self.dim * self.value_size

    @property
    def block_matrix_elements(self) -> int:
        """Matrices of a block that each token meets: with experts, those of the router and of shared ones."""
        if self.experts is None:
            return self.attention_elements + 3 * self.dim * self.ffn_size
        always = self.experts.num_experts + 3 * self.experts.shared_size
        return self.attention_elements + self.dim * always

    @property
    def block_active_elements(self) -> int:
        """Matrices that one token meets in a block, its experts' with them."""
        chosen = 0 if self.experts is None else 3 * self.dim * self.experts.top_k * self.experts.ffn_size
        return self.block_matrix_elements + chosen

    @property
    def block_elements(self) -> int:
        """All parameters of a block."""
        elements = self.block_matrix_elements + 2 * self.dim + self.extra_elements
        elements += self.latent.norm_elements if self.latent is not None else 0
        if self.experts is not None:
            elements += self.experts.router_elements(self.dim) - self.dim * self.experts.num_experts
            elements += self.experts.num_experts * self.experts.expert_elements(self.dim)
        return elements

    @property
    def vocab_elements(self) -> int:
        """The embedding, or the head."""
        return self.vocab_size * self.dim

    @property
    def num_parameters(self) -> int:
        tables = self.vocab_elements * (1 if self.is_tied else 2)
        with_experts = self.num_layers - self.num_dense
        blocks = with_experts * self.block_elements + self.num_dense * self.without_experts.block_elements
        return blocks + tables + self.dim

    @property
    def num_active(self) -> int:
        """Elements of the matrices that one token is multiplied by: all but the embedding and experts not chosen."""
        with_experts = self.num_layers - self.num_dense
        blocks = with_experts * self.block_active_elements + self.num_dense * self.without_experts.block_active_elements
        return blocks + self.vocab_elements

    def flops(self, num_tokens: int, seq_size: int) -> float:
        """Counts the FLOPs of a step: 6 per token and element of each matrix that it meets, but the embedding, and the
        causal half of attention; nothing that is computed twice."""
        return num_tokens * (6.0 * self.num_active + 6.0 * self.num_layers * seq_size * self.attention_size)
