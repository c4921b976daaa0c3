"""The credentials of a process: the shared token, Redis's password, certificates.

Every file is checked here before anything starts, down to a TLS handshake in memory.
"""

import ipaddress
import os
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
from redis.exceptions import AuthenticationError

from gspo.common.config.schema import Config, TlsConfig
from gspo.common.errors import InputError

log = structlog.get_logger()
EVERY_INTERFACE = ("0.0.0.0", "::")  # noqa: S104 - recognised here, not bound
# The address of this machine for others, where its name may not be known to them; `gspo run` sets it on a cluster.
ADDRESS_VARIABLE = "GSPO_ADDRESS"
MIN_SECRET_CHARS = 16
# An agent's key begins with it, so that an expired one is not taken for that of another client.
AGENT_KEY_PREFIX = "agent-"
_MAKE_SECRETS = "`gspo certs DIR` makes secrets and certificates"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; every name but localhost counts as another machine's."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable_host(host: str) -> str:
    """The host under which others reach a bound address: this machine's if every interface is bound."""
    return os.environ.get(ADDRESS_VARIABLE) or socket.gethostname() if host in EVERY_INTERFACE else host


def shared_token(config: Config) -> str:
    """The token of calls between services; empty if there is none."""
    token = _secret("services.token_file", config.services.token_file)
    if token.startswith(AGENT_KEY_PREFIX):
        raise InputError(
            "services.token_file",
            f"the secret in {config.services.token_file} begins with {AGENT_KEY_PREFIX!r}, as keys of agents do",
            f"Write another one; {_MAKE_SECRETS}",
        )
    return token


def redis_password(config: Config) -> str:
    """Redis's password; empty if there is none."""
    return _secret("services.redis_password_file", config.services.redis_password_file)


def check_credentials(config: Config, host: str, redis_url: str | None) -> None:
    """Refuse secrets and certificates that cannot work, and servers beyond loopback without them.

    Args:
        host: The address that the services bind.
        redis_url: The Redis in use; None where the run starts its own.

    Raises:
        InputError: Names the key, the file and the rule; no secret is shown.
    """
    token, password = shared_token(config), redis_password(config)
    if not is_loopback(host) and not token:
        raise InputError(
            "services.host",
            f"{host} can be reached from other machines, and there is no token",
            f"Set services.token_file to a file with a secret, or services.host to 127.0.0.1; {_MAKE_SECRETS}",
        )
    check_tls(config.services.tls, reachable_host(host))
    if redis_url is not None:
        _check_redis_url(redis_url, password, tls=config.services.tls.is_on)
    elif not is_loopback(host):
        _check_own_redis(host, password, tls=config.services.tls.is_on)


def warn_of_plain_text(config: Config, host: str) -> None:
    """Warn of a server beyond loopback without TLS, which is allowed in a network that the user alone controls."""
    if not is_loopback(host) and not config.services.tls.is_on:
        log.warning(
            "plain_text",
            host=host,
            detail="everybody on this network can read token, prompts, rollouts and weights; services.tls.cert "
            "and services.tls.key encrypt them (`gspo certs DIR` makes both)",
        )


