"""The store's server process: `python -m disttrain.store.server`, started by `spawn_server`.

Its configuration, token included, comes as one frame on stdin; the result of the start goes as one line to stdout. When
stdin ends, its parent has closed it or is dead, and the server ends too. Only the standard library's light half is
imported here: the time from `spawn_server` to the first reply is part of every job's start.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from disttrain._python.signals import ignore_all
from disttrain.errors import DisttrainError, SettingError, StoreAddressError, StoreAuthError, StoreError
from disttrain.store.connection.addresses import is_unix, lookup_name, unix_path
from disttrain.store.connection.keepalive import set_options
from disttrain.store.protocol.handshake import Votes, to_address
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.wire import Decoder, Message, encode
from disttrain.store.proxy.address import UpstreamAddress
from disttrain.store.serving.hub import Hub
from disttrain.store.serving.shell import AnyHub, Shell
from disttrain.store.standby.follower import Follower, Following
from disttrain.store.tls.certificates import Certificates

if TYPE_CHECKING:
    from disttrain.store.proxy.upstream import Upstream
    from disttrain.store.tls.socket import ClientTls

ENGINES: Final = ("pyuv", "uvloop")
READY: Final = "ready"
FAILED: Final = "failed"
BACKLOG: Final = 4096
_GC_THRESHOLD: Final = 200_000
_LEAVE_S: Final = 1.0
"""The time for which a standby that ends tries to tell its leader."""

_CONFIG_BYTES: Final = 64 << 10


class ServerConfig(NamedTuple):
    """Configuration of a server. `engine` None: the first of ENGINES that imports; `port` 0: any that is free."""

    host: str
    port: int
    token: str | None
    engine: str | None
    linger_s: float
    limits: Limits
    certificates: Certificates | None
    following: Following | None
    """Whom it is the standby of; None: it serves from the start."""
    listen_fd: int | None = None
    """A socket that is bound, in place of `host` and `port`."""
    upstream: UpstreamAddress | None = None
    """It is the proxy of that server, to which its link goes by TLS if there are certificates; its clients' do not."""

    def to_message(self) -> Message:
        certificates = self.certificates and list(self.certificates)
        following = self.following and list(self.following)
        upstream = self.upstream and list(self.upstream)
        return [*self[:5], list(self.limits), certificates, following, self.listen_fd, upstream]

    @classmethod
    def from_message(cls, message: Message) -> ServerConfig:
        host, port, token, engine, linger_s, limits, certificates, following, listen_fd, upstream = message
        return cls(
            host,
            port,
            token,
            engine,
            linger_s,
            Limits(*limits),
            certificates and Certificates(*certificates),
            following and Following(*following),
            listen_fd,
            upstream and UpstreamAddress(upstream[0], upstream[1], to_address(upstream[2]), upstream[3]),
        )


def listen(host: str, port: int, token: str | None, listen_fd: int | None = None) -> socket.socket:
    """A listening socket, whose connections inherit its options: at `host` and `port`, or the one that is given bound.

    `host` "" means every address, of IPv6 too where the machine has it.

    Raises StoreAuthError for anything but loopback without a token, StoreAddressError when the address cannot be had,
    SettingError for what cannot be a host name.
    """
    where = f"{host or '*'}:{port}"
    try:
        if is_unix(host):
            return _listen_here(host)
        listener = _listen(host, port, token, where) if listen_fd is None else _taken_over(listen_fd, token)
        set_options(listener)
        return listener
    except UnicodeError:
        # The codec of international host names refuses empty labels and long ones.
        raise SettingError("spawn_server", f"{host!r} is not a host name.", "Check it.", where=where) from None
    except OSError as error:
        raise StoreAddressError("spawn_server", f"{_reason(error)}.", _remedy(error), where=where) from None


def _listen(host: str, port: int, token: str | None, where: str) -> socket.socket:
    if not host and token is not None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    # Names are resolved here, once, before there is a loop that could wait for them.
    family, _, _, _, address = min(
        socket.getaddrinfo(lookup_name(host) or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE),
        key=lambda info: info[0] != socket.AF_INET,
    )
    _check_token(token, str(address[0]), host or "every address", where)
    return socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)


