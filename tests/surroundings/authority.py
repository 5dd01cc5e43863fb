"""A certificate authority for tests of TLS, and certificates that it issues."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from disttrain.store import Certificates


class Authority:
    """Writes its own certificate, and those that it issues, into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self._num_issued = 0
        self.file = folder / "authority.pem"
        self._ca.cert_pem.write_to_path(self.file)
        self.client_only = Certificates(str(self.file))
        """For a client without a certificate of its own."""

    def issue(self, *, age: timedelta = timedelta(0), asks_clients: bool = False) -> Certificates:
        """A certificate that was good for a day, `age` ago."""
        self._num_issued += 1
        cert_file, key_file = (self._folder / f"{self._num_issued}.{kind}" for kind in ("cert", "key"))
        begin = datetime.now(UTC) - age - timedelta(hours=12)
        issued = self._ca.issue_cert("worker.test", not_before=begin, not_after=begin + timedelta(days=1))
        cert_file.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        key_file.touch(mode=0o600)
        issued.private_key_pem.write_to_path(key_file)
        return Certificates(str(self.file), str(cert_file), str(key_file), asks_clients)
