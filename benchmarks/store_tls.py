"""What TLS costs the store: the same operations with it and without, in the same run, taken in turns.

    python benchmarks/store_tls.py [--rounds 15] [--engine pyuv]

Both sides check certificates (EC P-256) and the token. "us" is the median wall time of a call, "cpu us" what client and
server together compute for one. torch's store has no TLS to compare with. Writes benchmarks/results/store_tls.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import trustme

from disttrain.store import Certificates, TCPStore, new_token, spawn_server

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
LARGE = bytes(16 << 20)
CALLS = {"connect": 20, "add": 500, "get 16 B": 500, "set 16 MiB": 2, "get 16 MiB": 2}
RESULTS = Path(__file__).parent / "results" / "store_tls.json"


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

    def time(self, case: str) -> tuple[float, float]:
        """(median wall time, mean CPU time of client and server) of a call, in microseconds."""
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
    taken: dict[str, dict[str, list[tuple[float, float]]]] = {case: {side.name: [] for side in sides} for case in CALLS}
    for _ in range(num_rounds):
        for case, of_sides in taken.items():
            for side in sides:
                of_sides[side.name].append(side.time(case))
    for side in sides:
        side.close()
    return taken


def summarized(taken: dict[str, dict[str, list[tuple[float, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """CPU times have a grain of 10 ms in the server: their mean over the rounds says more than their median."""
    return {
        case: {
            name: {
                "us": statistics.median(wall_us for wall_us, _ in rounds),
                "cpu_us": statistics.fmean(cpu_us for _, cpu_us in rounds),
            }
            for name, rounds in of_sides.items()
        }
        for case, of_sides in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--engine", choices=("pyuv", "uvloop"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side("plain", args.engine, None), Side("tls", args.engine, make_certificates(Path(folder)))]
        taken = measure(sides, args.rounds)
    summary = summarized(taken)
    print(f"{'':<12}{'plain us':>12}{'tls us':>12}{'ratio':>8}{'plain cpu us':>15}{'tls cpu us':>12}{'ratio':>8}")
    for case, of_sides in summary.items():
        plain, tls = of_sides["plain"], of_sides["tls"]
        walls = f"{plain['us']:>12.1f}{tls['us']:>12.1f}{tls['us'] / plain['us']:>8.2f}"
        print(f"{case:<12}{walls}{plain['cpu_us']:>15.1f}{tls['cpu_us']:>12.1f}{tls['cpu_us'] / plain['cpu_us']:>8.2f}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "commit": commit,
        "command": " ".join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "disttrain": importlib.metadata.version("disttrain")},
        "machine": {"num_cores": os.cpu_count(), "kernel": platform.release()},
        "summary": summary,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