def _check_redis_url(url: str, password: str, *, tls: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise InputError(
            "services.redis_url", "is not a Redis address", "Write it as redis://HOST:PORT/0, or rediss:// for TLS"
        )
    if parts.scheme == "unix" or is_loopback(parts.hostname or ""):
        return
    shown = without_password(url)
    if not (password or parts.password):
        raise InputError(
            "services.redis_url",
            f"{shown} is on another machine, and there is no password for it",
            f"Set services.redis_password_file to a file with Redis's password (requirepass); {_MAKE_SECRETS}",
        )
    if tls and parts.scheme == "redis":
        raise InputError(
            "services.redis_url",
            f"{shown} is in plain text, and services.tls is set",
            "Give Redis a certificate (tls-port) and write rediss://, or reach it through a tunnel on this machine",
        )


def _check_own_redis(host: str, password: str, *, tls: bool) -> None:
    """The Redis that a run starts binds what the services bind."""
    if not password:
        raise InputError(
            "services.host",
            f"the Redis of this run can be reached on {host} from other machines, and there is no password for it",
            f"Set services.redis_password_file to a file with a secret, or services.host to 127.0.0.1; {_MAKE_SECRETS}",
        )
    if tls:
        raise InputError(
            "services.redis_url",
            "is not set, the redis-server that a run starts speaks no TLS, and services.tls is set",
            f"Start one that does, and name it: rediss://HOST:PORT/0. Or set services.host to 127.0.0.1, not {host}",
        )


def _secret(key: str, file: Path | None) -> str:
    """The one word in a file.

    Raises:
        InputError: There is no such word; it is not shown.
    """
    if file is None:
        return ""
    try:
        words = file.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise InputError(key, f"{file} is not text", f"Write one word into it; {_MAKE_SECRETS}") from error
    except OSError as error:
        raise InputError(key, f"{file} cannot be read ({error.strerror})", f"Fix the path; {_MAKE_SECRETS}") from error
    if len(words) != 1 or not words[0].isascii():
        raise InputError(
            key, f"{file} holds {len(words)} words, and a secret is one, in ASCII", f"Write it anew; {_MAKE_SECRETS}"
        )
    if len(words[0]) < MIN_SECRET_CHARS:
        raise InputError(
            key,
            f"the secret in {file} has {len(words[0])} characters, and must have {MIN_SECRET_CHARS} or more",
            f"Write a longer one; {_MAKE_SECRETS}",
        )
    return words[0]


def without_password(url: str) -> str:
    """A Redis address that can be shown."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


# Redis


def redis_arguments(url: str, config: Config) -> dict[str, Any]:
    """Arguments of a Redis client besides the address: the password, and certificates for rediss://.

    A Redis that asks for a certificate gets that of the services.
    """
    password, tls = redis_password(config), config.services.tls
    arguments: dict[str, Any] = {"password": password} if password else {}
    if url.startswith("rediss:"):
        files = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
        arguments |= {name: str(file) for name, file in files.items() if file is not None}
    return arguments


def redis_refusal(error: BaseException | None) -> InputError | None:
    """The bad input if Redis refuses the password or the certificates; None for any other error."""
    while error is not None:
        if isinstance(error, AuthenticationError):
            return InputError(
                "services.redis_password_file",
                f"Redis does not take it ({error})",
                "Write the password there that Redis has (requirepass), or leave the key out where it has none",
            )
        if isinstance(error, ssl.SSLError):
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            return InputError(
                "services.redis_url",
                f"no TLS with Redis ({reason})",
                "rediss:// needs a Redis with tls-port, and services.tls.ca the authority of its certificate",
            )
        error = error.__cause__ or error.__context__
    return None


# TLS


def check_tls(tls: TlsConfig, host: str) -> None:
    """Refuse certificates with which no call to `host` would succeed.

    Raises:
        InputError: A file is missing or broken, or key and certificate do not belong together. Or other services would
            refuse the certificate: its authority, its name or its dates are wrong.
    """
    for key, file in (("cert", tls.cert), ("key", tls.key), ("ca", tls.ca)):
        if file is not None:
            _check_readable(f"services.tls.{key}", file)
    if tls.ca is not None:
        try:
            client_context(tls)
        except ssl.SSLError as error:
            raise InputError("services.tls.ca", f"{tls.ca} holds no certificate in PEM", _MAKE_SECRETS) from error
    if not tls.is_on:
        return
    try:
        server = _server_context(tls)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            rule = f"{tls.key} is not the key of the certificate {tls.cert}"
        else:
            rule = f"{tls.cert} and {tls.key} are no certificate and key in PEM without a passphrase ({error.reason})"
        raise InputError(
            "services.tls.key", rule, f"Give the two files that were made together; {_MAKE_SECRETS}"
        ) from error
    name, authority = tls.server_name or host, tls.ca or "the authorities of this machine"
    try:
        _handshake(server, client_context(tls), name)
    except ssl.SSLCertVerificationError as error:
        raise InputError(
            "services.tls.cert",
            f"a service that trusts {authority} refuses {tls.cert} for {name} ({error.verify_message.rstrip('.')})",
            "Have it made for that name by that authority, or set services.tls.server_name to the name in it",
        ) from error


def _check_readable(key: str, file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        raise InputError(key, f"{file} cannot be read ({error.strerror})", f"Fix the path; {_MAKE_SECRETS}") from error


def client_context(tls: TlsConfig) -> ssl.SSLContext:
    """How a client checks a service's certificate."""
    return ssl.create_default_context(cafile=tls.ca)


def _server_context(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if tls.cert is not None:
        # A passphrase would be asked for on the terminal.
        context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
    return context


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """A whole TLS handshake in memory, with the result that it would have on the wire."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):  # two round trips, at most
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def pem(file: Path | None) -> bytes | None:
    """A certificate's or key's bytes, as gRPC takes them."""
    return None if file is None else file.read_bytes()
