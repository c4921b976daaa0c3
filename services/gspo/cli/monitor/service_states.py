"""The services of a run for its page: their heartbeats while it runs, later the ends of their logs.

Heartbeats are read and worded by the code of `gspo status`.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo.cli.monitor.drawing import process_cells
from gspo.cli.monitor.status import StatusPage, instance_lines
from gspo.cli.monitor.view import ServiceProcess
from gspo.cli.monitor.watcher import disk_full_message, generator_problems
from gspo.cli.rundir.start import SERVICES_DIR, supervisor_facts
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.streams.instances import Instance
from gspo.view.picture.viewed_run import ServiceState, ServiceStates

# A reader of the page waits so long for a Redis that may be gone.
_ANSWER_S = 2.0
_TAIL_BYTES = 32_768


def service_states(run_dir: Path, config: Config | None) -> ServiceStates:
    """The state of each service, in at most a few seconds. It must not be called in an event loop.

    Args:
        config: None where it cannot be read: then the logs alone tell.
    """
    instances, problem = _heartbeats(run_dir, config)
    if instances:
        lines = [*generator_problems(instances), *instance_lines(instances)]
        lines += filter(None, [disk_full_message(run_dir)])
        source = "From their heartbeats when this page was loaded, as in gspo status."
        return ServiceStates(source, [_by_heartbeat(instance) for instance in instances], lines)
    why = f"The run's Redis cannot be asked: {problem}." if problem else "No service of the run has a heartbeat."
    source = f"{why} These are the last records in their logs, in {SERVICES_DIR}/ of the run directory."
    return ServiceStates(source, list(_by_logs(run_dir / SERVICES_DIR)), [])


def _heartbeats(run_dir: Path, config: Config | None) -> tuple[list[Instance], str]:
    """The instances, and why they are unknown where Redis does not answer."""
    # Without an address nothing is asked, and no lock file is made in a folder that is only looked at.
    if config is None or not (config.services.redis_url or supervisor_facts(run_dir).get("redis_url")):
        return [], ""
    try:
        return asyncio.run(_asked(StatusPage(run_dir, config))), ""
    except TimeoutError:
        return [], f"it did not answer within {_ANSWER_S:g} s"
    except InputError as error:
        return [], str(error).removesuffix(".")


async def _asked(status_page: StatusPage) -> list[Instance]:
    async with asyncio.timeout(_ANSWER_S):
        return await status_page.instances()


def _by_heartbeat(instance: Instance) -> ServiceState:
    for_, what = process_cells(ServiceProcess(instance.name, instance.beat_unix_s, instance, ready=True))
    return ServiceState(instance.name, for_.plain, what.plain)


def _by_logs(folder: Path) -> Iterator[ServiceState]:
    for path in sorted(folder.glob("*-*.log")):  # redis.log has other lines
        record = _last_record(path)
        event = str(record.get("event", "")).replace("_", " ") or "no record at the end of its log"
        reason = f": {record['reason']}" if record.get("reason") else ""
        yield ServiceState(path.stem, str(record.get("timestamp", ""))[:19].replace("T", " "), f"{event}{reason}")


def _last_record(path: Path) -> dict[str, Any]:
    """The last JSON line among the last _TAIL_BYTES of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                return record
    return {}
