"""Starts the store's server in a process of its own, and ends it.

The process shares only two pipes with ours. It reads its configuration from one, whose end tells it that we have ended,
however that was; it answers on the other. Its own session keeps the terminal's and the process group's signals away
from it.
"""

from __future__ import annotations

import os
import select
import stat
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Final

from disttrain import errors
from disttrain._python.signals import blocked_for_a_helper
from disttrain.errors import SettingError, StoreError
from disttrain.settings import (
    STORE_ENGINE,
    STORE_MAX_CLIENTS,
    STORE_MAX_FRAME_BYTES,
    STORE_MAX_KEY_BYTES,
    STORE_MAX_KEYS,
    STORE_MAX_TOTAL_BYTES,
    STORE_MAX_UNPROVED,
    STORE_MAX_UNREAD_BYTES,
    STORE_MAX_VALUE_BYTES,
    STORE_TLS_ASK_CLIENTS,
    STORE_TLS_CA,
    STORE_TLS_CERT,
    STORE_TLS_KEY,
)
from disttrain.store.connection.addresses import UNIX, is_unix
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.wire import Decoder, Message, WireError, encode
from disttrain.store.proxy.address import UpstreamAddress
from disttrain.store.server import ENGINES, READY, ServerConfig
from disttrain.store.standby.follower import Following
from disttrain.store.tls.certificates import Certificates

START_S: Final = 60.0
RELEASE_S: Final = 2.0
_ANSWER_BYTES: Final = 64 << 10


class ServerProcess:
    """A running server: the numeric `host` and the `port` it listens on, and its `pid`."""

    def __init__(
        self, host: str, port: int, process: subprocess.Popen[bytes], to_server: int, from_server: int
    ) -> None:
        self.host = host
        self.port = port
        self.pid = process.pid
        self._process = process
        self._finalizer = weakref.finalize(self, _let_go, process, to_server, from_server, os.getpid())
        # At exit the pipe closes by itself. A forked child must not hold it open for us.
        self._finalizer.atexit = False
        os.register_at_fork(after_in_child=_Forget(self._finalizer))

    @property
    def is_running(self) -> bool:
        """True if the process has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let the server go: its address is free on return. Idempotent.

        It ends at once without clients, else with its last one or when it has lingered.
        """
        self._finalizer()


class _Forget:
    """Run a finalizer; holds it weakly enough to cost nothing once it has run."""

    def __init__(self, finalizer: weakref.finalize[..., ServerProcess]) -> None:
        self._finalizer = finalizer

    def __call__(self) -> None:
        self._finalizer()


def limits_from_settings() -> Limits:
    """The limits as the environment sets them. Raises SettingError when no value would fit into a frame."""
    limits = Limits(
        STORE_MAX_KEY_BYTES.read(),
        STORE_MAX_VALUE_BYTES.read(),
        STORE_MAX_FRAME_BYTES.read(),
        STORE_MAX_UNREAD_BYTES.read(),
        STORE_MAX_KEYS.read(),
        STORE_MAX_CLIENTS.read(),
        STORE_MAX_TOTAL_BYTES.read(),
        STORE_MAX_UNPROVED.read(),
    )
    least = limits.key_bytes + limits.value_bytes + 64
    if limits.frame_bytes < least:
        raise SettingError(
            "spawn_server",
            f"{STORE_MAX_FRAME_BYTES.name} is {limits.frame_bytes}; one key and one value need {least}.",
            "Raise it, or lower the limits of keys and values.",
        )
    return limits


def certificates_from_settings() -> Certificates | None:
    """The certificates that the environment's settings name; None: no TLS. Raises SettingError for a part without the
    others."""
    ca_file, cert_file, key_file = STORE_TLS_CA.read(), STORE_TLS_CERT.read(), STORE_TLS_KEY.read()
    asks_clients = STORE_TLS_ASK_CLIENTS.read()
    if ca_file is None:
        for setting in (STORE_TLS_CERT, STORE_TLS_KEY, STORE_TLS_ASK_CLIENTS):
            if setting.read():
                raise _incomplete(setting.name, STORE_TLS_CA.name, "the store would go without TLS")
        return None
    if (cert_file is None) != (key_file is None):
        present, missing = (STORE_TLS_CERT, STORE_TLS_KEY) if key_file is None else (STORE_TLS_KEY, STORE_TLS_CERT)
        raise _incomplete(present.name, missing.name, "one is of no use without the other")
    if cert_file is None or key_file is None:
        return Certificates(_absolute(ca_file))
    return Certificates(_absolute(ca_file), _absolute(cert_file), _absolute(key_file), asks_clients)


def _absolute(path: Path) -> str:
    # The server's process has another working directory.
    return str(path.absolute())


def _incomplete(present: str, missing: str, reason: str) -> SettingError:
    return SettingError("settings", f"{present} is set and {missing} is not; {reason}.", f"Set {missing} too.")