def _listen_here(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(unix_path(host))
    listener.listen(BACKLOG)
    return listener


def _taken_over(listen_fd: int, token: str | None) -> socket.socket:
    listener = socket.socket(fileno=listen_fd)
    host, port = listener.getsockname()[:2]
    _check_token(token, host, host, f"{host}:{port}")
    listener.listen(BACKLOG)
    return listener


def _check_token(token: str | None, address: str, named: str, where: str) -> None:
    if token is None and not is_loopback(address):
        raise StoreAuthError(
            "spawn_server",
            f"a store without a token may listen on loopback only, and {named} is not loopback.",
            "Make a token with `disttrain.store.write_token(path)` and pass it, or listen on 127.0.0.1.",
            where=where,
        )


def is_loopback(address: str) -> bool:
    """True for a numeric address that only this machine can reach."""
    return address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1")


def _reason(error: OSError) -> str:
    # What Python adds to the kernel's words (`while attempting to bind on ...`) repeats the address.
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


def _remedy(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "Another process has this port: end it, pick another port, or pass port 0 for any that is free."
    if error.errno == errno.EADDRNOTAVAIL:
        return "This machine does not have this address: start the store where the address is, or use another."
    if error.errno == errno.EACCES:
        return "Ports below 1024 need privileges: pick a higher one."
    return "Check host and port."


def make_shell(engine: str | None, hub: AnyHub, linger_s: float, released: Callable[[], None]) -> Shell:
    """The shell of `engine`; None: the first that imports. Raises StoreError when none does."""
    reasons = []
    for name in ENGINES if engine is None else (engine,):
        try:
            # A compiled library that may be missing; and uvloop brings all of asyncio.
            module = importlib.import_module(f"disttrain.store.serving.shell_{name}")
        except ImportError as error:
            reasons.append(f"{name} cannot be imported ({error})")
            continue
        shell: Shell = module.make(hub, linger_s, released)
        return shell
    raise StoreError("spawn_server", f"{'; '.join(reasons)}.", "Install it, or choose another engine.")


def _read_config(descriptor: int) -> ServerConfig:
    decoder = Decoder(_CONFIG_BYTES)
    while data := os.read(descriptor, _CONFIG_BYTES):
        if messages := decoder.feed(data):
            return ServerConfig.from_message(messages[0])
    raise StoreError("store server", "stdin ended before the configuration came.", "Start it with `spawn_server`.")


def make_hub(config: ServerConfig, limits: Limits, votes: Votes | None) -> AnyHub:
    """The hub, behind TLS if there are certificates. Raises SettingError for files that cannot be used."""
    if config.upstream is not None:
        from disttrain.store.proxy.hub import ProxyHub  # a server does not wait for what proxies need

        return ProxyHub(config.token, limits)
    if config.certificates is None:
        return Hub(config.token, limits, votes=votes)
    # It loads OpenSSL, which a store without certificates does not wait for.
    from disttrain.store.tls.hub import TlsHub

    return TlsHub(config.token, limits, config.certificates, votes=votes)


def make_follower(config: ServerConfig, port: int, votes: Votes | None) -> Follower | None:
    """Whoever follows the leader for a standby that listens on `port`; its hub leaves `votes` to it."""
    if config.following is None or votes is None:
        return None
    return Follower(config.following, port, config.token, _client_tls(config), votes)


def _client_tls(config: ServerConfig) -> ClientTls | None:
    """For a link to another server. Raises SettingError for files that cannot be used."""
    if config.certificates is None:
        return None
    from disttrain.store.tls.socket import ClientTls  # as above

    return ClientTls(config.certificates)


def make_upstream(config: ServerConfig, hub: AnyHub, shell: Shell) -> Upstream | None:
    """A proxy's link to the server; None for what is no proxy. Raises StoreError where there is no server."""
    if config.upstream is None:
        return None
    from disttrain.store.proxy.hub import ProxyHub  # as above
    from disttrain.store.proxy.upstream import Upstream  # as above

    assert isinstance(hub, ProxyHub)
    return Upstream(config.upstream, config.token, _client_tls(config), hub, shell)


def _follow(follower: Follower, shell: Shell) -> None:
    """Follows a leader, in a thread: has the shell take over when the leader is dead, or stop when this standby is of
    no use."""
    try:
        replica = follower.run()
    except DisttrainError as error:
        text = str(error)
        shell.call_soon(lambda: shell.give_up(text))
        return
    if replica is not None:
        shell.call_soon(lambda: shell.take_over(replica))


def _allow_many_connections(limits: Limits) -> Limits:
    """Raise our limit of descriptors as far as we may; no more than half of them are for who has proved nothing."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY:
        return limits
    return limits._replace(num_unproved=min(limits.num_unproved, most // 2))


def main() -> int:
    """Serve until the parent, and then the last client, is gone."""
    # Ctrl-C in a terminal goes to everybody, and Slurm signals each process of a job before its time is up. Workers
    # that save then still need the store; whether it ends is the parent's decision.
    ignore_all()
    try:
        config = _read_config(sys.stdin.fileno())
        votes: Votes | None = None if config.following is None else {}
        hub = make_hub(config, _allow_many_connections(config.limits), votes)
        shell = make_shell(config.engine, hub, config.linger_s, _released)
        listener = listen(config.host, config.port, config.token, config.listen_fd)
        host, port = (config.host, 0) if is_unix(config.host) else listener.getsockname()[:2]
        follower = make_follower(config, port, votes)
        upstream = make_upstream(config, hub, shell)
    except DisttrainError as error:
        _tell(FAILED, type(error).__name__, error.problem, error.remedy)
        return 1
    # What a server keeps has no cycles; looking for them would take time with each client that comes.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    _tell(READY, host, port)
    if follower is None:
        shell.run(listener, sys.stdin.fileno())
        if upstream is not None:
            upstream.close()
        return 0
    thread = threading.Thread(target=_follow, args=(follower, shell), name="follower", daemon=True)
    thread.start()
    shell.run(listener, sys.stdin.fileno())
    follower.close()
    thread.join(_LEAVE_S)
    return 0


def _released() -> None:
    """Tell the parent, if it still listens, that the address is free: our stdout ends."""
    os.close(sys.stdout.fileno())


def _tell(*fields: object) -> None:
    try:
        os.write(sys.stdout.fileno(), encode(fields))
    except BrokenPipeError:
        # The parent has died meanwhile: its end of stdin is gone as well, and so are we in a moment.
        return


if __name__ == "__main__":
    sys.exit(main())
