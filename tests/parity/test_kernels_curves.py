"""A model with kernels, and with their optimizer and loss, learns as one without: the same losses over many steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from llama.config import PRESETS
from llama.model import Llama

from disttrain.kernels import AdamW, loss_from_head, use_kernels


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small; several threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that count up from somewhere, of which the model can learn what comes next."""
    begins = torch.randint(0, 200, (4, 1), generator=torch.Generator().manual_seed(step))
    tokens = (begins + 3 * torch.arange(13)) % 256
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    ("dtype", "num_steps", "tolerance"), [(torch.float64, 100, 1e-8), (torch.float32, 60, 2e-2)], ids=str
)
def test_the_loss_curve_is_the_same(dtype: torch.dtype, num_steps: int, tolerance: float) -> None:
    torch.manual_seed(0)
    model = Llama(PRESETS["tiny"])
    model.init()
    model.to(dtype)
    other = copy.deepcopy(model)
    use_kernels(other, report=lambda _: None)
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fused = AdamW(other.parameters(), lr=3e-3, max_norm=1.0)
    wished, found = [], []
    for step in range(num_steps):
        tokens, targets = batch_of(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
        wished.append(loss.detach())
        with loss_from_head(other.head, targets):
            loss = other(tokens)
        loss.backward()
        fused.step()
        fused.zero_grad()
        found.append(loss.detach())
    assert wished[-1] < 0.5 * wished[0]
    torch.testing.assert_close(torch.stack(found), torch.stack(wished), rtol=tolerance, atol=tolerance)
