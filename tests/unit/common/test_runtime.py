"""Which addresses a service may bind, and under which name others reach it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from services.common.config import Config
from services.common.errors import InputError
from services.common.probes import HttpServer
from services.common.runtime import check_bind


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_no_token(host: str, config: Config) -> None:
    check_bind(host, config)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu-3"])
def test_a_bind_beyond_loopback_needs_one(host: str, config: Config, given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="token_file") as error:
        check_bind(host, config)
    assert error.value.where == "services.host"
    assert host in error.value.rule
    (tmp_path / "token").write_text("secret")
    check_bind(host, Config.model_validate(given | {"services": {"token_file": tmp_path / "token"}}))


async def _app(*_: object) -> None:
    raise AssertionError("nobody calls")


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())])
def test_the_address_told_to_others_is_one_they_can_call(host: str, name: str) -> None:
    """0.0.0.0 in a heartbeat would send every caller to itself."""
    address = HttpServer(_app, host, 0).address
    assert address.rpartition(":")[0] == name
    assert int(address.rpartition(":")[2]) > 0
