"""`disttrain-launch status`: what running jobs are doing, seen from any machine that has the token.

Jobs of this user on this machine are found by what their launchers left there (`request/whereabouts.py`), others by
`--endpoint`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from disttrain import settings
from disttrain.command_line import Parser
from disttrain.console import write
from disttrain.errors import LaunchError, StoreConnectionError, StoreError, StoreTimeoutError
from disttrain.store import PrefixStore, TCPStore, read_token
from disttrain_launch.output.terminal.screen import Outlet, Screen
from disttrain_launch.output.terminal.table import drawn, table_of
from disttrain_launch.output.view import Sight, look
from disttrain_launch.rendezvous.node0 import ROOM
from disttrain_launch.request.job import OPERATION
from disttrain_launch.request.whereabouts import Address, addresses_here

NO_JOB = 3
_WAIT_S = 5.0


def status(argv: Sequence[str]) -> int:
    """Run the command. Returns: 0, or 3 when there is no job. Raises DisttrainError."""
    options = _parser().parse_args(argv)
    shown = _Shown(is_json=options.json)
    has_seen = False
    try:
        for sights in _looks(options):
            if not sights:
                break
            shown.show(sights)
            has_seen = True
    except KeyboardInterrupt:
        pass  # That is how watching ends.
    if has_seen:
        shown.end()
        return 0
    where = f"at {options.endpoint}" if options.endpoint else "of this user on this machine"
    print(f"{OPERATION} status: there is no running job {where}.", file=sys.stderr)
    return NO_JOB


def _parser() -> Parser:
    parser = Parser(
        prog=f"{OPERATION} status",
        description="Show running jobs: nodes, workers, and what their scripts report.",
        epilog="Without --endpoint: the jobs of this user on this machine. Exit code 3: there is none.",
    )
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="where the job's store is: its --rdzv-endpoint")
    parser.add_argument("--token-file", metavar="FILE", help="the job's token, mode 0600")
    parser.add_argument("--json", action="store_true", help="one JSON object for each job")
    parser.add_argument("--watch", action="store_true", help="again every second, until the job is over or Ctrl-C")
    return parser


def _looks(options: argparse.Namespace) -> Iterator[list[Sight]]:
    stores: dict[Address, PrefixStore] = {}
    try:
        while True:
            sight = _look(stores, _given(options)) if options.endpoint else None
            yield ([] if sight is None else [sight]) if options.endpoint else _all_here(stores)
            if not options.watch:
                return
            time.sleep(1.0)
    finally:
        for store in stores.values():
            store.close()


def _all_here(stores: dict[Address, PrefixStore]) -> list[Sight]:
    sights: dict[str, Sight] = {}
    for address in addresses_here():
        if address.endpoint in sights:
            continue
        try:
            sight = _look(stores, address)
        except StoreError:
            continue  # What is there is not the job of this note.
        if sight is not None:
            sights[address.endpoint] = sight
    return [*sights.values()]


def _given(options: argparse.Namespace) -> Address:
    token_file = options.token_file or settings.TOKEN_FILE.read()
    return Address(options.endpoint, "" if token_file is None else str(token_file))


def _look(stores: dict[Address, PrefixStore], address: Address) -> Sight | None:
    host, colon, port = address.endpoint.rpartition(":")
    if not colon or not port.isdigit():
        raise LaunchError(f"{OPERATION} status", f"--endpoint {address.endpoint} is not HOST:PORT.")
    try:
        if address not in stores:
            token = read_token(Path(address.token_file)) if address.token_file else None
            store = TCPStore(host.strip("[]"), int(port), is_master=False, timeout=_WAIT_S, token=token)
            stores[address] = PrefixStore(ROOM, store)
        return look(stores[address])
    except (StoreConnectionError, StoreTimeoutError):
        return None


class _Shown:
    """Shows views as JSON, as plain lines, or on a terminal as a table that is drawn over itself."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._screen: Screen | None = None
        if not is_json and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            self._screen = Screen(Outlet(sys.stdout.fileno()), is_terminal=True)

    def show(self, sights: Sequence[Sight]) -> None:
        now_s = time.time()
        if self._is_json:
            write("\n".join(json.dumps(sight.as_json()) for sight in sights))
        elif self._screen is None:
            write("\n".join(line for sight in sights for line in table_of(sight, now_s).lines()))
        else:
            size = shutil.get_terminal_size()
            max_rows = max(size.lines // len(sights) - 4, 2)
            tables = [table_of(sight, now_s, max_rows) for sight in sights]
            is_coloured = not settings.NO_COLOR.read()
            lines = [line for table in tables for line in drawn(table, size.columns, is_coloured=is_coloured)]
            self._screen.show_table(lines)

    def end(self) -> None:
        """Leaves what is shown on the screen; the next line is below it."""
        if self._screen is not None:
            self._screen.outlet.put(b"\n")
            self._screen.outlet.flush(None)
