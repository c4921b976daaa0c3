"""Clients of the services' HTTP APIs: http or https, the shared token, the trusted certificates."""

from __future__ import annotations

from typing import Any

import httpx

from gspo.common.config.schema import Config
from gspo.common.config.services import TlsConfig
from gspo.common.network.credentials import client_context, shared_token


def url(address: str, config: Config) -> str:
    """The address of a heartbeat as a URL."""
    return f"{'https' if config.services.tls.is_on else 'http'}://{address}"


def client(config: Config, *, timeout_s: float) -> httpx.AsyncClient:
    """A client of the services of one run, with the token of that run."""
    tls, token = config.services.tls, shared_token(config)

    async def ask_by_name(request: httpx.Request) -> None:
        _ask_by_name(request, tls)

    hooks = {"request": [ask_by_name]}
    return httpx.AsyncClient(timeout=timeout_s, headers=bearer(token), event_hooks=hooks, **_settings(tls))


def blocking_client(base_url: str, token: str, tls: TlsConfig, *, timeout_s: float) -> httpx.Client:
    """A blocking client of one HTTP API."""
    hooks = {"request": [lambda request: _ask_by_name(request, tls)]}
    return httpx.Client(
        base_url=base_url, timeout=timeout_s, headers=bearer(token), event_hooks=hooks, **_settings(tls)
    )


def bearer(token: str) -> dict[str, str]:
    """The header with the token; none without a token."""
    return {"authorization": f"Bearer {token}"} if token else {}


def _settings(tls: TlsConfig) -> dict[str, Any]:
    # A proxy of the environment would not reach services of this machine or cluster.
    return {"trust_env": False, "verify": client_context(tls)}


def _ask_by_name(request: httpx.Request, tls: TlsConfig) -> None:
    """Expect services.tls.server_name in the certificate, if it is set."""
    if tls.server_name:
        request.extensions = {**request.extensions, "sni_hostname": tls.server_name}
