"""`gspo certs`: makes the secrets and the certificate of a cluster, once, for all its hosts.

All services share one certificate under one server name. The key of the signing authority is thrown away, so nothing
can be signed by it later; a new set replaces the old one.
"""

import datetime
import ipaddress
import secrets
import socket
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gspo.cli.processes.redis_server import write_secret
from gspo.common.errors import InputError

SERVER_NAME, _AUTHORITY = "gspo", "gspo authority"
TOKEN, PASSWORD, CERT, KEY, CA = "token", "redis-password", "cert.pem", "key.pem", "ca.pem"
# Clocks of other machines are not this one's.
_BEFORE = datetime.timedelta(hours=1)


def make_secrets(folder: Path, hosts: tuple[str, ...], days: int) -> dict[str, Path]:
    """Write token, Redis password, certificate, key and authority; returns their paths by name.

    Args:
        hosts: Names and addresses, beside this machine's own, under which clients may call the HTTP APIs.

    Raises:
        InputError: One of the files is there already.
    """
    paths = {name: folder / name for name in (TOKEN, PASSWORD, CERT, KEY, CA)}
    for path in paths.values():
        if path.exists():
            raise InputError(str(path), "exists already", "Give another folder: secrets in use are not overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = (
        _named(_AUTHORITY, _AUTHORITY, ca_key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    write_secret(paths[TOKEN], f"{secrets.token_urlsafe(32)}\n".encode())
    write_secret(paths[PASSWORD], f"{secrets.token_urlsafe(32)}\n".encode())
    pem = serialization.Encoding.PEM
    write_secret(paths[KEY], key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    paths[CERT].write_bytes(_certificate(key, ca_key, hosts, days).public_bytes(pem))
    paths[CA].write_bytes(authority.public_bytes(pem))
    return paths


def settings(paths: dict[str, Path]) -> str:
    """The lines of config.yaml that use the files."""
    place = {name: path.resolve() for name, path in paths.items()}
    return "\n".join(
        (
            "services:",
            f"  token_file: {place[TOKEN]}",
            f"  redis_password_file: {place[PASSWORD]}",
            f"  tls: {{cert: {place[CERT]}, key: {place[KEY]}, ca: {place[CA]}, server_name: {SERVER_NAME}}}",
        )
    )


def _named(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _certificate(
    key: ec.EllipticCurvePrivateKey, ca_key: ec.EllipticCurvePrivateKey, hosts: tuple[str, ...], days: int
) -> x509.Certificate:
    names = dict.fromkeys((SERVER_NAME, "localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts))
    both_ways = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # Redis asks clients for one
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        _named(SERVER_NAME, _AUTHORITY, key, days)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_ways), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **unused)
