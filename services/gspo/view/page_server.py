"""Serves the page of a run on this machine until Ctrl-C, or for the coordinator on a Unix socket."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.errors import InputError
from gspo.common.network.http_server import ASGIApp, HttpServer
from gspo.common.tasks import cancel_all
from gspo.view.http_api import make_page
from gspo.view.log_trial import LogTrials
from gspo.view.picture.viewed_run import ViewedRun

# Training comes before readers.
_NICENESS = 10


def serve_page(runs: Sequence[ViewedRun], port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        runs: The first, and others that it is compared with.
        port: 0 picks a free one.
        say: Gets the page's URL once the port is bound.

    Raises:
        InputError: The port cannot be bound.
    """
    try:
        server = HttpServer(_page_of(runs, LogTrials(runs[0].run_dir)), "127.0.0.1", port)
    except InputError as error:
        raise InputError("--port", f"{port} cannot be bound on 127.0.0.1", "Give another port; 0 picks one") from error
    say(f"http://{server.address}/")
    asyncio.run(server.run())


def serve_socket(runs: Sequence[ViewedRun], path: Path) -> None:
    """Serve on a Unix socket until the standard input ends: the process that holds its other end is gone then.

    It may share a machine with training, so it runs no function.

    Raises:
        InputError: The socket cannot be bound.
    """
    os.nice(_NICENESS)
    server = HttpServer(_page_of(runs), str(path), 0)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_until_input_ends(server))


async def _until_input_ends(server: HttpServer) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    serving = asyncio.create_task(server.run())
    await reader.read()
    await cancel_all({serving})


def _page_of(runs: Sequence[ViewedRun], trial: LogTrials | None = None) -> ASGIApp:
    run_dir = runs[0].run_dir
    config = read_config(run_dir / CONFIG_NAME)
    return make_page(runs, [run_dir / "export", Path(config.model.path)], trial)
