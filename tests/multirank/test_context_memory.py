"""Memory of a rank that trains on long sequences: its peak, measured, and on the planner's line."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from llama.config import LlamaConfig
from llama.model import Llama
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import disttrain
from disttrain.context_parallel import cut_batch
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.kernels import loss_from_head, use_kernels
from disttrain.plan import HARDWARE, Choice, Job, LlamaSizes, MeshSizes, memory_of
from disttrain.plan.model.memory import Memory
from disttrain.testing import run_threads

NUM_RANKS, MILLION = 2, 1 << 20
SIZES = LlamaSizes(dim=32, num_layers=3, num_heads=2, num_kv_heads=1, ffn_size=128, vocab_size=256)
CONFIG = LlamaConfig(SIZES.dim, 3, 2, 1, SIZES.ffn_size, SIZES.vocab_size, max_length=1 << 13)
BLOCK_BYTES = (3 * SIZES.dim**2 + 3 * SIZES.dim * SIZES.ffn_size + 2 * SIZES.dim) * (2 + 4)
"""A block's unsharded parameters in bfloat16 and their gradients in float32."""


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, until they are gone, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()
        self._num_bytes = self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor:
                self._add(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen or not num_bytes:
            return
        self._seen.add(key)
        self._num_bytes += num_bytes

        def leave() -> None:
            self._seen.discard(key)
            self._num_bytes -= num_bytes

        weakref.finalize(storage, leave)


def peak_bytes(num_positions: int, *, recomputes: bool) -> int:
    """The most that a rank holds in a step beside its shards, with so many positions of one sequence on all ranks."""
    found: list[int] = []
    tokens = torch.randint(SIZES.vocab_size, (1, num_positions), generator=torch.Generator().manual_seed(0))

    def body() -> None:
        axis = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("cp",))
        model = Llama(CONFIG)
        model.recomputes = recomputes
        use_kernels(model, report=lambda _: None)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=axis, mp_policy=policy)
        fully_shard(model, mesh=axis, mp_policy=policy)

        def step(tokens: torch.Tensor) -> None:
            batch = cut_batch(axis, tokens, way="ring")
            with batch.attention():
                with loss_from_head(model.head, batch.targets):
                    loss = model(batch.input_ids)
                batch.mean(loss).backward()
            model.zero_grad()

        # The first learns the order of modules.
        step(tokens[:, :64])
        if axis.get_local_rank():
            step(tokens)
            return
        with Live() as live:
            step(tokens)
        found.append(live.peak_bytes)

    run_threads(NUM_RANKS, body)
    return found[0]


def without_messages(memory: Memory) -> int:
    """Beside its shards; on CPUs keys don't go through slots."""
    return memory.total_bytes - memory.parameters - memory.optimizer - memory.messages


def planned(num_positions: int, *, recomputes: bool) -> Memory:
    job = Job(SIZES, NUM_RANKS, HARDWARE["h200"], seq_size=num_positions, num_sequences=1)
    return memory_of(job, Choice(MeshSizes(cp=NUM_RANKS), 1, 1, recomputes=recomputes))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_million_tokens_take_what_fewer_take_scaled(recomputes: bool) -> None:
    lengths = 2048, 5120, 8192
    measured = [peak_bytes(length, recomputes=recomputes) for length in lengths]
    per_token = (measured[2] - measured[0]) / (lengths[2] - lengths[0])
    # What grows, grows evenly; beside it a block's parameters and gradients come and go, some sooner, some later.
    assert measured[1] == pytest.approx((measured[0] + measured[2]) / 2, abs=1.5 * BLOCK_BYTES)
    of_million = measured[2] + per_token * (MILLION - lengths[2])
    for length, num_bytes in ((lengths[2], measured[2]), (MILLION, of_million)):
        assert num_bytes == pytest.approx(without_messages(planned(length, recomputes=recomputes)), rel=0.05)
    print(f"\n{MILLION:,} tokens, recomputes={recomputes}: {of_million / 1e6:.0f} MB by what is measured")
