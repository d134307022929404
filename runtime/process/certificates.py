"""TLS certificates (X.509): made by the run itself, or given by the user.

A process with the run's secret derives the private key of the run's CA from it. So it can issue certificates that all other
processes trust, without a file. A certificate names process and incarnation. Its private key never leaves that process, and
ends with it: so it is valid at any time of a machine's clock."""

from __future__ import annotations

import datetime
import functools
import ipaddress
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from runtime import run_files
from runtime.config import Tls
from runtime.errors import ConfigError
from runtime.process.network import Certificates, server_name

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of NIST P-256's group, FIPS 186-4 D.1.2.3
_SINCE, _UNTIL = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2000, 2100))
_NAME = 64  # characters of a common name, RFC 5280 appendix A


def issued(authority: bytes, party: str, address: str = "") -> Certificates:
    """Issue a new certificate for `party` by the CA of the key `authority`; also for `address`, to callers from elsewhere."""
    ca, ca_certificate, key = _key(authority), _authority(authority), ec.generate_private_key(ec.SECP256R1())
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    named = _builder(party, key, ca_certificate.subject).add_extension(_names(party, address), critical=False)
    certificate = named.add_extension(usage, critical=False).sign(ca, hashes.SHA256())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Certificates(_pem(ca_certificate), _pem(certificate), private)


def _names(party: str, address: str) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = [x509.DNSName(server_name(name)) for name in (party, "")]
    with suppress(ValueError):
        names.append(x509.IPAddress(ipaddress.ip_address(address)))
    return x509.SubjectAlternativeName(names)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key(authority: bytes) -> ec.EllipticCurvePrivateKey:
    """Map random bits to a key as FIPS 186-5 A.2.1 does, without extra bits: one of 2^32 values is drawn twice as often."""
    return ec.derive_private_key(int.from_bytes(authority, "big") % (_ORDER - 1) + 1, ec.SECP256R1())


@functools.cache
def _authority(authority: bytes) -> x509.Certificate:
    key = _key(authority)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sluice run")])
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    return _builder("sluice run", key, name).add_extension(constraints, critical=True).sign(key, hashes.SHA256())


def _builder(name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_NAME])]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
    )


def written(pem: Certificates, folder: Path) -> Tls:
    """Write `pem` to files in `folder`, for another program. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    files = {key: folder / f"{key}.pem" for key in Tls.__struct_fields__}
    for path, text in zip(files.values(), msgspec.structs.astuple(pem), strict=True):
        run_files.write_private(path, text.decode())
    return Tls(**{key: str(path) for key, path in files.items()})


def check(files: Tls, read: Callable[[], Certificates]) -> None:
    """Check the user's files. Raises ConfigError if a file is no certificate or key, expired, or does not match the others."""
    paths = msgspec.structs.asdict(files)
    if faults := [f"network.tls.{key}: {path} is not a file" for key, path in paths.items() if not Path(path).is_file()]:
        raise ConfigError(faults)
    pem, where = read(), f"network.tls.certificate: {files.certificate}"
    try:
        authorities, own = x509.load_pem_x509_certificates(pem.ca), x509.load_pem_x509_certificates(pem.own)[0]
        private = serialization.load_pem_private_key(pem.key, None)
    except (ValueError, TypeError) as error:
        raise ConfigError([f"network.tls: a file is not PEM, or its key has a password: {error}"]) from None
    now = datetime.datetime.now(datetime.UTC)
    if not own.not_valid_before_utc <= now <= own.not_valid_after_utc:
        span = f"from {own.not_valid_before_utc:%Y-%m-%d %H:%M} to {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        faults.append(f"{where} is valid {span}, and it is {now:%Y-%m-%d %H:%M}")
    if own.public_key() != private.public_key():
        faults.append(f"network.tls.key: {files.key} is not the key of {files.certificate}")
    if not any(_issued_by(own, one) for one in authorities) and len(x509.load_pem_x509_certificates(pem.own)) == 1:
        faults.append(f"{where} was not issued by one of {files.ca}")
    if faults:
        raise ConfigError(faults)


def _issued_by(own: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        own.verify_directly_issued_by(authority)
    except Exception:  # noqa: BLE001 - OpenSSL's errors differ
        return False
    return True
