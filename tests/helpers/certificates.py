"""A certificate for a name, signed by an authority made for the test."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certified(NamedTuple):
    """Files: the authority to trust, and what a server of the name shows."""

    authority: Path
    chain: Path
    key: Path


def certified(folder: Path, name: str) -> Certified:
    own, authority = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    signed_by = _named("An authority of the tests")
    root = _certificate(signed_by, authority.public_key(), None).sign(authority, hashes.SHA256())
    leaf = _certificate(_named(name), own.public_key(), name).issuer_name(signed_by)
    shown = leaf.sign(authority, hashes.SHA256())
    files = Certified(folder / "authority.pem", folder / "chain.pem", folder / "key.pem")
    form = serialization.Encoding.PEM
    files.authority.write_bytes(root.public_bytes(form))
    files.chain.write_bytes(shown.public_bytes(form))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files.key.write_bytes(own.private_bytes(form, *plain))
    return files


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, host: str | None
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(days=1),
        not_valid_after=now + timedelta(days=1),
    ).add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
    if host is None:
        return made.issuer_name(subject)
    return made.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
