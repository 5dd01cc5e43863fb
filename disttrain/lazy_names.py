"""A package's names, imported when they are first used: importing the package then loads nothing heavy. Source: PEP
562.

Names that are not there get an answer, too: submodules are imported, and an error for a name of torch's that is absent
on purpose gives the reason (`absent_names.txt`, which `tools/absent_names.py` makes from docs/differences.md).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PAGE = "docs/differences.md"

_IN_ITSELF = "its names are in {} itself"
_TORCHS = "it is torch's, and works on our groups: import torch.distributed"
_LAUNCHER = "disttrain-launch starts workers"
_PARTS_OF_TORCH = {
    **{f"disttrain.{part}": _TORCHS for part in ("algorithms", "nn", "optim")},
    **{f"disttrain.{part}": _LAUNCHER for part in ("elastic", "launcher", "run")},
    **{
        f"disttrain.{part}": _IN_ITSELF.format("disttrain") for part in ("constants", "device_mesh", "distributed_c10d")
    },
    "disttrain._functional_collectives": "it is disttrain.process_group.functional",
    "disttrain._tensor": "it is disttrain.dtensor",
    "disttrain.fsdp": "it is disttrain.fsdp2",
    "disttrain.rpc": "there are no remote calls here",
    "disttrain.tensor": "it is disttrain.dtensor, and tensor.parallel is disttrain.tp",
    "disttrain.dtensor.parallel": "it is disttrain.tp",
    **{
        f"disttrain.dtensor.{part}": _IN_ITSELF.format("disttrain.dtensor")
        for part in ("debug", "experimental", "placement_types")
    },
    **{
        f"disttrain.checkpoint.{part}": _IN_ITSELF.format("disttrain.checkpoint")
        for part in ("api", "default_planner", "filesystem", "format_utils", "hf_storage", "planner")
    },
}
"""Of torch.distributed's parts that have another name here, or none: what is instead."""


def lazily(
    package: str, private: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package that fetches its names when they are first used.

    The names are those that the package imports for type checkers, each as `from module import name as name`, or by a
    star. They are read from its source, so that nothing lists them a second time.
    Args: private  by name: the module that has it; such names are fetched, too, but not listed.
    """
    home_of = _imports(package)
    public = sorted(home_of)
    home_of |= private or {}
    otherwise = answering(package)

    def fetch(name: str) -> Any:
        if name not in home_of:
            return otherwise(name)
        value = getattr(importlib.import_module(home_of[name]), name)
        # From now on it is found without asking here.
        setattr(sys.modules[package], name, value)
        return value

    return fetch, lambda: list(public), public


def _imports(package: str) -> dict[str, str]:
    """Maps each name to the module that a package imports it from."""
    homes: dict[str, str] = {}
    # Regular expressions would take longer to compile than all of this.
    for line in _source(package).splitlines():
        match line.split():
            case ["from", module, "import", name, "as", alias] if name == alias:
                homes[name] = module
            case ["from", module, "import", "*", *_]:
                listed = _source(module).partition("\n__all__ = [")[2].partition("]")[0]
                homes |= {name.strip(' \n"'): module for name in listed.rstrip(", \n").split(",")}
    return homes


def _source(module: str) -> str:
    spec: Any = importlib.util.find_spec(module)
    # Of a module in an archive, too. `get_source` would load `tokenize`, which takes longer than all the rest.
    return str(spec.loader.get_data(spec.origin), "utf-8")


def answering(package: str) -> Callable[[str], Any]:
    """`__getattr__` for a package: its submodules, else an AttributeError that says why it is not here."""

    def answer(name: str) -> Any:
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        problem = f"module {package!r} has no attribute {name!r}"
        reason = absent_names().get((package, name)) or _PARTS_OF_TORCH.get(f"{package}.{name}")
        raise AttributeError(problem if reason is None else f"{problem}, which torch has: {reason}. See {PAGE}.")

    return answer


@cache
def absent_names() -> dict[tuple[str, str], str]:
    """Maps package and name to the reason why a name of torch's is not here, and what is instead."""
    lines = (Path(__file__).parent / "absent_names.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines)
    return {(package, name): reason for package, name, reason in rows}
