"""torch's OpInfos. They are made when their module is loaded, which takes seconds: so only this file names it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch.testing._internal.opinfo.core import OpInfo


def all_infos() -> Sequence[OpInfo]:
    with warnings.catch_warnings():
        # Numba, which torch loads where it is, says so of itself under NumPy 2.5.
        warnings.filterwarnings("ignore", "The 'generic' unit for NumPy timedelta", DeprecationWarning)
        from torch.testing._internal.common_methods_invocations import op_db  # here, since it takes seconds

    return op_db


def title(info: OpInfo) -> str:
    """Its name, and that of its variant."""
    return f"{info.name} {info.variant_test_name}".strip()


def indices_of(names: Sequence[str]) -> list[int]:
    """Where in `all_infos()` those called so are, with or without the name of their variant."""
    return [index for index, info in enumerate(all_infos()) if info.name in names or title(info) in names]


def info_named(name: str) -> OpInfo:
    """The first of this name, with or without that of its variant."""
    return all_infos()[indices_of([name])[0]]
