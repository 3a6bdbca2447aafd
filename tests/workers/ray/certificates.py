"""Certificates with which Ray, and Weir's connections to its actors, encrypt what goes between nodes."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


def certificate(folder: Path, addresses: Iterable[str] = ("127.0.0.1",)) -> dict[str, str]:
    """Write a certificate for `addresses` that its own key has signed. Return the variables with which Ray uses it."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName("localhost"), *[x509.IPAddress(ip_address(address)) for address in addresses]]
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    folder.mkdir(exist_ok=True)
    for file, content in (("key", private), ("certificate", signed.public_bytes(Encoding.PEM))):
        (folder / file).write_bytes(content)
    files = {"SERVER_CERT": "certificate", "SERVER_KEY": "key", "CA_CERT": "certificate"}
    return {"RAY_USE_TLS": "1"} | {f"RAY_TLS_{variable}": str(folder / file) for variable, file in files.items()}
