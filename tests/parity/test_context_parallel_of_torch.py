"""What torch's own modules for context parallel do on CPUs, for which ours have a sentence alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _attention as torchs
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from disttrain import context_parallel


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torchs._enable_context_parallel_dispatcher()
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torchs._disable_context_parallel_dispatcher()
    dist.destroy_process_group()


class Attention(nn.Module):
    """As torchtitan has it, which hands torch a style for it."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_torchs_style_of_attention_serves_no_cpu(mesh: DeviceMesh) -> None:
    style = torchs._ContextParallel
    module = Attention()
    parallelize_module(module, mesh, style(seq_dim=2, attention_type=style.AttentionType.SDPA))
    query = torch.randn(1, 2, 8, 4)
    with pytest.raises(NotImplementedError, match=r"for_cpu\.default does not have a sharding strategy"):
        module(query, query, query)


def test_ours_says_what_takes_its_place() -> None:
    with pytest.raises(AttributeError, match=r"cut_batch\(axis, tokens\)\.attention\(\)"):
        _ = context_parallel._ContextParallel
