"""TLS in memory: a hub behind it, its clients and strangers. No sockets."""

from __future__ import annotations

import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.errors import SettingError, StoreAuthError
from disttrain.store import Certificates, Limits, certificates_from_settings, new_token
from disttrain.store.protocol.handshake import ClientHandshake
from disttrain.store.protocol.wire import Decoder, Op, encode
from disttrain.store.serving.hub import HANDSHAKE_S
from disttrain.store.tls.hub import HANDSHAKE_BYTES, TlsHub
from disttrain.store.tls.records import Tunnel, make_context
from tests.surroundings.authority import Authority

TOKEN = new_token()


class Client:
    """One connection to a hub behind TLS, and what was said on it."""

    def __init__(self, hub: TlsHub, connection: int, certificates: Certificates, now_s: float = 0.0) -> None:
        self.hub = hub
        self.connection = connection
        self.tunnel = Tunnel(make_context(certificates, is_server=False), is_server=False)
        self.reason = ""
        self._take(hub.connected(connection, now_s))

    def shake_hands(self, now_s: float = 0.0) -> None:
        while not self.tunnel.shake_hands():
            self.wire(self.tunnel.flush(), now_s)
        self.wire(self.tunnel.flush(), now_s)

    def wire(self, data: bytes, now_s: float = 0.0) -> None:
        self._take(self.hub.received(self.connection, data, now_s))

    def ask(self, message: list[object]) -> list[object]:
        self.wire(self.tunnel.seal(encode(message)))
        return self.read()

    def read(self) -> list[object]:
        return Decoder(1 << 28).feed(self.tunnel.read_all())[0]

    def join(self, token: str = TOKEN) -> None:
        self.shake_hands()
        handshake = ClientHandshake(token, "here", certificate=self.tunnel.peer_digest())
        handshake.conclude(self.ask(handshake.answer(self.read())))

    def _take(self, actions: list[tuple[int, bytes, str]]) -> None:
        for connection, data, reason in actions:
            if connection == self.connection:
                self.tunnel.write_wire(data)
                self.reason = reason


@pytest.fixture
def hub(authority: Authority) -> TlsHub:
    return TlsHub(TOKEN, Limits(), authority.issue())


def test_requests_and_answers_go_through(hub: TlsHub, authority: Authority) -> None:
    one, other = Client(hub, 1, authority.client_only), Client(hub, 2, authority.client_only)
    one.join()
    other.join()
    large = bytes(range(256)) * 4096
    assert one.ask([1, Op.SET, "a", large]) == [1, 0, None]
    assert other.ask([1, Op.GET, "a", 1.0]) == [1, 0, large]
    one.wire(one.tunnel.seal(encode([2, Op.BARRIER, "go", 2, 9.0])))
    hub_actions = hub.received(2, other.tunnel.seal(encode([2, Op.BARRIER, "go", 2, 9.0])), 0.0)
    assert sorted(connection for connection, _, _ in hub_actions) == [1, 2]
    assert hub.num_clients == 2
    hub.disconnected(1, 0.0)
    assert hub.num_clients == 1


def test_bytes_may_come_one_by_one(hub: TlsHub, authority: Authority) -> None:
    client = Client(hub, 1, authority.client_only)
    while not client.tunnel.shake_hands():
        for byte in client.tunnel.flush():
            client.wire(bytes([byte]))
    client.wire(client.tunnel.flush())
    assert client.read()[0] == "disttrain store"


def test_a_wrong_token_is_refused_inside_tls_too(hub: TlsHub, authority: Authority) -> None:
    client = Client(hub, 1, authority.client_only)
    with pytest.raises(StoreAuthError, match="token is not the server's"):
        client.join(new_token())
    assert hub.num_clients == 0


def test_a_proof_for_another_certificate_is_worth_nothing(hub: TlsHub, authority: Authority) -> None:
    """Somebody between the two, with a certificate of the authority, hands on what both say."""
    client = Client(hub, 1, authority.client_only)
    client.shake_hands()
    seen_by_client = b"digest of the one in between".ljust(32)
    handshake = ClientHandshake(TOKEN, "here", certificate=seen_by_client)
    verdict = client.ask(handshake.answer(client.read()))
    with pytest.raises(StoreAuthError, match="token is not the server's"):
        handshake.conclude(verdict)


def test_who_says_nothing_is_told_of_tls_after_five_seconds(hub: TlsHub) -> None:
    hub.connected(1, 0.0)
    assert hub.next_deadline_s == HANDSHAKE_S
    ((connection, hint, reason),) = hub.tick(HANDSHAKE_S)
    assert (connection, reason) == (1, "no proof of the token within 5 s")
    with pytest.raises(StoreAuthError, match=r"the server speaks TLS only.*DISTTRAIN_STORE_TLS_CA"):
        ClientHandshake(None, "here").answer(Decoder(512).feed(hint)[0])


def test_the_time_goes_on_through_the_handshake_of_tls(hub: TlsHub, authority: Authority) -> None:
    client = Client(hub, 1, authority.client_only)
    client.shake_hands(4.0)
    assert [(connection, data) for connection, data, _ in hub.tick(HANDSHAKE_S)] == [(1, b"")]
    assert hub.received(1, b"more", 5.0) == []


