"""Certificates of somebody's own, as files: an authority, and a certificate of it for one address."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from runtime.config import Tls

PEM = serialization.Encoding.PEM
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Authority:
    def __init__(self, name: str = "authority"):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        unsigned = certificate(self.name, self.name, self.key, NOW - DAY, NOW + DAY)
        unsigned = unsigned.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = unsigned.sign(self.key, hashes.SHA256())


def certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, since: datetime.datetime, until: datetime.datetime
) -> x509.CertificateBuilder:
    named = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return named.serial_number(x509.random_serial_number()).not_valid_before(since).not_valid_after(until)


def write_certificates(
    folder: Path,
    address: str,
    authority: Authority | None = None,
    since: datetime.datetime = NOW - DAY,
    until: datetime.datetime = NOW + DAY,
) -> Tls:
    """For a server and a client at `address`; of an authority of their own when None."""
    authority, key = authority or Authority(), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    unsigned = certificate(name, authority.name, key, since, until).add_extension(alternative, critical=False)
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    folder.mkdir(parents=True, exist_ok=True)
    parts = {
        "ca": authority.certificate.public_bytes(PEM),
        "certificate": unsigned.sign(authority.key, hashes.SHA256()).public_bytes(PEM),
        "key": private,
    }
    for part, pem in parts.items():
        (folder / f"{part}.pem").write_bytes(pem)
    return Tls(**{part: str(folder / f"{part}.pem") for part in parts})
