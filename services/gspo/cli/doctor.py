"""`gspo doctor`: checks the machine, and optionally a configuration, and advises what to change.

findings.py has the single checks of the machine.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspo.cli import findings
from gspo.cli.findings import DoctorFinding, Level
from gspo.cli.processes.exit_codes import RunError
from gspo.cli.processes.longest_rollout import check_longest, longest_rollout
from gspo.cli.processes.placement import NO_GPUS, Placement, place
from gspo.cli.processes.planned_memory import PlannedModel, memory_table, read_planned_model
from gspo.cli.processes.preflight import check_services
from gspo.cli.processes.programs import check_ports, process_names, services_of
from gspo.cli.processes.redis_server import check_redis
from gspo.cli.rundir.start import config_file_of
from gspo.cli.rundir.user_config import UserConfig, read_user_config
from gspo.common.config.loading import CONFIG_NAME, write_config
from gspo.common.config.reward import RewardConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import GIB, visible_gpus
from gspo.common.model.files import ModelFiles, model_folder, read_model_files
from gspo.common.model.trained_parameters import num_trained, trained_size
from gspo.common.planning.host_memory import PROCESSES_GIB, host_memory
from gspo.common.planning.memory import (
    learner_host_bytes,
    policy_bytes,
    published_bytes,
)
from gspo.common.streams.keys import GENERATION, LEARNER, SERVICES

_STYLES = {"OK": "green", "warning": "yellow", "problem": "bold red"}
_SANDBOX_MINIMUM = RewardConfig.model_fields["sandbox_minimum"].default


def doctor(config_file: Path | None, console: Console, *, samples: bool = False) -> int:
    """Print the findings; the exit code is 1 with a problem, else 0.

    Args:
        samples: Also sample some answers and score them, unless there is a problem before.

    Raises:
        InputError: The configuration itself is wrong.
    """
    user = read_user_config(config_file_of(config_file)) if config_file else None
    config, device = _on_device(user) if user else (None, None)
    results = list(_findings(config))
    if config and device:
        results += [device, *findings.data(config), *_checks(config)]
    if config_file and config and samples and not any(finding.level == "problem" for finding in results):
        from gspo.cli.run.sample import sample  # here: it starts services, which doctor alone does not need

        results += sample(config_file_of(config_file), config, console)
    table = Table(box=None, show_header=False, padding=(0, 1))
    for finding in results:
        advice = f"\n{finding.advice}" if finding.advice else ""
        table.add_row(Text(finding.level, _STYLES[finding.level]), finding.name, Text(finding.text + advice))
    console.print(table)
    for finding in results:
        if finding.table:
            console.print(f"\n{finding.table}\n", highlight=False, soft_wrap=True)
    problems = sum(finding.level == "problem" for finding in results)
    console.print(f"{problems} problem(s)" if problems else "no problems", style="bold")
    return 1 if problems else 0


def _on_device(user: UserConfig) -> tuple[Config, DoctorFinding]:
    """The configuration with the defaults of this machine, and which values these are."""
    try:
        config = user.for_device()
        note = user.note(config)
    except InputError as error:
        return user.for_cpus, DoctorFinding.refused("device", error)
    return config, DoctorFinding("device", "OK", note or "no value follows from it: every such key is set")


def _findings(config: Config | None) -> Iterator[DoctorFinding]:
    """The findings of the machine, against the needs of a run where its configuration is given."""
    model, files = _model(config) if config else (None, None)
    memory_gib, disk_gib = _needs_gib(config, files) if config and files else (None, None)
    yield findings.python()
    yield from findings.packages()
    yield findings.cores()
    yield findings.gpu()
    if model:
        yield model
    yield findings.memory(memory_gib)
    yield findings.disk(config.run.directory if config else Path(), disk_gib)
    yield findings.shared_memory()
    yield findings.compiler()
    yield findings.numa()
    yield findings.sandbox(config.reward.sandbox_minimum if config else _SANDBOX_MINIMUM)
    if config is None or (url := config.services.redis_url) is None:
        yield findings.redis()
    else:
        yield _tried("Redis", lambda: asyncio.run(check_redis(url, config)), "the Redis of services.redis_url answers")
    if config:
        yield _tried("ports", lambda: check_ports(config), "free")


def _tried(name: str, check: Callable[[], object], passed: str) -> DoctorFinding:
    """The finding of a check that refuses by an error."""
    try:
        check()
    except InputError as error:
        return DoctorFinding.refused(name, error)
    return DoctorFinding(name, "OK", passed)


def _model(config: Config) -> tuple[DoctorFinding, ModelFiles | None]:
    """The model folder, and its files where they can be read."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        advice = "It is used as a name on a hub and downloaded at the start"
        return DoctorFinding("model", "warning", f"{config.model.path} is not a folder here", advice), None
    try:
        files = read_model_files(model_folder(config.model), allow_pickle=config.model.allow_pickle)
    except InputError as error:
        return DoctorFinding("model", "problem", error.rule, error.fix), None
    return DoctorFinding("model", "OK", f"{folder}: {files.num_parameters:,} parameters"), files


