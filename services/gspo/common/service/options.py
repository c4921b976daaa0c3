"""The command line that every service has, and how a checked process waits for its start.

`gspo run` starts the first process of each service with `--check FILE --wait`: it checks the configuration, reports
that, and imports what it needs while the others check. Then it receives a StartCommand, or it ends.
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, exit_bad_input
from gspo.common.host.module_command import POLICIES_VARIABLE
from gspo.common.network.credentials import check_credentials, shared_token, warn_of_plain_text
from gspo.common.service.logs import set_up_logs

REDIS_VARIABLE = "GSPO_REDIS_URL"
_REDIS_ON_LOOPBACK = "redis://127.0.0.1:6379/0"


@dataclass(frozen=True)
class Options:
    """The command line of a service; everything else is in the run's configuration."""

    service: str
    run_dir: Path
    redis_url: str
    name: str
    host: str
    http_port: int
    grpc_port: int
    resume: bool
    config: Config
    evaluate: bool = False
    stay: bool = False
    waits: bool = False
    leave_out: int | None = None
    policies: Path | None = None

    @property
    def token(self) -> str:
        """The shared token of the services; empty where there is none."""
        return shared_token(self.config)


def parse_options(
    service: str, check: Callable[[Config], None], *, meaning: str, checks_at_startup: bool = False
) -> Options:
    """Read the command line of `python -m gspo.SERVICE`; `--check FILE` runs the service's own check and exits.

    With `--wait` it does not exit: the options then hold the configuration alone, for `await_start`.

    Exits with code 2 and one message if the input cannot work. Under `--stay` no other process has checked before, so
    the check runs here, and the process stays, not ready, with that message.

    Args:
        checks_at_startup: The service's startup makes the same check, which takes long; it is not made here then.
    """
    parser = _parser(service, meaning)
    arguments = parser.parse_args()
    name = arguments.name.replace("{host}", socket.gethostname())
    try:
        if arguments.check:
            config = read_config(arguments.check)
            check(config)
            if not arguments.wait:
                sys.exit(0)
            report_checked()
            return Options(service, Path(), "", name, "", 0, 0, resume=False, config=config, waits=True)
        if not arguments.run_dir:
            parser.error("--run-dir or --check is needed")
        config = read_config(arguments.run_dir / CONFIG_NAME)
        host = arguments.host or config.services.host
        redis_url = (
            arguments.redis_url or os.environ.get(REDIS_VARIABLE) or config.services.redis_url or _REDIS_ON_LOOPBACK
        )
        check_credentials(config, host, redis_url)
        set_up_logs(config.services.log_level, service=service, name=name, run=config.name)
        warn_of_plain_text(config, host)
        if arguments.stay and not checks_at_startup:
            check(config)
    except InputError as error:
        if not arguments.stay:
            exit_bad_input(error)
        set_up_logs("info", service=service, name=name)
        stay(error, arguments.host or "127.0.0.1", arguments.http_port)
    words = {key: value for key, value in vars(arguments).items() if key not in ("check", "wait")}
    return Options(**words | {"service": service, "redis_url": redis_url, "name": name, "host": host, "config": config})


def await_start(options: Options) -> Options:
    """The options of the StartCommand that a waiting process receives; any other process keeps its own."""
    if not options.waits:
        return options
    receive_start_command()
    return parse_options(options.service, lambda _config: None, meaning="")


def _parser(service: str, meaning: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m gspo.{service}", description=meaning)
    parser.add_argument("--check", type=Path, metavar="FILE", help="check a configuration for this service, and exit")
    parser.add_argument("--wait", action="store_true", help="after --check, wait for a start command on stdin")
    parser.add_argument("--run-dir", type=Path, help="the run directory; its config.yaml is the configuration")
    parser.add_argument(
        "--redis-url",
        type=_redis_address,
        help=f"{REDIS_VARIABLE}, services.redis_url, or {_REDIS_ON_LOOPBACK}, by default",
    )
    parser.add_argument(
        "--name", default=f"{service}-0", help="name of this process in the run; {host} is this machine's"
    )
    parser.add_argument("--host", help="address to bind; services.host by default")
    parser.add_argument("--http-port", type=int, default=0, help="0 picks a free port")
    parser.add_argument("--grpc-port", type=int, default=0, help="0 picks a free port")
    parser.add_argument("--resume", action="store_true", help="continue the run of the run directory")
    parser.add_argument("--leave-out", type=int, metavar="STEP", help="the learner leaves this logged step out")
    parser.add_argument(
        "--policies",
        type=Path,
        metavar="PATH",
        default=os.environ.get(POLICIES_VARIABLE),
        help="file or folder in memory that the generators of a host have in common, so that one push is for all",
    )
    parser.add_argument("--evaluate", action="store_true", help="measure the given model once: a run without a learner")
    parser.add_argument(
        "--stay", action="store_true", help="on bad input stay alive, not ready, with the reason: for containers"
    )
    return parser


def stay(error: InputError, host: str, http_port: int) -> NoReturn:
    """Serve the error at /readyz until SIGTERM, then exit with code 2."""
    from gspo.common.service.health import serve_rejection  # here: a check needs no HTTP server

    serve_rejection(error, host, http_port)


def _redis_address(url: str) -> str:
    """A password on a command line could be read by every user of the machine."""
    if urlsplit(url).password is not None:
        raise argparse.ArgumentTypeError(
            f"holds a password; write it into a file and name that in services.redis_password_file, or set "
            f"{REDIS_VARIABLE}"
        )
    return url


CHECKED = b"checked\n"


@dataclass(frozen=True)
class StartCommand:
    """The start of a waiting process.

    Attributes:
        arguments: Its command line from now on, without the program.
        log: Where its output goes from now on; appended.
    """

    arguments: tuple[str, ...]
    log: str

    def line(self) -> bytes:
        """One line of JSON, as it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


def report_checked() -> None:
    with _other_end() as connection:
        connection.sendall(CHECKED)


def receive_start_command() -> None:
    """Wait for the StartCommand, and take over its command line and log; exit if the sender has ended."""
    with _other_end() as connection, connection.makefile("rb") as lines:
        line = lines.readline()
    if not line.endswith(b"\n"):
        sys.exit(0)
    start = StartCommand(**json.loads(line))
    sys.argv[1:] = start.arguments
    log = os.open(Path(start.log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)


def _other_end() -> socket.socket:
    return socket.socket(fileno=os.dup(0))
