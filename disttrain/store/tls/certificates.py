"""Names the files of TLS's certificates. Nothing here reads them or loads `ssl`; the modules that use TLS do.

All of a job's processes trust one certificate authority, and nothing else: the machine's own list is not used. A server
shows a certificate; clients show theirs if the server asks for it.
"""

from __future__ import annotations

from typing import NamedTuple


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
