"""How a store's hosts are looked up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from disttrain.store.connection.addresses import lookup_name


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "2001:db8::1"])
def test_addresses_are_looked_up_as_bytes(host: str) -> None:
    assert lookup_name(host) == host.encode()


@pytest.mark.parametrize("host", ["", "localhost", "münchen.example", "127.1", "1.2.3.4.", "a..b", "\0", "\udc80"])
def test_what_is_no_address_stays_as_it_is(host: str) -> None:
    assert lookup_name(host) == host


def test_the_codec_of_host_names_is_loaded_only_for_names(tmp_path: Path) -> None:
    code = """
import socket, sys
from disttrain.store import TCPStore
for host in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else []), "localhost"):
    store = TCPStore(host, 0, is_master=True)
    TCPStore(host, store.port).close()
    store.close()
    print("encodings.idna" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert set(answer.stdout.split()[:-1]) == {"False"}
    assert answer.stdout.split()[-1] == "True"
