"""The engine of a run: vLLM's arguments from the configuration, and what vLLM refuses as one message.

Not the check of names, which needs no vLLM: engine_args.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm import AsyncEngineArgs

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.generation.engine.forked_process import ForkedProcess
from gspo.generation.engine.vllm_engine import Engine, engine_arguments


def check_values(config: Config, folder: Path) -> None:
    """Let vLLM look at the arguments without starting it; takes seconds.

    Raises:
        InputError: vLLM refuses one.
    """
    with _as_input_error(config, folder):
        _arguments(config, folder).create_engine_config()


async def start_engine(config: Config, folder: Path, process: ForkedProcess | None = None) -> Engine:
    """Start vLLM.

    Args:
        process: The engine runs in it; vLLM starts one of its own without.

    Raises:
        InputError: vLLM refuses the model or an argument; starting again would end the same.
    """
    with _as_input_error(config, folder):
        return await Engine.start(_arguments(config, folder), process=process)


def _arguments(config: Config, folder: Path) -> AsyncEngineArgs:
    return engine_arguments(
        folder,
        dtype=config.generation.dtype,
        max_model_len=config.algorithm.prompt_length + config.algorithm.response_length,
        seed=config.seed,
        max_num_seqs=config.generation.max_rollouts,
        kv_cache_gib=config.generation.kv_cache_gb,
        trust_remote_code=config.model.trust_remote_code,
        engine=config.generation.engine,
    )


@contextmanager
def _as_input_error(config: Config, folder: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).partition(" [type=")[0]
        given = ", ".join(f"{name}: {value!r}" for name, value in config.generation.engine.items()) or "nothing given"
        raise InputError(
            "generation.engine",
            f"vLLM refuses {given} for {folder}: {reason}",
            "Mend that argument, or take a model that vLLM serves",
        ) from error
