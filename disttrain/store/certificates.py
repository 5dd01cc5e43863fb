"""Which files TLS takes its certificates from. Nothing here reads them, or loads `ssl`: that is done where they serve.

All of a job's processes trust one certificate authority, and nothing else: the machine's own list plays no part. A
server shows a certificate; clients show theirs where the server asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from disttrain.errors import SettingError
from disttrain.settings import STORE_TLS_ASK_CLIENTS, STORE_TLS_CA, STORE_TLS_CERT, STORE_TLS_KEY


class Certificates(NamedTuple):
    """PEM files, by absolute paths.

    Args:   ca_file  the authority (one or several) that the other side's certificate must come from;
            cert_file  our certificate, then those between it and the authority; "": we have none, and can only be a
            client;  key_file  its private key, not encrypted;
            asks_clients  as a server, take only clients with a certificate.
    """

    ca_file: str
    cert_file: str = ""
    key_file: str = ""
    asks_clients: bool = False


def certificates_from_settings() -> Certificates | None:
    """What the environment's settings name; None: no TLS. Raises SettingError for a part without the others."""
    ca_file, cert_file, key_file = STORE_TLS_CA.read(), STORE_TLS_CERT.read(), STORE_TLS_KEY.read()
    asks_clients = STORE_TLS_ASK_CLIENTS.read()
    if ca_file is None:
        for setting in (STORE_TLS_CERT, STORE_TLS_KEY, STORE_TLS_ASK_CLIENTS):
            if setting.read():
                raise _incomplete(setting.name, STORE_TLS_CA.name, "the store would go without TLS")
        return None
    if (cert_file is None) != (key_file is None):
        given, missing = (STORE_TLS_CERT, STORE_TLS_KEY) if key_file is None else (STORE_TLS_KEY, STORE_TLS_CERT)
        raise _incomplete(given.name, missing.name, "one is of no use without the other")
    if cert_file is None or key_file is None:
        return Certificates(_absolute(ca_file))
    return Certificates(_absolute(ca_file), _absolute(cert_file), _absolute(key_file), asks_clients)


def _absolute(path: Path) -> str:
    # The server's process has another working directory.
    return str(path.absolute())


def _incomplete(given: str, missing: str, reason: str) -> SettingError:
    return SettingError("settings", f"{given} is set and {missing} is not; {reason}.", f"Set {missing} too.")
