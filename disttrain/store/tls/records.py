"""TLS 1.3 (RFC 8446) over bytes in memory, the same for server and client; no sockets here.

OpenSSL works on two memory buffers, one for received bytes and one for bytes to send.

Checked: the other side's certificate comes from the job's authority, is in its time, and is for this use. Not checked:
names. Schedulers choose the addresses of jobs; instead, the proof of the token covers the server's certificate (see
`auth`). Nobody sends close_notify: frames have lengths, and a client that ends sends LEAVE.

This module loads `ssl`; import it only where there are certificates.
"""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path
from typing import Final

from disttrain.errors import SettingError
from disttrain.settings import STORE_TLS_CA, STORE_TLS_CERT, STORE_TLS_KEY
from disttrain.store.tls.certificates import Certificates

RECORD_BYTES: Final = 16 << 10
"""The most that one record of TLS holds."""

# OpenSSL's buffers keep the size that they once had.
_CHUNK_BYTES: Final = 256 << 10
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"


def make_context(certificates: Certificates, *, is_server: bool) -> ssl.SSLContext:
    """The TLS configuration of this side. Raises SettingError for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    asks = not is_server or certificates.asks_clients
    context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE
    if is_server:
        # A client that comes back begins anew.
        context.num_tickets = 0
    where = f"{STORE_TLS_CA.name}={certificates.ca_file}"
    try:
        context.load_verify_locations(certificates.ca_file)
        if certificates.cert_file:
            where = f"{STORE_TLS_CERT.name}={certificates.cert_file}, {STORE_TLS_KEY.name}={certificates.key_file}"
            _check_closed(certificates.key_file)
            context.load_cert_chain(certificates.cert_file, certificates.key_file, _no_password)
    except OSError as error:
        problem = f"the files for TLS cannot be used: {reason_of(error)}."
        raise SettingError("store", problem, "Give PEM files that belong together.", where=where) from None
    return context


def _check_closed(key_file: str) -> None:
    if Path(key_file).stat().st_mode & 0o007:
        problem = f"every user of this machine may use the private key {key_file}."
        raise SettingError("store", problem, f"Run `chmod o= {key_file}`.")


def _no_password() -> str:
    # Without this, OpenSSL would ask for one on the terminal.
    raise SettingError("store", "the private key for TLS is encrypted.", "Give one that is not, of mode 0600.")


def reason_of(error: OSError) -> str:
    """The reason of OpenSSL, or of the file system, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return error.strerror or str(error)


def digest_of(cert_file: str) -> bytes:
    """SHA-256 of the first certificate in the file, which is the one that is shown."""
    text = Path(cert_file).read_text(encoding="utf-8", errors="replace")
    first = _BEGIN + text.partition(_BEGIN)[2].partition(_END)[0] + _END
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest()


class Tunnel:
    """One connection's TLS. Bytes of the wire on one side, plain ones on the other; not for two threads at once.

    Every method may raise ssl.SSLError, after which only `flush` is of use: it gives the alert for the other side.
    """

    __slots__ = ("_held", "_incoming", "_outgoing", "_tls", "is_open", "num_bytes")

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._held = b""
        self.is_open = False
        """The handshake is over, as far as this side sees."""
        self.num_bytes = 0
        """That have come, as long as somebody counts them."""

    @property
    def has_more(self) -> bool:
        """True if `read` may have something without more bytes from the wire."""
        return bool(self._incoming.pending or self._tls.pending())

    def write_wire(self, data: bytes) -> None:
        """Bytes came over the wire."""
        self._incoming.write(data)

    def shake_hands(self) -> bool:
        """Go on with the handshake; True once it is over. What must go over the wire is in `flush`."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self.is_open = True
        return True

    def read(self) -> bytes:
        """The plain bytes of one record, b"" at the stream's end. Raises ssl.SSLWantReadError when none is whole."""
        return self._tls.read(RECORD_BYTES)

    def read_all(self) -> bytes:
        """Reads all plain bytes that there are. Raises ssl.SSLZeroReturnError when the other side has ended the
        stream."""
        parts = []
        try:
            while self.has_more:
                parts.append(self.read())
        except ssl.SSLWantReadError:
            pass
        if not all(parts):
            raise ssl.SSLZeroReturnError("the other side ended TLS")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def seal(self, data: bytes) -> bytes:
        """The bytes on the wire for `data`, with all that waited before; b"" until the handshake is over."""
        if not self.is_open:
            self._held += data
            return self.flush()
        if self._held:
            data, self._held = self._held + data, b""
        written = self._tls.write(data[:_CHUNK_BYTES]) if data else 0
        if written == len(data):
            return self.flush()
        parts = [self.flush()]
        with memoryview(data) as view:
            while written < len(data):
                written += self._tls.write(view[written : written + _CHUNK_BYTES])
                parts.append(self.flush())
        return b"".join(parts)

    def flush(self) -> bytes:
        """The bytes that TLS itself has to send."""
        return self._outgoing.read()

    def peer_digest(self) -> bytes:
        """SHA-256 of the certificate that the other side has shown."""
        return hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()
