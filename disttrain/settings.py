"""Every environment variable that disttrain reads, in one table; nothing else reads `os.environ`.

A setting is read when it is asked for, never at import, so that a test or a launcher may change it beforehand.
`docs/settings.md` is made from this table (`python -m disttrain.settings`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from disttrain.errors import SettingError

T = TypeVar("T")

SETTINGS: dict[str, Setting[Any]] = {}


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One variable: `name`, how its text is parsed, its default when unset or empty, and what it means."""

    name: str
    parse: Callable[[str], T]
    default: T
    meaning: str

    def __post_init__(self) -> None:
        SETTINGS[self.name] = self

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """The value now. Raises SettingError when the text does not parse."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingError(
                "settings", f"{self.name}={text!r} is not valid: {error}.", f"It means: {self.meaning}"
            ) from None

    def is_set(self, environ: Mapping[str, str] | None = None) -> bool:
        return bool((os.environ if environ is None else environ).get(self.name, ""))


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("it must be positive")
    return value


def _debug_level(text: str) -> str:
    if text.lower() not in {"off", "info", "detail"}:
        raise ValueError("it must be off, info or detail")
    return text.lower()


def _kernels(text: str) -> str:
    if text.lower() not in {"auto", "triton", "reference"}:
        raise ValueError("it must be auto, triton or reference")
    return text.lower()


def _switch(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError("it must be 0 or 1")
    return text == "1"


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("it must not be negative")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


# The job, as torchrun and disttrain-launch tell it to every worker. None: not started by a launcher.
RANK = Setting[int | None]("RANK", _natural, None, "Global rank of this process.")
WORLD_SIZE = Setting[int | None]("WORLD_SIZE", _natural, None, "Number of processes in the job.")
LOCAL_RANK = Setting[int | None]("LOCAL_RANK", _natural, None, "Rank of this process on its node; picks its GPU.")
LOCAL_WORLD_SIZE = Setting[int | None]("LOCAL_WORLD_SIZE", _natural, None, "Number of processes on this node.")
MASTER_ADDR = Setting[str | None]("MASTER_ADDR", str, None, "Host name or address of rank 0's node.")
MASTER_PORT = Setting[int | None]("MASTER_PORT", _natural, None, "Port on MASTER_ADDR where ranks meet.")
TORCHELASTIC_USE_AGENT_STORE = Setting[bool](
    "TORCHELASTIC_USE_AGENT_STORE",
    lambda text: text == "True",
    False,
    "`True`: torchrun's own store is at MASTER_ADDR:MASTER_PORT; torchrun sets it.",
)
TORCHELASTIC_RUN_ID = Setting[str | None](
    "TORCHELASTIC_RUN_ID", str, None, "Name of the run; disttrain-launch and torchrun set it."
)
TORCHELASTIC_RESTART_COUNT = Setting[int](
    "TORCHELASTIC_RESTART_COUNT", _natural, 0, "How often torchrun has started this job's workers again."
)

# What others that start processes tell each of them: several without a launcher are no job.
SLURM_STEP_NUM_TASKS = Setting[int | None]("SLURM_STEP_NUM_TASKS", _natural, None, "Tasks of this step; srun sets it.")
SLURM_STEP_ID = Setting[int | None]("SLURM_STEP_ID", _natural, None, "Number of this step; Slurm sets it.")
OPEN_MPI_SIZE = Setting[int | None](
    "OMPI_COMM_WORLD_SIZE", _natural, None, "Processes that mpirun started; Open MPI sets it."
)
PMI_SIZE = Setting[int | None](
    "PMI_SIZE", _natural, None, "Processes that mpirun started; MPICH, Intel MPI and srun set it."
)

# The launcher. AGENT is written for workers, by whom a process that outlives its job is found.
AGENT = Setting[str | None](
    "DISTTRAIN_AGENT", str, None, "Name of the launcher's agent that started this process; the launcher sets it."
)
ROUND = Setting[int](
    "DISTTRAIN_ROUND",
    _natural,
    0,
    "How many rounds of processes this job had before; each meets under keys of its own. The launcher sets it.",
)
VISIBLE_GPUS = Setting[str | None](
    "CUDA_VISIBLE_DEVICES", str, None, "GPUs that this process may use, comma-separated; set but empty: none."
)
NUM_THREADS = Setting[int | None](
    "OMP_NUM_THREADS",
    _natural,
    None,
    "Threads of each worker's CPU operators; the launcher sets its part of the cores where several share a node.",
)
REPORT_FILE = Setting[Path | None](
    "DISTTRAIN_REPORT_FILE",
    Path,
    None,
    "Where `disttrain.report` writes what the launcher shows; the launcher sets it for each of its workers.",
)
TERMINAL = Setting[str]("TERM", str, "", "Kind of the terminal; on `dumb` the launcher draws no table.")
NO_COLOR = Setting[bool]("NO_COLOR", bool, False, "Any text: the launcher prints no colours.")

# The store.
STORE = Setting[str | None](
    "DISTTRAIN_STORE",
    str,
    None,
    "host:port of a store that is running, and after a comma its standby's; or @name:0 for a proxy of this machine. "
    "The launcher sets it for its workers.",
)
TOKEN_FILE = Setting[Path | None](
    "DISTTRAIN_TOKEN_FILE", Path, None, "File (mode 0600) with the job's token; the store lets in only who knows it."
)
STORE_TLS_CA = Setting[Path | None](
    "DISTTRAIN_STORE_TLS_CA",
    Path,
    None,
    "PEM file with the certificate authority of the job; set: the store is used over TLS, and only over TLS.",
)
STORE_TLS_CERT = Setting[Path | None](
    "DISTTRAIN_STORE_TLS_CERT",
    Path,
    None,
    "PEM file with this node's certificate, then those up to the authority; the store's server needs one.",
)
STORE_TLS_KEY = Setting[Path | None](
    "DISTTRAIN_STORE_TLS_KEY", Path, None, "PEM file with the certificate's private key, closed to other users."
)
STORE_TLS_ASK_CLIENTS = Setting[bool](
    "DISTTRAIN_STORE_TLS_ASK_CLIENTS",
    _switch,
    False,
    "1: the store's server takes only clients that show a certificate of the authority, too.",
)
STORE_ENGINE = Setting[str | None](
    "DISTTRAIN_STORE_ENGINE",
    str,
    None,
    "libuv binding of the store's server: pyuv or uvloop; unset: the first that imports.",
)
STORE_MAX_KEY_BYTES = Setting[int](
    "DISTTRAIN_STORE_MAX_KEY_BYTES", _natural, 8 << 10, "Longest key that a store's server takes, in UTF-8 bytes."
)
STORE_MAX_VALUE_BYTES = Setting[int](
    "DISTTRAIN_STORE_MAX_VALUE_BYTES", _natural, 64 << 20, "Largest value that a store's server takes, in bytes."
)
STORE_MAX_FRAME_BYTES = Setting[int](
    "DISTTRAIN_STORE_MAX_FRAME_BYTES", _natural, 256 << 20, "Largest request or reply of a store's server, in bytes."
)
STORE_MAX_UNREAD_BYTES = Setting[int](
    "DISTTRAIN_STORE_MAX_UNREAD_BYTES",
    _natural,
    512 << 20,
    "Bytes of replies that a store's client may leave unread before the server drops it.",
)
STORE_MAX_KEYS = Setting[int](
    "DISTTRAIN_STORE_MAX_KEYS", _natural, 10_000_000, "Keys, and values in queues, that a store's server takes in all."
)
STORE_MAX_CLIENTS = Setting[int](
    "DISTTRAIN_STORE_MAX_CLIENTS", _natural, 100_000, "Connections that a store's server takes."
)
STORE_MAX_UNPROVED = Setting[int](
    "DISTTRAIN_STORE_MAX_UNPROVED",
    _natural,
    4096,
    "Connections that a store's server keeps of peers that have not proved yet that they know the token; "
    "when there are more, the oldest is dropped.",
)
STORE_MAX_TOTAL_BYTES = Setting[int](
    "DISTTRAIN_STORE_MAX_TOTAL_BYTES", _natural, 8 << 30, "Bytes of all keys and values that a store's server takes."
)

# Collectives.
GLOO_SOCKET_IFNAME = Setting[tuple[str, ...] | None](
    "GLOO_SOCKET_IFNAME", _names, None, "Network interfaces that Gloo listens on, comma-separated."
)
TIMEOUT_S = Setting[float](
    "DISTTRAIN_TIMEOUT_S", _positive, 600.0, "Seconds that a collective may take unless a group says otherwise."
)
DEBUG = Setting[str](
    "DISTTRAIN_DEBUG",
    _debug_level,
    "off",
    "detail: the ranks compare operation, dtype, sizes and root before each collective; slow. off, info: they don't.",
)

# Checkpoints.
CHECKPOINT_TIMEOUT_S = Setting[float](
    "DISTTRAIN_CHECKPOINT_TIMEOUT_S",
    _positive,
    3600.0,
    "Seconds that ranks wait for each other's part of a save or load.",
)
CHECKPOINT_ORPHAN_TIMEOUT_S = Setting[float](
    "DISTTRAIN_CHECKPOINT_ORPHAN_TIMEOUT_S",
    _positive,
    60.0,
    "Seconds that a process which writes saves waits for the other ranks' once its training process has ended.",
)
MEMORY_DIR = Setting[Path | None](
    "DISTTRAIN_MEMORY_DIR",
    Path,
    None,
    "Folder in this node's memory for what shall outlive workers, such as copies of saves; the launcher sets it, and "
    "removes the folder when the job ends.",
)

# The flight recorder.
FLIGHT_RECORDER = Setting[bool](
    "DISTTRAIN_FLIGHT_RECORDER",
    _switch,
    True,
    "0: no flight recorder, unless the script calls `flight_recorder.enable`; 1: each job has one.",
)
FLIGHT_MARKS = Setting[bool](
    "DISTTRAIN_FLIGHT_MARKS",
    _switch,
    True,
    "0: the flight recorder sets no marks on a GPU's streams, and does not know how far the GPU has come.",
)
FLIGHT_DIR = Setting[Path | None](
    "DISTTRAIN_FLIGHT_DIR",
    Path,
    None,
    "Folder for the flight recorder's dumps, made where it is missing; unset: a private one for what hangs or dies.",
)
FLIGHT_RING_DIR = Setting[Path | None](
    "DISTTRAIN_FLIGHT_RING_DIR",
    Path,
    None,
    "Folder on this machine, best in memory, for rings: a rank's last calls while it runs; unset: the private one.",
)
FLIGHT_SOFT_LIMIT_S = Setting[float | None](
    "DISTTRAIN_FLIGHT_SOFT_LIMIT_S",
    _positive,
    None,
    "Seconds that a rank may wait before all ranks dump; unset: a quarter of the default group's timeout, 2 to 60.",
)
FLIGHT_ENDS_JOB = Setting[bool](
    "DISTTRAIN_FLIGHT_ENDS_JOB", _switch, False, "1: a rank that has waited so long then ends itself, and so the job."
)

# Kernels.
KERNELS = Setting[str](
    "DISTTRAIN_KERNELS",
    _kernels,
    "auto",
    "`auto`: Triton's kernels on GPUs, torch's operators where they can't be used, with one warning; `triton`: an "
    "error then; `reference`: torch's operators always.",
)
TRITON_INTERPRET = Setting[bool](
    "TRITON_INTERPRET", _switch, False, "1: Triton's kernels run on the CPU, slowly, for tests; Triton reads it too."
)


NCCL_HOSTID = Setting[str | None](
    "NCCL_HOSTID",
    str,
    None,
    "What NCCL takes for this rank's host; so do we, where the form of transfers depends on it.",
)


def environment() -> dict[str, str]:
    """A copy of the whole environment, to be changed and handed to a child process."""
    return dict(os.environ)


def set_for_libraries(name: str, value: str) -> None:
    """Set a variable that libraries read later in this process, and none of ours."""
    os.environ[name] = value


def table() -> str:
    """All settings as a Markdown table, in the order of this file."""
    rows = [f"| `{s.name}` | {_shown(s.default)} | {s.meaning} |" for s in SETTINGS.values()]
    return "\n".join(["| variable | default | meaning |", "| --- | --- | --- |", *rows])


def _shown(default: object) -> str:
    return "unset" if default is None else f"`{default}`"


if __name__ == "__main__":
    print("# Settings\n\nMade by `python -m disttrain.settings`; a test keeps it true.\n")  # noqa: T201
    print("Flags of `disttrain-launch` can be variables, too: [how](clusters.md#flags-as-variables).\n")  # noqa: T201
    print(table())  # noqa: T201