def spawn_server(
    host: str,
    port: int,
    token: str | None = None,
    *,
    engine: str | None = None,
    linger_s: float = 5.0,
    limits: Limits | None = None,
    certificates: Certificates | None = None,
    following: Following | None = None,
    listen_fd: int | None = None,
    upstream: UpstreamAddress | None = None,
) -> ServerProcess:
    """Start a server that listens on `host` ("": every address) and `port` (0: any that is free).

    "@name" in place of a host is a socket that only this machine's processes reach.

    Args:   token  the job's token; None: whoever reaches it may use it, so `host` must be loopback;
            engine  "pyuv" or "uvloop", None: DISTTRAIN_STORE_ENGINE or the first that imports;
            linger_s  how long it serves the clients it still has once it was let go of (by `close` or our end);
            limits  None: those of the environment's settings;
            certificates  for TLS; None: those of the environment's settings, and without any there is no TLS;
            following  it is the standby of that server: takes over when that is dead, and ends when it cannot;
            listen_fd  a socket that is bound already, in place of `host` and `port`; from now on it is the server's;
            upstream  it is a proxy: passes on what its clients ask to the server there, over one connection, and ends
            when that server is gone; with certificates that connection is by TLS, and `host` is "@name".
    Raises: StoreAuthError without a token on a public address; StoreAddressError when the address cannot be had;
            StoreError when the server does not start; SettingError for an unknown engine, for what cannot be a host
            name, and for certificates that cannot be used.
    """
    engine = engine or STORE_ENGINE.read()
    if engine is not None and engine not in ENGINES:
        raise SettingError("spawn_server", f"there is no engine {engine!r}.", f"Use one of {', '.join(ENGINES)}.")
    certificates = certificates or certificates_from_settings()
    if certificates is not None and upstream is not None and not is_unix(host):
        problem = f"over TLS a proxy has its clients on its own machine, and {host!r} is an address of a network."
        raise SettingError("spawn_server", problem, f"Listen on {UNIX}NAME.")
    if certificates is not None and upstream is None and not certificates.cert_file:
        problem = "the store shall be used over TLS, and there is no certificate for its server."
        raise SettingError("spawn_server", problem, f"Set {STORE_TLS_CERT.name} and {STORE_TLS_KEY.name}.")
    if listen_fd is not None and not _is_socket(listen_fd):
        problem = f"the descriptor {listen_fd} (master_listen_fd) is no socket."
        raise SettingError("spawn_server", problem, "Give the fileno() of a socket that is bound, and detach() it.")
    config = ServerConfig(
        host,
        port,
        token,
        engine,
        linger_s,
        limits or limits_from_settings(),
        certificates,
        following,
        listen_fd,
        upstream,
    )
    server_stdin, to_server = os.pipe()
    from_server, server_stdout = os.pipe()
    try:
        with blocked_for_a_helper():
            process = subprocess.Popen(
                [sys.executable, "-m", "disttrain.store.server"],
                stdin=server_stdin,
                stdout=server_stdout,
                # `-m` looks into the working directory first: so it finds the package that we were imported from.
                cwd=Path(__file__).parents[3],
                start_new_session=True,
                pass_fds=() if listen_fd is None else (listen_fd,),
            )
    except OSError as error:
        os.close(to_server)
        os.close(from_server)
        raise StoreError("spawn_server", f"cannot start {sys.executable}: {error}.") from None
    finally:
        os.close(server_stdin)
        os.close(server_stdout)
    if listen_fd is not None:
        os.close(listen_fd)
    try:
        try:
            os.write(to_server, encode(config.to_message()))
        except BrokenPipeError:
            pass  # It is dead already; that it gives no answer says so.
        answer = _read_answer(from_server, f"{host or '*'}:{port}")
    except BaseException:
        process.kill()
        _let_go(process, to_server, from_server, os.getpid())
        raise
    return ServerProcess(answer[1], answer[2], process, to_server, from_server)


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _read_answer(descriptor: int, where: str) -> Message:
    """The server's word that it listens. Raises what it says instead."""
    decoder = Decoder(_ANSWER_BYTES)
    deadline_s = time.monotonic() + START_S
    while _readable(descriptor, deadline_s - time.monotonic()):
        data = os.read(descriptor, _ANSWER_BYTES)
        if not data:
            raise StoreError(
                "spawn_server", "the server ended before it listened.", "It said why on stderr.", where=where
            )
        try:
            messages = decoder.feed(data)
        except WireError:
            raise StoreError("spawn_server", f"the server wrote {data[:80]!r} to stdout.", where=where) from None
        if messages and messages[0][0] == READY:
            return messages[0]
        if messages:
            _, error_name, problem, remedy = messages[0]
            raise getattr(errors, error_name)("spawn_server", problem, remedy, where=where)
    raise StoreError("spawn_server", f"the server did not start within {START_S:g} s.", where=where)


def _readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1e3))


def _let_go(process: subprocess.Popen[bytes], to_server: int, from_server: int, owner_pid: int) -> None:
    os.close(to_server)
    if os.getpid() != owner_pid:
        os.close(from_server)
        process.returncode = 0
        return
    # The server's stdout ends once its address is free; it ends itself as soon as it has no clients.
    _readable(from_server, RELEASE_S)
    os.close(from_server)
    if process.poll() is None:
        threading.Thread(target=process.wait, name="disttrain-store-reaper", daemon=True).start()
