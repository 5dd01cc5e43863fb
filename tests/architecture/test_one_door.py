"""What may be touched in one place only, or nowhere: the environment, torch's private names, pickle, eval."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.architecture.conftest import Source

ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
ENVIRONMENT_DOOR = {"disttrain/settings.py"}
TORCH_DOORS = {
    "disttrain/process_group/_c10d.py",  # transports
    "disttrain/process_group/_torch.py",  # what Dynamo does not read
    "disttrain/compiling/_torch.py",  # dispatch modes, compiled modules
    "disttrain/context_parallel/_torch.py",  # checkpoints
    "disttrain/dtensor/_torch.py",  # tensor subclasses, schemas
    "disttrain/fsdp2/_torch.py",  # modules, the autograd engine, sharding kernels
    "disttrain/kernels/_torch.py",  # modes, norms of several tensors
    "disttrain/mesh/_torch.py",  # constants of graphs
    "disttrain/notebook/_torch.py",  # forks and GPUs
    "disttrain/pipelining/_torch.py",  # hooks of tensors, nested values
    "disttrain/tp/_torch.py",  # modules
}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "torch.load", "torch.save"}
WRITES_FOR_TORCH = {"disttrain/checkpoint/calls/format_utils.py"}
"""Files that others read with torch.load; here nothing is unpickled."""
LAUNCHER_KNOWS = {
    "disttrain.__version__",
    "disttrain.command_line",
    "disttrain.console",
    "disttrain.devices",
    "disttrain.store.durations",
    "disttrain.errors",
    "disttrain.flight_recorder.analysis.analysis",
    "disttrain.flight_recorder.cli",
    "disttrain.flight_recorder.dumps.dump",
    "disttrain.flight_recorder.dumps.reading.reader",
    "disttrain.flight_recorder.dumps.words",
    "disttrain.flight_recorder.dumps.folders",
    "disttrain.flight_recorder.dumps.rings.orphaned_rings",
    "disttrain.flight_recorder.dumps.private_file",
    "disttrain.flight_recorder.analysis.alignment.match",
    "disttrain.flight_recorder.record.process.process_state",
    "disttrain.flight_recorder.record.record",
    "disttrain.flight_recorder.views.report",
    "disttrain.flight_recorder.record.ring.layout",
    "disttrain.flight_recorder.dumps.rings.reader",
    "disttrain.flight_recorder.analysis.verdict",
    "disttrain.reports",
    "disttrain.settings",
    "disttrain.store",
}


def _is_under(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def test_only_the_settings_read_the_environment(library: list[Source]) -> None:
    found = [
        f"{place}: {name}"
        for source in library
        if source.name not in ENVIRONMENT_DOOR
        for place, name in source.full_names
        if _is_under(name, ENVIRONMENT)
    ]
    assert found == []


def test_few_files_know_the_private_names_of_torch(library: list[Source]) -> None:
    """Names of operators (`torch.ops.aten._to_copy`) are not private: they are what dispatch hands over."""
    found = [
        f"{place}: {name}"
        for source in library
        if source.name not in TORCH_DOORS
        for place, name in source.full_names
        if _is_under(name, {"torch"}) and not _is_under(name, {"torch.ops"}) and _is_private(name)
    ]
    assert found == []


def test_nothing_pickles(library: list[Source]) -> None:
    found = [
        f"{place}: {name}"
        for source in library
        for place, name in source.full_names
        if _is_under(name, PICKLES) and not (name == "torch.save" and source.name in WRITES_FOR_TORCH)
    ]
    assert found == []


def test_nothing_evaluates_text_as_code(library: list[Source]) -> None:
    found = [
        f"{source.at(node)}: {node.func.id}"
        for source in library
        for node in source.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}
    ]
    assert found == []


def test_the_launcher_knows_only_what_does_without_torch(library: list[Source]) -> None:
    found = [
        f"{place}: {name}"
        for source in library
        if source.name.startswith("launcher/")
        for place, name in source.full_names
        if _is_under(name, {"disttrain"}) and name != "disttrain" and not _is_under(name, LAUNCHER_KNOWS)
    ]
    assert found == []
