"""Calls to the page of a run: a link that lets a browser in, and views that are opened in the reader's tabs."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from gspo.cli.rundir.open_run import api_access, api_url, open_run, read_instances
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.network.credentials import shared_token
from gspo.common.streams.instances import Instance
from gspo.common.streams.keys import COORDINATOR

_CALL_S = 30.0


def page_link(coordinator: Instance, config: Config) -> str:
    """The address of the run's page at its coordinator; with a token, one that lets a browser in once.

    Raises:
        httpx.HTTPError: The coordinator does not answer.
    """
    url = api_url(coordinator.http, config)
    answer = httpx.post(f"{url}/v1/page/link", json={}, timeout=_CALL_S, **_access(config))
    return f"{url}{answer.raise_for_status().json()['path']}"


def page_line(coordinator: Instance, config: Config, *, may_show_secret: bool = True) -> str:
    """The line of the terminal about the run's page; empty if the coordinator does not answer.

    Args:
        may_show_secret: Show a link that lets a browser in; otherwise how to get one.
    """
    if not shared_token(config):
        return f"page: {api_url(coordinator.http, config)}/"
    if not may_show_secret:
        return f"page: {api_url(coordinator.http, config)}/ (`gspo status RUN_DIR` prints a link that lets you in)"
    try:
        return f"page: {page_link(coordinator, config)} (lets one browser in, within ten minutes)"
    except (httpx.HTTPError, KeyError, ValueError):
        return ""


def open_view(run_dir: Path, port: int, path: str, note: str) -> str:
    """Show a view in the tabs of the page at `port`, else of the page at the run's coordinator; a line about it.

    Raises:
        InputError: No page of the run answers, none has an open tab, or it cannot show the path.
    """
    config = read_config(run_dir / CONFIG_NAME)
    # Another user's program may listen at that port: it gets no token.
    pages: list[tuple[str, dict[str, Any]]] = [(f"http://127.0.0.1:{port}", {"trust_env": False})] if port else []
    pages += [(api_url(instance.http, config), _access(config)) for instance in _coordinators(run_dir)]
    problem = "has no page that runs"
    for address, access in pages:
        body = {"path": path, "note": note, "run": config.name}
        try:
            answer = httpx.post(f"{address}/api/view", json=body, timeout=_CALL_S, **access)
            reply = answer.json()
        except (httpx.HTTPError, ValueError):
            continue
        if answer.is_success:
            return f"{address}{reply['opened']} is shown in {reply['browsers']} browser(s)"
        problem = f"at {address}: {reply.get('detail', answer.status_code)}"
    fix = "Open a tab first: `gspo view RUN_DIR`, or the link that `gspo status RUN_DIR` prints"
    raise InputError(str(run_dir), problem, fix)


def _coordinators(run_dir: Path) -> list[Instance]:
    try:
        run = open_run(run_dir)
        instances = asyncio.run(read_instances(run.redis_url, run.config)) if run.redis_url else []
    except InputError:
        return []
    return [instance for instance in instances if instance.service == COORDINATOR]


def _access(config: Config) -> dict[str, Any]:
    return api_access(config.services.tls, shared_token(config))