def test_bytes_before_the_proof_are_counted(hub: TlsHub, authority: Authority) -> None:
    # A client hello of 12 KiB, each byte in a record of its own: OpenSSL would take it all.
    client = Client(hub, 1, authority.client_only)
    hello = b"\x01\x00\x30\x00" + bytes(12 << 10)
    num_bytes = 0
    for byte in hello:
        if not client.reason:
            client.wire(b"\x16\x03\x01\x00\x01" + bytes([byte]))
            num_bytes += 6
    assert client.reason == "more than 32768 bytes before authentication"
    assert HANDSHAKE_BYTES < num_bytes <= HANDSHAKE_BYTES + 6


def test_small_records_before_the_proof_are_counted_too(hub: TlsHub, authority: Authority) -> None:
    client = Client(hub, 1, authority.client_only)
    client.shake_hands()
    client.wire(client.tunnel.seal(b"\0\0\2\0"))
    for _ in range(600):
        client.wire(client.tunnel.seal(b"x"))
    assert client.reason != ""
    assert hub.num_clients == 0


def test_clients_send_more_than_that(hub: TlsHub, authority: Authority) -> None:
    client = Client(hub, 1, authority.client_only)
    client.join()
    for number in range(4):
        assert client.ask([number, Op.SET, "a", bytes(HANDSHAKE_BYTES)])[1] == 0


def test_the_server_asks_for_certificates(authority: Authority, tmp_path: Path) -> None:
    hub = TlsHub(TOKEN, Limits(), authority.issue(asks_clients=True))
    good = Client(hub, 1, authority.issue())
    good.join()
    for number, bad, words in (
        (2, authority.client_only, "peer did not return a certificate"),
        (3, Authority(tmp_path).issue()._replace(ca_file=str(authority.file)), "unable to get local issuer"),
        (4, authority.issue(age=timedelta(days=9)), "certificate has expired"),
    ):
        client = Client(hub, number, bad)
        client.shake_hands()
        assert words in client.reason.lower()
        with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
            client.read()
    assert hub.num_clients == 1


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4\x93\1\2\3", b"\x16\x03\x01\xff\xff", b"\x80" * 40]
)
def test_what_is_not_tls_is_hung_up_on(hub: TlsHub, data: bytes) -> None:
    hub.connected(1, 0.0)
    ((_, _, reason),) = hub.received(1, data, 0.0)
    assert reason.startswith("TLS: ")


@settings(max_examples=30)
@given(pieces=st.lists(st.binary(min_size=1, max_size=60), max_size=6), cut=st.integers(0, 600))
def test_no_bytes_of_strangers_reach_the_state(authority: Authority, pieces: list[bytes], cut: int) -> None:
    hub = TlsHub(TOKEN, Limits(), authority.issue())
    client = Client(hub, 1, authority.client_only)
    client.tunnel.shake_hands()
    client.wire(client.tunnel.flush()[:cut])
    for piece in pieces:
        client.wire(piece)
    assert hub.num_clients == 0
    hub.disconnected(1, 0.0)
    assert hub.next_deadline_s is None


def test_too_many_strangers_are_dropped_behind_tls_too(authority: Authority) -> None:
    hub = TlsHub(TOKEN, Limits(num_unproved=2), authority.issue())
    late = Client(hub, 1, authority.client_only)
    late.tunnel.shake_hands()
    late.wire(late.tunnel.flush())
    hub.connected(2, 0.0)
    assert [(connection, reason != "") for connection, _, reason in hub.connected(3, 0.0)] == [(3, False), (1, True)]
    assert hub.received(1, late.tunnel.flush(), 0.0) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("CERT KEY", "TLS_CERT is set and DISTTRAIN_STORE_TLS_CA is not"),
        ("ASK_CLIENTS", "TLS_ASK_CLIENTS is set and DISTTRAIN_STORE_TLS_CA is not"),
        ("CA CERT", "TLS_CERT is set and DISTTRAIN_STORE_TLS_KEY is not"),
        ("CA KEY", "TLS_KEY is set and DISTTRAIN_STORE_TLS_CERT is not"),
    ],
)
def test_settings_that_say_half_are_refused(given: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in given.split():
        monkeypatch.setenv(f"DISTTRAIN_STORE_TLS_{name}", "1")
    with pytest.raises(SettingError, match=words):
        certificates_from_settings()


def test_paths_in_settings_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert certificates_from_settings() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTTRAIN_STORE_TLS_CA", "ca.pem")
    assert certificates_from_settings() == Certificates(f"{tmp_path}/ca.pem")


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue(), authority.issue()
    text = tmp_path / "text"
    text.write_text("no certificate")
    for bad, words in (
        (good._replace(ca_file=str(tmp_path / "none")), "No such file.*TLS_CA=.*none"),
        (good._replace(ca_file=str(text)), "TLS_CA=.*text"),
        (good._replace(cert_file=str(text)), "TLS_CERT=.*text, DISTTRAIN_STORE_TLS_KEY="),
        (good._replace(key_file=other.key_file), "key values mismatch.*Give PEM files that belong together"),
    ):
        with pytest.raises(SettingError, match=f"the files for TLS cannot be used: .*{words}"):
            make_context(bad, is_server=True)
    Path(good.key_file).chmod(0o604)
    with pytest.raises(SettingError, match=r"every user of this machine may use the private key.*chmod o="):
        make_context(good, is_server=True)


def test_an_encrypted_key_asks_nobody_for_a_password(authority: Authority, tmp_path: Path) -> None:
    good = authority.issue()
    key = serialization.load_pem_private_key(Path(good.key_file).read_bytes(), None)
    encrypted = tmp_path / "encrypted"
    encrypted.touch(mode=0o600)
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(SettingError, match="the private key for TLS is encrypted"):
        make_context(good._replace(key_file=str(encrypted)), is_server=True)
