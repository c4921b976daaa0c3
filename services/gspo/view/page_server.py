"""Serves the page of a run on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.errors import InputError
from gspo.common.network.http_server import HttpServer
from gspo.view.http_api import make_page
from gspo.view.viewed_run import ViewedRun


def serve_page(runs: Sequence[ViewedRun], port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        runs: The first, and others that it is compared with.
        port: 0 picks a free one.
        say: Gets the page's URL once the port is bound.

    Raises:
        InputError: The port cannot be bound.
    """
    run_dir = runs[0].run_dir
    config = read_config(run_dir / CONFIG_NAME)
    app = make_page(runs, [run_dir / "export", Path(config.model.path)])
    try:
        server = HttpServer(app, "127.0.0.1", port)
    except InputError as error:
        raise InputError("--port", f"{port} cannot be bound on 127.0.0.1", "Give another port; 0 picks one") from error
    say(f"http://{server.address}/")
    asyncio.run(server.run())
