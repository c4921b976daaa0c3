"""`gspo doctor`: checks the machine, and optionally a configuration, and advises what to change.

findings.py has the single checks of the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspo.cli import findings
from gspo.cli.findings import DoctorFinding, Level
from gspo.cli.processes.exit_codes import RunError
from gspo.cli.processes.placement import NO_GPUS, Placement, place
from gspo.cli.processes.preflight import check_services
from gspo.cli.processes.programs import check_ports, process_names
from gspo.cli.processes.redis_server import check_redis
from gspo.cli.rundir.plan import config_file_of
from gspo.common.config.loading import read_config
from gspo.common.config.reward import RewardConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import GIB, Gpu, visible_gpus
from gspo.common.model.files import ModelFiles, read_model_files
from gspo.common.model.memory_needs import host_bytes, num_trained, snapshot_bytes, training_bytes
from gspo.common.streams.keys import GENERATION, LEARNER, SERVICES

_STYLES = {"OK": "green", "warning": "yellow", "problem": "bold red"}
# Policies that the learner keeps for pushes: the newest, and the previous one for changes.
_PUBLISHED = 2
# Policies in the memory of a generator with a GPU: the served one and the next one.
_STAGED = 2
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def doctor(config_file: Path | None, console: Console) -> int:
    """Print the findings; the exit code is 1 with a problem, else 0.

    Raises:
        InputError: The configuration itself is wrong.
    """
    if config_file is not None:
        config_file = config_file_of(config_file)
    results = list(_machine() if config_file is None else _run(read_config(config_file), config_file))
    table = Table(box=None, show_header=False, padding=(0, 1))
    for finding in results:
        advice = f"\n{finding.advice}" if finding.advice else ""
        table.add_row(Text(finding.level, _STYLES[finding.level]), finding.name, Text(finding.text + advice))
    console.print(table)
    problems = sum(finding.level == "problem" for finding in results)
    console.print(f"{problems} problem(s)" if problems else "no problems", style="bold")
    return 1 if problems else 0


def _machine() -> Iterator[DoctorFinding]:
    yield findings.python()
    yield from findings.packages()
    yield findings.cores()
    yield findings.gpu()
    yield findings.memory(None)
    yield findings.disk(Path(), None)
    yield findings.shared_memory(None)
    yield findings.compiler()
    yield findings.numa()
    yield findings.sandbox(RewardConfig.model_fields["sandbox_minimum"].default)
    yield findings.redis()


def _run(config: Config, config_file: Path) -> Iterator[DoctorFinding]:
    """The findings of the machine against the needs of this run, and the checks of the run."""
    model, files = _model(config)
    yield findings.python()
    yield from findings.packages()
    yield findings.cores()
    yield findings.gpu()
    yield model
    yield findings.memory(_memory_gib(config, files, on_gpus=bool(_gpus())))
    yield findings.disk(config.run.directory, _disk_gib(config, files))
    yield findings.shared_memory(_staged_gib(config, files))
    yield findings.compiler()
    yield findings.numa()
    yield findings.sandbox(config.reward.sandbox_minimum)
    yield _redis(config)
    yield _ports(config)
    yield from _checks(config, config_file)


def _model(config: Config) -> tuple[DoctorFinding, ModelFiles | None]:
    """The model folder, and its files where they can be read."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        text = f"{config.model.path} is not a folder here"
        return DoctorFinding(
            "model", "warning", text, "It is used as a name on a hub and downloaded at the start"
        ), None
    try:
        files = read_model_files(folder, allow_pickle=config.model.allow_pickle)
    except InputError as error:
        return DoctorFinding("model", "problem", error.rule, error.fix), None
    return DoctorFinding("model", "OK", f"{folder}: {files.num_parameters:,} parameters"), files


def _gpus() -> list[Gpu]:
    """The GPUs of this machine; none if their choice is wrong, which the finding of the placement reports."""
    try:
        return visible_gpus()
    except InputError:
        return []


