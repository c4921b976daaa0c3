"""Under which name others reach a service."""

from __future__ import annotations

import socket

import pytest

from gspo.common.network.http_server import HttpServer


async def _app(*_: object) -> None:
    raise AssertionError("nobody calls")


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())])
def test_the_address_told_to_others_is_one_they_can_call(host: str, name: str) -> None:
    """0.0.0.0 in a heartbeat would send every caller to itself."""
    address = HttpServer(_app, host, 0).address
    assert address.rpartition(":")[0] == name
    assert int(address.rpartition(":")[2]) > 0
