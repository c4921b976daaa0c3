"""Bad secrets and certificates are refused with their key before anything starts, and no secret is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gspo.cli.certs import make_secrets, settings
from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.network.credentials import (
    check_credentials,
    redis_password,
    shared_token,
    warn_of_plain_text,
    without_password,
)

SECRET = "hunter2-hunter2-hunter2"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_secrets(tmp_path_factory.mktemp("cluster"), ("10.1.2.3",), days=1)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    return "secret"


def configured(minimal: dict[str, Any], folder: Path, **services: Any) -> Config:
    return parse_config(minimal | {"services": services}, folder)


def tls_of(cluster: dict[str, Path], **other: Any) -> dict[str, Any]:
    files = {"cert": cluster["cert.pem"], "key": cluster["key.pem"], "ca": cluster["ca.pem"]}
    return {name: str(path) for name, path in (files | other).items()}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_no_secret(host: str, config: Config) -> None:
    check_credentials(config, host, "redis://127.0.0.1:6379/0")
    check_credentials(config, host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu-3"])
def test_a_server_beyond_loopback_needs_a_token(
    host: str, minimal: dict[str, Any], tmp_path: Path, secret: str
) -> None:
    with pytest.raises(InputError, match="token_file") as error:
        check_credentials(configured(minimal, tmp_path), host, "redis://127.0.0.1:6379/0")
    assert error.value.where == "services.host"
    assert host in error.value.rule
    check_credentials(configured(minimal, tmp_path, token_file=secret), host, "redis://127.0.0.1:6379/0")


def test_plain_text_beyond_loopback_is_said(
    minimal: dict[str, Any], tmp_path: Path, secret: str, cluster: dict[str, Path]
) -> None:
    plain = configured(minimal, tmp_path, token_file=secret)
    encrypted = configured(minimal, tmp_path, token_file=secret, tls=tls_of(cluster))
    with capture_logs() as said:
        warn_of_plain_text(plain, "127.0.0.1")
        warn_of_plain_text(encrypted, "10.1.2.3")
        assert said == []
        warn_of_plain_text(plain, "10.1.2.3")
    assert [(line["event"], line["log_level"], line["host"]) for line in said] == [
        ("plain_text", "warning", "10.1.2.3")
    ]


@pytest.mark.parametrize("url", ["redis://redis:6379/0", "rediss://10.1.2.3:6380/0", None])
def test_a_redis_beyond_loopback_needs_a_password(
    url: str | None, minimal: dict[str, Any], tmp_path: Path, secret: str
) -> None:
    """For a configured address, and for the Redis of a run whose services bind beyond loopback."""
    with pytest.raises(InputError, match="redis_password_file") as error:
        check_credentials(configured(minimal, tmp_path, token_file=secret), "10.1.2.3", url)
    assert error.value.where == ("services.redis_url" if url else "services.host")
    check_credentials(configured(minimal, tmp_path, token_file=secret, redis_password_file=secret), "10.1.2.3", url)


def test_with_tls_nothing_beyond_loopback_is_plain(
    minimal: dict[str, Any], tmp_path: Path, secret: str, cluster: dict[str, Path]
) -> None:
    services = {"token_file": secret, "redis_password_file": secret, "tls": tls_of(cluster)}
    config = configured(minimal, tmp_path, **services)
    check_credentials(config, "10.1.2.3", "rediss://redis:6379/0")
    check_credentials(config, "10.1.2.3", "redis://127.0.0.1:6379/0")
    with pytest.raises(InputError, match=r"services\.redis_url: redis://redis:6379/0 is in plain text"):
        check_credentials(config, "10.1.2.3", "redis://redis:6379/0")
    with pytest.raises(InputError, match=r"services\.redis_url: is not set, .* speaks no TLS"):
        check_credentials(config, "10.1.2.3", None)


@pytest.mark.parametrize("key", ["token_file", "redis_password_file"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "holds 0 words"),
        (b"two words-two words", "holds 3 words"),
        (b"hunter2", "has 7 characters, and must have 16 or more"),
        (b"\xff\xfe", "is not text"),
        ("schl\u00fcssel-schl\u00fcssel".encode(), "in ASCII"),
    ],
)
def test_a_secret_is_one_long_word(
    key: str, content: bytes | None, said: str, minimal: dict[str, Any], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "it").write_bytes(content)
    with pytest.raises(InputError) as error:
        check_credentials(configured(minimal, tmp_path, **{key: "it"}), "127.0.0.1", None)
    assert error.value.where == f"services.{key}"
    assert said in error.value.rule
    assert "hunter2" not in str(error.value)


def test_a_token_does_not_look_like_an_agents_key(minimal: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "it").write_text("agent-0123456789abcdef")
    with pytest.raises(InputError, match=r"services\.token_file: the secret in .* begins with 'agent-'"):
        check_credentials(configured(minimal, tmp_path, token_file="it"), "127.0.0.1", None)


def test_a_secret_has_no_line_end(minimal: dict[str, Any], tmp_path: Path, secret: str) -> None:
    config = configured(minimal, tmp_path, token_file=secret, redis_password_file=secret)
    assert (shared_token(config), redis_password(config)) == (SECRET, SECRET)


def test_what_gspo_certs_makes_is_taken_as_it_is_printed(
    cluster: dict[str, Path], minimal: dict[str, Any], tmp_path: Path
) -> None:
    import yaml

    config = parse_config(minimal | yaml.safe_load(settings(cluster)), tmp_path)
    # By its name on any host.
    check_credentials(config, "gpu-17", "rediss://redis:6379/0")
    assert len({shared_token(config), redis_password(config)}) == 2
    readable = {path.name for path in cluster.values() if path.stat().st_mode & 0o077}
    assert readable == {"cert.pem", "ca.pem"}
    with pytest.raises(InputError, match="exists already"):
        make_secrets(cluster["token"].parent, (), days=1)


def test_a_certificate_is_for_the_host_that_others_call(
    cluster: dict[str, Path], minimal: dict[str, Any], tmp_path: Path, secret: str
) -> None:
    config = configured(minimal, tmp_path, token_file=secret, tls=tls_of(cluster))
    for host in ("127.0.0.1", "localhost", "10.1.2.3", "0.0.0.0"):
        check_credentials(config, host, "redis://127.0.0.1/0")
    rule = r"services\.tls\.cert: a service that trusts .* refuses .*cert\.pem for 10\.9\.9\.9 \("
    with pytest.raises(InputError, match=rule):
        check_credentials(config, "10.9.9.9", "redis://127.0.0.1/0")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cert": "missing"}, r"services\.tls\.cert: .*missing cannot be read \(No such file"),
        ({"key": "missing"}, r"services\.tls\.key: .*missing cannot be read \(No such file"),
        ({"ca": "missing"}, r"services\.tls\.ca: .*missing cannot be read \(No such file"),
        ({"key": "other/key.pem"}, r"services\.tls\.key: .*key\.pem is not the key of the certificate .*cert\.pem"),
        ({"key": "other/cert.pem"}, r"services\.tls\.key: .* no certificate and key in PEM"),
        ({"cert": "secret"}, r"services\.tls\.key: .* no certificate and key in PEM"),
        ({"ca": "secret"}, r"services\.tls\.ca: .*secret holds no certificate in PEM"),
        ({"ca": "other/ca.pem"}, r"services\.tls\.cert: a service that trusts .*ca\.pem refuses .*issuer"),
    ],
)
def test_files_that_do_not_belong_together_are_named(
    wrong: dict[str, str], said: str, cluster: dict[str, Path], minimal: dict[str, Any], tmp_path: Path, secret: str
) -> None:
    make_secrets(tmp_path / "other", (), days=1)
    config = configured(minimal, tmp_path, tls=tls_of(cluster) | wrong)
    with pytest.raises(InputError, match=said):
        check_credentials(config, "127.0.0.1", None)


def test_a_certificate_whose_time_is_over_is_refused(
    cluster: dict[str, Path], minimal: dict[str, Any], tmp_path: Path
) -> None:
    old = make_secrets(tmp_path / "old", (), days=0)
    with pytest.raises(InputError, match=r"services\.tls\.cert: .*expired"):
        check_credentials(configured(minimal, tmp_path, tls=tls_of(old)), "127.0.0.1", None)


def test_a_password_in_an_address_is_refused_and_not_shown(minimal: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"services\.redis_url: holds a password.*redis_password_file") as error:
        configured(minimal, tmp_path, redis_url=f"redis://:{SECRET}@h/0")
    assert SECRET not in str(error.value)


def test_a_shown_address_has_no_password() -> None:
    assert without_password("rediss://me:p@ss@host:6380/1") == "rediss://host:6380/1"
    assert without_password("redis://host/0") == "redis://host/0"