def _memory_gib(config: Config, files: ModelFiles | None, *, on_gpus: bool = False) -> float | None:
    """Host memory of all local ranks, the policies kept for pushes, and the weights and caches of all generators.

    With GPUs, weights and cache of an engine are there, and each generator keeps two copies of the policy on the host.
    """
    if files is None:
        return None
    ranks = max(1, config.learner.ranks)
    a_rank = host_bytes(files, training_bytes(config, files, ranks), on_gpu=on_gpus)
    training = a_rank * ranks + snapshot_bytes(config, files)
    policy = files.num_parameters * _DTYPE_BYTES[config.generation.dtype]
    generation = config.generation
    cache_gib = 0.0 if on_gpus else generation.kv_cache_gb
    weights = training + policy * (_PUBLISHED + generation.replicas * (_STAGED if on_gpus else 1))
    return findings.PROCESSES_GIB + weights / GIB + cache_gib * generation.replicas


def _staged_gib(config: Config, files: ModelFiles | None) -> float | None:
    if files is None:
        return None
    return files.num_parameters * _DTYPE_BYTES[config.generation.dtype] * config.generation.replicas / GIB


def _disk_gib(config: Config, files: ModelFiles | None) -> float | None:
    """Disk space of checkpoints, one more while it is written, exports, and the log.

    A checkpoint has two moments in fp32 of each trained weight, and without LoRA all weights.
    """
    if files is None:
        return None
    trained = num_trained(config.learner.lora, files)
    # The best version, and one that is not measured yet.
    exports = 3 if config.evaluation.keep_best else 1
    return 1.0 + (12 * trained * (config.run.keep_checkpoints + 1) + 4 * files.num_parameters * exports) / GIB


def _redis(config: Config) -> DoctorFinding:
    if config.services.redis_url is None:
        return findings.redis()
    try:
        asyncio.run(check_redis(config.services.redis_url, config))
    except InputError as error:
        return DoctorFinding("Redis", "problem", f"{error.where}: {error.rule}", error.fix)
    return DoctorFinding("Redis", "OK", "the Redis of services.redis_url answers")


def _ports(config: Config) -> DoctorFinding:
    try:
        check_ports(config)
    except InputError as error:
        return DoctorFinding("ports", "problem", f"{error.where}: {error.rule}", error.fix)
    return DoctorFinding("ports", "OK", "free")


def _checks(config: Config, config_file: Path) -> Iterator[DoctorFinding]:
    """The placement of the GPUs, and each service's own check with its GPUs."""
    try:
        placement = place(config, process_names(config, SERVICES), visible_gpus())
    except InputError as error:
        yield DoctorFinding("GPU placement", "problem", f"{error.where}: {error.rule}", error.fix)
        placement = None
    if placement and placement.assignments:
        idle = "More generators (generation.replicas) or ranks (learner.ranks) would use the rest"
        yield DoctorFinding("GPU placement", "OK", placement.table(), idle if placement.free else "")
    # Without a placement an engine would be checked against GPUs that it does not get.
    checked = [service for service in SERVICES if placement or service not in (GENERATION, LEARNER)]
    yield from merge_findings([_check(service, config_file, placement or NO_GPUS) for service in checked])


def _check(service: str, config_file: Path, placement: Placement) -> DoctorFinding:
    try:
        warnings = asyncio.run(check_services((service,), config_file, placement))
    except RunError as error:
        return DoctorFinding(service, "problem", str(error))
    return DoctorFinding(service, "warning" if warnings else "OK", "; ".join(warnings) or "passed")


def merge_findings(checks: list[DoctorFinding]) -> Iterator[DoctorFinding]:
    """The services' checks; equal texts become one finding, because several services read the same model folder."""
    services: dict[tuple[Level, str], list[str]] = {}
    for check in checks:
        services.setdefault((check.level, check.text), []).append(check.name)
    for (level, text), names in services.items():
        yield DoctorFinding(f"check of {', '.join(names)}", level, text)
