"""The start of a run's engine: its imports, vLLM's arguments from the configuration, and vLLM's refusals as errors.

The names of arguments are checked in `arguments.py`, which needs no vLLM.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm import AsyncEngineArgs, ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.platform_utils import cuda_is_initialized

from gspo.common.config.schema import Config, ModelConfig
from gspo.common.errors import InputError
from gspo.common.model.files import read_model_config
from gspo.generation.engine.process import ForkedProcess
from gspo.generation.engine.vllm_engine import Engine, engine_arguments


def import_engine(model: ModelConfig) -> bool:
    """Import the modules that vLLM imports in the engine's process, the model's class among them.

    vLLM inspects an imported class in this process. For another class it starts one more process at the first start on
    a machine (8 s of processor time), so that no GPU is opened here.

    Returns:
        Whether a process that is forked from this one can have the engine: a GPU that is open here would be lost to it.
        A spawned process imports everything again: 7 s of processor time before the model loads, and 5 s at the end.
    """
    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # here: it is for CPUs alone
    else:
        import vllm.v1.worker.gpu_worker  # noqa: F401 - here: it is for GPUs alone

    for name in read_model_config(Path(model.path)).get("architectures") or []:
        if (known := ModelRegistry.models.get(name)) is not None:
            with suppress(ImportError):  # of a missing package: vLLM reports it when it imports the class itself
                ModelRegistry.register_model(name, known.load_model_cls())
    return not cuda_is_initialized()


def check_values(config: Config, folder: Path) -> None:
    """Have vLLM check the arguments without starting it; takes seconds.

    Raises:
        InputError: vLLM refuses one, or the model cannot have drafts.
    """
    with _as_input_error(config, folder):
        _arguments(config, folder).create_engine_config()


async def start_engine(config: Config, folder: Path, process: ForkedProcess | None = None) -> Engine:
    """Start vLLM.

    Args:
        process: The process for the engine; without one vLLM starts its own.

    Raises:
        InputError: vLLM refuses the model or an argument; another start would fail in the same way.
    """
    with _as_input_error(config, folder):
        return await Engine.start(_arguments(config, folder), process=process)


def _arguments(config: Config, folder: Path) -> AsyncEngineArgs:
    arguments = engine_arguments(
        folder,
        config.generation,
        max_model_len=config.algorithm.longest_branch,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        sleeps=config.placement == "shared",
    )
    if config.generation.draft_tokens and arguments.create_model_config().has_inner_state:
        raise InputError(
            "generation.draft_tokens",
            f"{config.generation.draft_tokens} is refused for {folder}: its layers keep a state (as Mamba's do) that "
            "rejected drafts would stay in; vLLM's issue 39273 shows wrong answers",
            "Leave it out, or take a model with attention in all layers",
        )
    return arguments


@contextmanager
def _as_input_error(config: Config, folder: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).partition(" [type=")[0]
        drafts = {"draft_tokens": config.generation.draft_tokens} if config.generation.draft_tokens else {}
        arguments = ", ".join(f"{name}: {value!r}" for name, value in (drafts | config.generation.engine).items())
        if not arguments:
            rule = f"vLLM refuses {folder}: {reason}"
            raise InputError("model.path", rule, "Take a model that vLLM serves") from error
        raise InputError(
            "generation.engine",
            f"vLLM refuses {arguments} for {folder}: {reason}",
            "Change that argument, or take a model that vLLM serves",
        ) from error
