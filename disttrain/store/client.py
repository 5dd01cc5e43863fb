"""The store's client: torch's TCPStore, blocking and safe from many threads at once."""

from __future__ import annotations

import copy
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Self

from disttrain.errors import SettingError, StoreAddressError, StoreConnectionError, StoreTimeoutError
from disttrain.settings import TOKEN_FILE
from disttrain.store.connection.addresses import is_unix
from disttrain.store.connection.channel import Channel
from disttrain.store.connection.dial import Dialer
from disttrain.store.connection.listeners import Listener, SharedChannel
from disttrain.store.durations import Duration
from disttrain.store.protocol.auth import read_token
from disttrain.store.protocol.methods import StoreMethods
from disttrain.store.protocol.wire import Address, Answer, Op
from disttrain.store.server import is_loopback
from disttrain.store.serving.process import ServerProcess, certificates_from_settings, spawn_server
from disttrain.store.tls.certificates import Certificates

if TYPE_CHECKING:
    from disttrain.store.tls.socket import ClientTls

_JOINED: Final = "disttrain/workers/joined"
_COMPLETE: Final = "disttrain/workers/complete"


class TCPStore(StoreMethods):
    """A store on a server that many processes share. Satisfies `Store`; argument names and meanings are torch's.

    Args:   host_name, port  where the server is; the master may pass port 0 and read `.port`; a node's proxy is at
            "@name" and 0 (without TLS: what it is told goes over no network);
            world_size  how many clients there will be, the master included; None, or less than 0: not known;
            is_master  start the server, in a process of its own that ends with this object or this process. With a
            token it listens on every address unless `host_name` is loopback, without one on loopback only;
            timeout  how long connecting, and by default each operation, may take;
            wait_for_workers  with a world_size, the master waits here until so many clients have come;
            multi_tenant  a master that finds the port taken joins the store that is there;
            master_listen_fd  a socket that is bound, for the server: it is the server's from now on;
            use_libuv  torch's, and what `libuvBackend` says; there is one server, which is on libuv;
            token  the job's token; None: the one in DISTTRAIN_TOKEN_FILE, if that is set;
            certificates  for TLS; None: those of the environment's settings, and without any there is no TLS;
            standby  (host, port) of who takes over when the server is gone; a server names its standby itself, so it is
            of use only to who comes when that has happened already;
            was_there  the server is known to have been there: where nobody listens any more, that is an error at once.
    Raises: StoreConnectionError, StoreAuthError; StoreError when the server cannot start; StoreTimeoutError when the
            workers don't come; SettingError for certificates that cannot be used.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Duration = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        token: str | None = None,
        certificates: Certificates | None = None,
        standby: Address | None = None,
        was_there: bool = False,
    ) -> None:
        super().__init__("TCPStore", timeout, f"{host_name}:{port}")
        if world_size == 0:
            raise SettingError("TCPStore", "a TCPStore world size cannot be 0: the master counts, too.", "Pass None.")
        self.libuvBackend = use_libuv
        self._server: ServerProcess | None = None
        self._channel: Channel | Listener | None = None
        self._listening = SharedChannel()
        self._dialer: Dialer | None = None
        self._standby = standby
        self._was_there = was_there
        if token is None and (token_file := TOKEN_FILE.read()) is not None:
            token = read_token(token_file)
        self._token = token
        certificates = certificates or certificates_from_settings()
        self._certificates = certificates
        self._tls = None if certificates is None else _client_tls(certificates)
        self.host = host_name
        self.port = _checked_port(host_name, port, is_master)
        if is_master:
            self._start_server(multi_tenant, certificates, master_listen_fd)
        try:
            self._channel = self._connected()
            if wait_for_workers and world_size is not None and world_size > 0:
                self._join(world_size, is_master)
        except BaseException:
            self.close()
            raise

    def clone(self) -> Self:
        """The same store over a connection of its own, to be closed on its own."""
        self._read_news()
        other = copy.copy(self)
        other._server = None
        other._channel = other._connected()
        return other

    def listener(self) -> Self:
        """See `Store.listener`."""
        if not self._listening.is_ours:
            self._listening = SharedChannel()  # the one that there was is the parent's
        other = copy.copy(self)
        other._server = None
        listener = self._listening.join(self._connected_anew)
        other._channel, other._dialer = listener, listener.channel.dialer
        return other

    def __repr__(self) -> str:
        server = "None" if self._server is None else f"a process of its own, {self._server.pid}"
        return f"TCPStore({self._where}, server={server})"

    def address(self) -> list[Any]:
        """Host, port, standby, timeout, token and certificates: what another process needs for a store like this."""
        self._read_news()
        certificates = None if self._certificates is None else list(self._certificates)
        (host, port), standby = self.addresses
        return [host, port, standby and list(standby), self._timeout_s, self._token, certificates]

    @property
    def addresses(self) -> tuple[Address, Address | None]:
        """The addresses of the server and of its standby, as far as the last answer tells."""
        dialer = self._dialer
        return ((self.host, self.port), self._standby) if dialer is None else (dialer.address, dialer.standby)

    def close(self) -> None:
        """End the connection, and let go of the server if this object started it. Idempotent."""
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.close()

    def new_dialer(self) -> Dialer:
        """Makes links of another client's to the same store."""
        (host, port), standby = self.addresses
        dialer = Dialer(host, port, self._token, self._tls, standby)
        dialer.was_there = self._was_there
        return dialer

    def move(self, address: Address) -> None:
        """The store is known to be at `address`: give up a link to anywhere else, and what waits there waits anew."""
        dialer = self._dialer
        if dialer is not None and self._channel is not None and address == dialer.standby:
            dialer.address, dialer.standby = address, dialer.address
            self._channel.break_link()

    def _read_news(self) -> None:
        """Learn where the server is by now: news that came since the last answer has not been read, nor that the server
        is gone. Who has lost the connection, or comes from a fork, goes by what is known."""
        with suppress(StoreConnectionError):
            self.num_keys()

    def _connected(self) -> Channel:
        self._dialer = self.new_dialer()
        return Channel(self._dialer, self._timeout_s)

    def _connected_anew(self) -> Channel:
        self._read_news()
        return Channel(self.new_dialer(), self._timeout_s)

    def _request(self, op: Op, arguments: tuple[Any, ...], wait_s: float) -> Answer:
        assert self._channel is not None
        return self._channel.request(op, arguments, wait_s)

    def _start_server(self, multi_tenant: bool, certificates: Certificates | None, listen_fd: int | None) -> None:
        # A name may resolve to an address of ours that others cannot reach; with a token, every address is safe.
        on_loopback = self._token is None or self.host == "localhost" or is_loopback(self.host)
        try:
            self._server = spawn_server(
                self.host if on_loopback else "", self.port, self._token, certificates=certificates, listen_fd=listen_fd
            )
            self.port = self._server.port
            self._where = f"{self.host}:{self.port}"
        except StoreAddressError as error:
            if not multi_tenant:
                # The words are torch's: programs look for them.
                words = f"The server socket has failed to listen on any local network address. port: {self.port}"
                problem = f"{words}: {error.problem}"
                raise StoreAddressError("TCPStore", problem, error.remedy, where=error.where) from None

    def _join(self, world_size: int, is_master: bool) -> None:
        """Count us among the workers; the master waits until all have been counted."""
        if self.add(_JOINED, 1) == world_size:
            self.set(_COMPLETE, b"")
        if not is_master:
            return
        try:
            self.wait([_COMPLETE])
        except StoreTimeoutError as error:
            # The words are torch's: programs look for them.
            progress = f"{self.add(_JOINED, 0)}/{world_size} clients joined."
            problem = f"Timed out after {self._timeout_s:g} seconds waiting for clients. {progress}"
            remedy = "See whether the others were started, with this address; or raise the timeout."
            raise StoreTimeoutError("TCPStore", problem, remedy, where=error.where) from None
        self.delete_key(_JOINED)
        self.delete_key(_COMPLETE)


def _client_tls(certificates: Certificates) -> ClientTls:
    # It loads OpenSSL, which a client without certificates does not wait for.
    from disttrain.store.tls.socket import ClientTls

    return ClientTls(certificates)


def _checked_port(host: str, port: int, is_master: bool) -> int:
    """`port`; raises SettingError when no server can have it, or no client connect to it."""
    if not (0 if is_master or is_unix(host) else 1) <= port <= 65535:
        raise SettingError(
            "TCPStore", f"port is {port}; a port is 1 to 65535 (0: any, for the master).", "Pass another."
        )
    return port
