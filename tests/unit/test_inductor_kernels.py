"""Keeping Inductor's compiled C++ for the next run of the tests."""

from __future__ import annotations

from pathlib import Path

from torch._inductor import cpp_builder

from tests.surroundings.inductor_kernels import link_kernels


def test_whole_kernels_are_kept_and_half_ones_are_not(tmp_path: Path) -> None:
    cache, kept = tmp_path / "cache", tmp_path / "kept"
    for name in ("ab/whole.main.so", "ab/half.main.so"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"\x7fELF")
    (cache / "ab" / f"half.main_{cpp_builder._BUILD_TEMP_DIR}").mkdir()
    kept.mkdir()
    link_kernels(cache, kept)
    link_kernels(cache, kept)
    assert [str(file.relative_to(kept)) for file in kept.glob("*/*")] == ["ab/whole.main.so"]
