"""Makes certificates for tests with openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from pymoe.remote import TLS

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


@dataclass(frozen=True)
class Certificates:
    folder: Path

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def server(self, *, asks: bool = False) -> TLS:
        """Return a server's TLS; ``asks``: whether it asks clients for certificates."""
        return TLS(self.file("server.crt"), self.file("server.key"), self.file("ca.crt") if asks else None)

    def client(self, who: str | None = None) -> TLS:
        """Return the TLS of a client that trusts the authority; ``who`` names the certificate that it shows."""
        own = (self.file(f"{who}.crt"), self.file(f"{who}.key")) if who else (None, None)
        return TLS(*own, self.file("ca.crt"))


def make_certificates(folder: Path) -> Certificates:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for authority in ("ca", "strange-ca"):
        openssl(
            "req", "-x509", *KEY, "-keyout", f"{authority}.key", "-out", f"{authority}.crt", "-subj", f"/CN={authority}"
        )
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "strange-ca"), ("127.0.0.1", "ca")):
        openssl("req", *KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:10.87.0.2\n"  # the last names its host only in CN
        (folder / "names").write_text("basicConstraints=CA:FALSE\n" if name == "127.0.0.1" else names)
        signed_by = ["-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signed_by, "-out", f"{name}.crt", "-extfile", "names")
    return Certificates(folder)
