"""Serves the page of a run on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.errors import InputError
from gspo.common.network.http_server import HttpServer
from gspo.view.http_api import Overview, make_page


def serve_page(run_dir: Path, port: int, overview: Overview, say: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        port: 0 picks a free one.
        overview: Of the run.
        say: Gets the page's URL once the port is bound.

    Raises:
        InputError: The port cannot be bound.
    """
    config = read_config(run_dir / CONFIG_NAME)
    app = make_page(run_dir, config.name, [run_dir / "export", Path(config.model.path)], overview)
    try:
        server = HttpServer(app, "127.0.0.1", port)
    except InputError as error:
        raise InputError("--port", f"{port} cannot be bound on 127.0.0.1", "Give another port; 0 picks one") from error
    say(f"http://{server.address}/")
    asyncio.run(server.run())
