"""What TLS costs the store: the same operations with it and without, in the same run, taken in turns.

    python benchmarks/store_tls.py [--rounds 15] [--engine pyuv]

Both sides check certificates (EC P-256) and the token. Besides the wall time of a call there is the CPU time that
client and server together take for one. torch's store has no TLS to compare with.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import trustme
from harness import command_line, finish, row
from store import placed, places

from disttrain.store import Certificates, TCPStore, new_token, spawn_server

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
LARGE = bytes(16 << 20)
CALLS = {"connect": 20, "add": 500, "get 16 B": 500, "set 16 MiB": 2, "get 16 MiB": 2}


class Side:
    """A server and a client of it."""

    def __init__(self, name: str, engine: str | None, certificates: Certificates | None) -> None:
        self.name = name
        token = new_token()
        self._server = spawn_server(HOST, 0, token, engine=engine, certificates=certificates)
        self._process = psutil.Process(self._server.pid)
        self.connect = functools.partial(
            TCPStore, HOST, self._server.port, timeout=TIMEOUT_S, token=token, certificates=certificates
        )
        self.store = self.connect()
        self.store.multi_set(["small", "large"], [b"0123456789abcdef", LARGE])
        self.cases: dict[str, Callable[[], object]] = {
            "connect": lambda: self.connect().close(),
            "add": lambda: self.store.add("counter", 1),
            "get 16 B": lambda: self.store.get("small"),
            "set 16 MiB": lambda: self.store.set("large", LARGE),
            "get 16 MiB": lambda: self.store.get("large"),
        }

    def time(self, case: str, cores: tuple[int, int]) -> tuple[float, float]:
        """(median wall time, mean CPU time of client and server on these cores) of a call, in microseconds."""
        with placed(self._server.pid, cores):
            return self._time(case)

    def _time(self, case: str) -> tuple[float, float]:
        times = []
        cpu_s = self._cpu_s()
        for _ in range(CALLS[case]):
            started_s = time.perf_counter()
            self.cases[case]()
            times.append(time.perf_counter() - started_s)
        return statistics.median(times) * 1e6, (self._cpu_s() - cpu_s) / CALLS[case] * 1e6

    def close(self) -> None:
        self.store.close()
        self._server.close()

    def _cpu_s(self) -> float:
        of_server = self._process.cpu_times()
        return time.process_time() + float(of_server.user + of_server.system)


def make_certificates(folder: Path) -> Certificates:
    """An authority's, and a certificate that both sides use."""
    authority = trustme.CA()
    issued = authority.issue_cert("store.benchmark")
    files = [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
    files[2].touch(mode=0o600)
    authority.cert_pem.write_to_path(files[0])
    issued.cert_chain_pems[0].write_to_path(files[1])
    issued.private_key_pem.write_to_path(files[2])
    return Certificates(*map(str, files), asks_clients=True)


def measure(sides: list[Side], num_rounds: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """What each round took, per case and side."""
    cases = {f"{case}, {place}": (case, cores) for case in CALLS for place, cores in places().items()}
    taken: dict[str, dict[str, list[tuple[float, float]]]] = {case: {side.name: [] for side in sides} for case in cases}
    for _ in range(num_rounds):
        for name, of_sides in taken.items():
            for side in sides:
                of_sides[side.name].append(side.time(*cases[name]))
    for side in sides:
        side.close()
    return taken


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--engine", choices=("pyuv", "uvloop"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side("plain", options.engine, None), Side("tls", options.engine, make_certificates(Path(folder)))]
        taken = measure(sides, options.rounds)
    rows = []
    for case, of_sides in taken.items():
        walls = {side: [wall_us for wall_us, _ in rounds] for side, rounds in of_sides.items()}
        # The server's have a grain of 10 ms: their mean over the rounds says more than their median.
        cpus = {side: [statistics.fmean(cpu_us for _, cpu_us in rounds)] for side, rounds in of_sides.items()}
        rows += [row(case, "us", walls), row(case, "us of CPU", cpus)]
    finish(rows, options.json)


if __name__ == "__main__":
    main()
