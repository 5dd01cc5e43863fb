"""What compilers are told of every operator of the kernels is what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import disttrain.kernels
from tests.cases.kernel_operators import CASES, check_what_is_told
from tests.cases.kernels import IMPLEMENTATIONS, use_implementation


def test_every_operator_has_cases() -> None:
    folder = Path(disttrain.kernels.__file__).parent
    found = [name for file in folder.rglob("*.py") for name in re.findall(r'define\(\s*f?"(\w+)\(', file.read_text())]
    assert sorted(found) == sorted(CASES)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", ["numbers", "symbols"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_told_is_what_comes_out(
    name: str, sizes: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_implementation(implementation, monkeypatch)
    if implementation == "triton":
        monkeypatch.setenv("DISTTRAIN_KERNELS", "auto")  # references take what no kernel does
    check_what_is_told(name, FakeTensorMode(shape_env=ShapeEnv() if sizes == "symbols" else None))