def _needs_gib(config: Config, files: ModelFiles) -> tuple[float, float]:
    """GiB of memory and of disk that a run needs.

    On the disk are checkpoints, one more while it is written, exports, and the log. A checkpoint has two moments in
    fp32 of each trained weight, and without LoRA all weights.
    """
    try:
        on_gpus = bool(visible_gpus())
    except InputError:  # their choice is wrong, which the finding of the placement reports
        on_gpus = False
    trained = num_trained(config.learner.lora, files)
    # The best version, and one that is not measured yet.
    exports = 3 if config.evaluation.keep_best else 1
    disk = 1.0 + (12 * trained * (config.run.keep_checkpoints + 1) + 4 * files.num_parameters * exports) / GIB
    return _memory_gib(config, files, on_gpus=on_gpus), disk


def _memory_gib(config: Config, files: ModelFiles, *, on_gpus: bool) -> float:
    """Host memory of all local ranks, the policies kept for pushes, and the weights and caches of all generators.

    With GPUs, weights and cache of an engine are there.
    """
    ranks, size, replicas = config.learner.ranks, trained_size(config, files), config.generation.replicas
    if on_gpus:
        return host_memory(config, size, ranks=ranks, ranks_here=ranks, generators_here=replicas).total / GIB
    training = learner_host_bytes(config, size, ranks, ranks, on_gpu=False)
    training += published_bytes(config, size.num_parameters, ranks, ranks)
    # A generator's one policy is the engine's own.
    generation_gib = (policy_bytes(config, size.num_parameters) / GIB + config.generation.kv_cache_gb) * replicas
    return PROCESSES_GIB + training / GIB + generation_gib


def _checks(config: Config) -> Iterator[DoctorFinding]:
    """The placement of the GPUs, the planned memory, and each service's own check with its GPUs."""
    try:
        placement = place(config, process_names(config, SERVICES), visible_gpus())
    except InputError as error:
        yield DoctorFinding.refused("GPU placement", error)
        placement = None
    model = read_planned_model(config) if placement else None
    if placement and placement.gpus:
        idle = "More generators (generation.replicas) or ranks (learner.ranks) would use the rest"
        shifts = ", generators and learner in shifts" if placement.in_shifts else ""
        words = (
            f"{len(placement.taken())} GPUs have processes{shifts}, {len(placement.free)} have none: the table below"
        )
        yield DoctorFinding(
            "GPU placement", "OK", words if model else placement.table(), idle if placement.free else ""
        )
        yield findings.gpu_locks(placement.taken())
    if placement and model:
        yield from _planned(config, placement, model)
    # Without a placement an engine would be checked against GPUs that it does not get.
    checked = [service for service in services_of(config) if placement or service not in (GENERATION, LEARNER)]
    with tempfile.TemporaryDirectory(prefix="gspo-doctor-") as folder:
        # The services check what a run would start with, not what the user left out.
        file = Path(folder) / CONFIG_NAME
        write_config(config, file)
        yield from merge_findings([_check(service, file, placement or NO_GPUS) for service in checked])


def _planned(config: Config, placement: Placement, model: PlannedModel) -> Iterator[DoctorFinding]:
    """The planned memory of each process, and the longest rollout."""
    table = memory_table(config, placement, process_names(config, SERVICES), model)
    yield DoctorFinding("memory plan", "OK", "the table below", table=table)
    try:
        warnings = check_longest(config, placement, model)
    except InputError as error:
        yield DoctorFinding.refused("longest rollout", error)
        return
    line = longest_rollout(config, placement, model).line()
    yield DoctorFinding("longest rollout", "warning" if warnings else "OK", "; ".join(warnings) or line or "not known")


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
