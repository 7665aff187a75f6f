"""A certificate for a name, made for the test."""

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
    own, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder(
            issuer_name=subject,
            subject_name=subject,
            public_key=own.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(days=1),
            not_valid_after=now + timedelta(days=1),
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(own, hashes.SHA256())
    )
    chain, key, form = folder / "chain.pem", folder / "key.pem", serialization.Encoding.PEM
    chain.write_bytes(certificate.public_bytes(form))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key.write_bytes(own.private_bytes(form, *plain))
    return Certified(chain, chain, key)
