"""Collects the facts that a report of a bug should begin with. It says what is broken rather than break, and tells no
secrets."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from disttrain import settings
from disttrain.doctor.machine import examine, look
from disttrain.errors import SettingError
from disttrain.version import __version__

Info = dict[str, dict[str, str]]
"""Headings, and under each of them names and values."""

_NAME = re.compile(r"[\w.-]+")
_EXTRA = re.compile(r"extra == .(\w+)")


def collect(environ: Mapping[str, str] | None = None) -> Info:
    """Look at the interpreter, the packages, torch, the machine and the settings, in this order."""
    torch_facts = _torch_facts()
    num_gpus = sum(name.startswith("GPU ") for name in torch_facts)
    return {
        "system": {"Python": platform.python_version(), "system": platform.platform()},
        "packages": _packages(),
        "store": {"libuv by": _event_loop()},
        "torch": torch_facts,
        "machine": {finding.topic: finding.value for finding in examine(look(None, num_gpus))},
        "settings": {
            name: _read(setting, environ) for name, setting in settings.SETTINGS.items() if setting.is_set(environ)
        },
    }


def as_text(info: Info) -> str:
    """One line for each value, in columns."""
    width = max(len(name) for rows in info.values() for name in rows)
    blocks = []
    for heading, rows in info.items():
        lines = [f"  {name.ljust(width)}  {value}" for name, value in rows.items()] or ["  none"]
        blocks.append("\n".join([heading, *lines]))
    return "\n".join(blocks)


def _packages() -> dict[str, str]:
    """disttrain and all that it may use: versions, or that it is not there."""
    versions = {"disttrain": __version__}
    try:
        wanted = metadata.requires("disttrain") or []
    except metadata.PackageNotFoundError:
        versions["disttrain"] += ", not installed: imported from a folder"
        wanted = ["torch", "numpy", "msgpack", "xxhash", "uvloop"]
    for requirement in wanted:
        match, extra = _NAME.match(requirement), _EXTRA.search(requirement)
        if match is not None and (extra is None or extra[1] != "dev"):
            versions.setdefault(match[0], _version(match[0]))
    versions["triton"] = _version("triton")
    return versions


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _read(setting: settings.Setting[Any], environ: Mapping[str, str] | None) -> str:
    """The value of a setting; of what holds a secret there are only names of files among the settings."""
    try:
        return repr(setting.read(environ))
    except SettingError as error:
        return error.problem


def _event_loop() -> str:
    for name in ("pyuv", "uvloop"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return name
    return "neither pyuv nor uvloop: no store can be started here"


def _torch_facts() -> dict[str, str]:
    try:
        import torch  # may be what is broken
        import torch.distributed as torch_distributed  # as above
    except Exception as error:  # noqa: BLE001  a broken install is what the report is about
        return {"torch": f"cannot be imported: {type(error).__name__}: {error}"}
    facts = {"CUDA": torch.version.cuda or "not in this build"}
    for transport in ("gloo", "nccl", "mpi", "ucc"):
        facts[transport] = "yes" if getattr(torch_distributed, f"is_{transport}_available")() else "no"
    if torch.version.cuda and torch_distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, _nccl_version(torch)))
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        memory = f"{properties.total_memory / (1 << 30):.1f} GiB"
        facts[f"GPU {number}"] = f"{properties.name}, {memory}, {properties.major}.{properties.minor}"
    return facts


def _nccl_version(torch: Any) -> tuple[int, ...]:
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version
