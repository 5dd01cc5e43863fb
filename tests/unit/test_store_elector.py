"""An elector hears all that its store says, however it is cut into pieces."""

from __future__ import annotations

import socket
from unittest import mock

import pytest

from disttrain.store import TCPStore
from disttrain.store.connection.dial import Dialer, Link
from disttrain.store.protocol.wire import NEWS, Decoder, encode
from disttrain.store.standby.elector import Elector

STANDBY = ("10.0.0.7", 29_500)
ANSWER = encode([0, 0, [1, False]])
TOLD = encode([NEWS, 0, STANDBY])


@pytest.mark.parametrize(
    "pieces",  # one for each question
    [
        pytest.param([TOLD + ANSWER], id="before the answer"),
        pytest.param([ANSWER + TOLD], id="right behind the answer"),
        pytest.param([ANSWER + TOLD[:3], TOLD[3:] + ANSWER], id="cut in two"),
    ],
)
def test_news_of_a_standby_is_heard(pieces: list[bytes]) -> None:
    dialer = Dialer("10.0.0.6", 29_500, token=None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        elector = Elector(mock.create_autospec(TCPStore, instance=True))
        link = Link(ours, Decoder(1 << 10), 1 << 10)
        for piece in pieces:
            theirs.sendall(piece)
            assert elector._ask(link, dialer) == (1, False)
    assert dialer.standby == STANDBY
