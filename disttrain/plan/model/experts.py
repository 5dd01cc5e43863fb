"""Sizes of a mixture of experts and of latent attention, and what is assumed about how evenly tokens meet experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from disttrain.errors import SettingError


def check_counts(operation: str, sizes: object, names: dict[str, int]) -> None:
    """Raises SettingError where a field is no whole number from its least value on."""
    for name, least in names.items():
        value = getattr(sizes, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SettingError(operation, f"{name} is {value!r}.", f"Give a whole number from {least} on.")


@dataclass(frozen=True)
class ExpertSizes:
    """Gated experts in the place of a block's MLP, and the router in front of them.

    Args: ffn_size  of one expert;  shared_size  of all shared experts together, which see every token;  num_dense
          first blocks that have an MLP instead;  most_groups  of `num_groups`, equal groups of neighbouring experts,
          that a token's experts may lie in;  has_bias  of the router and of each expert's two layers;
          has_balance_bias  an element for each expert in the router, for balance without a loss.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    shared_size: int = 0
    num_dense: int = 0
    num_groups: int = 1
    most_groups: int = 1
    has_bias: bool = False
    has_balance_bias: bool = False

    def __post_init__(self) -> None:
        least = {"num_experts": 1, "top_k": 1, "ffn_size": 1, "num_groups": 1, "most_groups": 1}
        check_counts("plan --model", self, least | {"shared_size": 0, "num_dense": 0})
        if self.top_k > self.num_experts:
            problem = f"a token has top_k={self.top_k} of {self.num_experts} experts."
            raise SettingError("plan --model", problem, f"Give at most {self.num_experts}.")
        if self.num_experts % self.num_groups or self.most_groups > self.num_groups:
            problem = (
                f"{self.num_experts} experts in {self.num_groups} groups, of which a token has {self.most_groups}."
            )
            raise SettingError("plan --model", problem, "Groups are equal, and a token has some of them.")

    def expert_elements(self, dim: int) -> int:
        """Of one expert: its gated layers and their biases."""
        return 3 * dim * self.ffn_size + self.has_bias * (2 * self.ffn_size + dim)

    def router_elements(self, dim: int) -> int:
        return self.num_experts * (dim + self.has_bias + self.has_balance_bias)

    def of_rank(self, ep: int) -> int:
        """Experts of the ranks along ep that have most: neighbouring ones, as many on each rank but the last ones."""
        return -(-self.num_experts // ep)

    def hosts_of_token(self, num_hosts: int) -> float:
        """Of so many hosts with equal parts of the experts: the mean number that a token has experts on, where each
        choice is as likely. Where groups are limited, hosts stand for groups."""
        each = self.num_experts / num_hosts
        missed = math.prod(max(0.0, 1 - each / (self.num_experts - taken)) for taken in range(self.top_k))
        return min(num_hosts * (1 - missed), num_hosts * self.most_groups / self.num_groups)


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention: keys and values come from one small vector for each token.

    Args: query_rank  of the vector that queries come from; 0: they come from the whole one;  key_rank  of that of keys
          and values;  plain_size, rotary_size  elements of a head's query and key without and with a rotation, of which
          keys' rotated ones are the same for all heads;  value_size  of a head's value.
    Source: "DeepSeek-V2" (arXiv:2405.04434), section 2.1.
    """

    query_rank: int
    key_rank: int
    plain_size: int
    rotary_size: int
    value_size: int

    def __post_init__(self) -> None:
        check_counts("plan --model", self, {field.name: field.name != "query_rank" for field in fields(self)})

    @property
    def head_size(self) -> int:
        """Elements of a head's query."""
        return self.plain_size + self.rotary_size

    @property
    def norm_elements(self) -> int:
        """Gains of the norms of both small vectors."""
        return self.query_rank + self.key_rank

    def matrices(self, dim: int, num_heads: int) -> list[tuple[int, int]]:
        """Rows and columns, out and in, of all but the last of `num_heads` heads that a rank has."""
        queries = num_heads * self.head_size
        to_queries = [(self.query_rank, dim), (queries, self.query_rank)] if self.query_rank else [(queries, dim)]
        to_both = (num_heads * (self.plain_size + self.value_size), self.key_rank)
        return [*to_queries, (self.key_rank + self.rotary_size, dim), to_both]


@dataclass(frozen=True)
class ExpertAssumptions:
    """The numbers that no size says, and a run decides.

    Args: imbalance  rows of the rank along ep that has most, over the mean;  exchange_bytes  of an element on its way
          to an expert: 1 in float8, None as it is computed with; the way back is as it is computed with;
          once_per_host  a token goes once to each host that it has experts on, and from there by the host's own links;
          else each of its choices is a row of its own;  hidden  the share of the exchange's time that lies under
          products.
    """

    imbalance: float = 1.2
    exchange_bytes: int | None = None
    once_per_host: bool = False
    hidden: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.imbalance < math.inf:
            raise SettingError(
                "plan --imbalance", f"it is {self.imbalance:g}.", "Give the most over the mean: 1 or more."
            )
        if not 0 <= self.hidden <= 1:
            raise SettingError("plan --hidden-exchange", f"it is {self.hidden:g}.", "Give a share from 0 to 1.")
