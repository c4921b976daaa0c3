"""Makes the run directory that the containers share: `python prepare.py` before they start, from one mounted folder.

The folder holds what a user's run consists of: config.yaml, and what it names by relative paths. One that holds a
cold_start.py makes its own model and prompts first; so the examples need nothing but this repository.
An existing run continues. Not a service: it runs once and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gspo.cli.processes.exit_codes import RunError
from gspo.cli.processes.preflight import check_services
from gspo.cli.rundir.start import RunStart, lock_run_dir, new_start, prepare, with_data
from gspo.cli.rundir.user_config import UserConfig, user_config
from gspo.common.config.loading import (
    CONFIG_NAME,
    changed_keys,
    check_resume,
    parse_config,
    read_config,
    read_mapping,
    write_config,
)
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, exit_bad_input

# Name of a link to the run directory, which every service follows.
CURRENT = "current"
COLD_START = "cold_start.py"
# Names of the services in a Compose network.
HTTP_HOSTS = ("agents", "coordinator", "gateway", "generation", "learner", "reward")
# Beside this file in the image; what the conversation examples share is in it, and one of them alone is mounted.
EXAMPLES = Path(__file__).resolve().parent / "examples"
# The others look at devices and memory, and the sandbox: each does so in its own container, at its own start.
CHECKED_HERE = ("coordinator",)


def main() -> None:
    """Make model and prompts where the folder can, check the configuration, and write the run directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--input", type=Path, default=Path("/input"), help="the user's folder")
    parser.add_argument("--runs", type=Path, default=Path("/runs"), help="folder of the run directories")
    parser.add_argument("--secrets", type=Path, default=Path("/secrets"), help="folder with the file `token`")
    parser.add_argument("--redis-url", default=os.environ.get("GSPO_REDIS_URL"))
    parser.add_argument("--cold-start", default="", help="options of the folder's cold_start.py, such as '--seed 1'")
    given = parser.parse_args()
    try:
        run_dir = make_run(given.input, given.runs, given.secrets, given.redis_url, shlex.split(given.cold_start))
    except InputError as error:
        exit_bad_input(error)
    except RunError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write(f"{run_dir} is ready\n")


def make_run(folder: Path, runs: Path, secrets: Path, redis_url: str | None, cold_start: Sequence[str] = ()) -> Path:
    """The run directory of a user's folder, new or to go on with; `cold_start` are options of its cold_start.py.

    Raises:
        InputError: The folder, the configuration or the run directory cannot be used.
    """
    _check_writable(runs)
    base = _make_inputs(folder, runs / "inputs", cold_start) if (folder / COLD_START).is_file() else folder
    start = with_data(_start_of(container_config(base, runs, secrets, redis_url)))
    path = runs / f".{start.config.name}.yaml"
    write_config(start.config, path)
    asyncio.run(check_services(CHECKED_HERE, path))
    with lock_run_dir(start.run_dir):
        for note in (*filter(None, [start.from_device]), *prepare(start)):
            sys.stdout.write(f"{note}\n")
    _point(runs / CURRENT, start.run_dir)
    return start.run_dir


def _start_of(user: UserConfig) -> RunStart:
    """A new run, or one to go on with; nothing of it is removed, for its services may be at work."""
    there = user.for_cpus.run_dir / CONFIG_NAME
    if not there.is_file():
        return new_start(user)
    old = read_config(there)
    config = user.for_run(old)
    check_resume(old, config)
    changes = tuple(f"{key.name}: {before} -> {after}" for key, before, after in changed_keys(old, config))
    return RunStart(config, config.run_dir, resume=True, changes=changes)


def container_config(folder: Path, runs: Path, secrets: Path, redis_url: str | None) -> UserConfig:
    """The user's configuration, with the places that the containers give it.

    Raises:
        InputError: There is none, it is wrong, or it asks for TLS, which the containers do not speak.
    """
    given = _given(folder)
    given["run"] = {**(given.get("run") or {}), "directory": str(runs)}
    files = {"token_file": str(secrets / "token"), "redis_password_file": str(secrets / "redis_password")}
    services = given.get("services") or {}
    hosts = [*HTTP_HOSTS, *(services.get("http_hosts") or ())]
    given["services"] = {**services, **files, "redis_url": redis_url, "http_hosts": hosts}
    return user_config(given, folder)


def _check_no_tls(services: object) -> None:
    tls = services.get("tls") if isinstance(services, dict) else None
    if isinstance(tls, dict) and tls.get("cert") is not None:
        raise InputError(
            "services.tls.cert",
            f"{tls['cert']!r} is set, and in containers the doors speak plain text: health checks, the proxy and "
            "Prometheus ask them so",
            "Take services.tls out of config.yaml; the containers' network is theirs alone, and what is published "
            "beyond loopback gets its certificate from a proxy before it",
        )


def _given(folder: Path) -> dict[str, Any]:
    """Return the user's configuration, before any change."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise InputError(
            str(path),
            "is not there",
            "Set GSPO_INPUT to the folder that holds config.yaml; `gspo init DIR` writes one",
        )
    given = read_mapping(path)
    _check_no_tls(given.get("services"))
    return given


def _check_writable(runs: Path) -> None:
    try:
        runs.mkdir(parents=True, exist_ok=True)
        (runs / ".writable").touch()
        (runs / ".writable").unlink()
    except OSError as error:
        raise InputError(
            "run.directory",
            f"{runs} cannot be written by user {os.getuid()} ({error.strerror})",
            f"Give it to that user (chown {os.getuid()}), or mount another volume there",
        ) from error


def _make_inputs(folder: Path, made: Path, options: Sequence[str]) -> Path:
    """Model and prompts that a folder's cold start makes, with its configuration and what that names beside them."""
    config = parse_config(_given(folder), folder)
    before = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(EXAMPLES), before)))}
    command = [sys.executable, folder / COLD_START, made, *options]
    done = subprocess.run(command, check=False, env=environment)
    if done.returncode:
        raise RunError(f"{folder / COLD_START} failed (exit code {done.returncode}); its words are above")
    for path in (folder.resolve() / CONFIG_NAME, *_named_code(config)):
        if path.exists() and path.is_relative_to(folder.resolve()):
            _copy(path, made / path.relative_to(folder.resolve()))
    return made


def _named_code(config: Config) -> Iterator[Path]:
    """Files and folders of the user's code, wherever they are."""
    for source in config.sources:
        for _, code in source.code():
            yield from filter(None, (code.path, *code.reads))
    yield from filter(None, (config.agent.path, *config.agent.reads))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def _point(link: Path, run_dir: Path) -> None:
    """Replace the link in one step: a service that starts meanwhile sees the old run or the new one."""
    fresh = link.with_name(f".{link.name}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(run_dir.name)
    fresh.replace(link)


if __name__ == "__main__":
    main()
