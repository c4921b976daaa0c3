"""Start the generation service: `python -m gspo.generation --run-dir DIR`."""

import os
from collections.abc import Callable
from functools import partial

import structlog

from gspo.common.host.packages import checked_packages

with checked_packages():
    from gspo.common.config.schema import ModelConfig
    from gspo.common.host.machine import torch_is_for_cpus
    from gspo.common.host.process_tuning import importing, keep_freed_memory
    from gspo.common.service.options import await_start, parse_options
    from gspo.generation.check import check
    from gspo.generation.engine.process import ForkedProcess, fixed_variables, import_variables

log = structlog.get_logger()
MEANING = "Turns prompts into rollouts with vLLM, a log-prob and a policy version for every token."


def main() -> None:
    """Check, or serve until the run ends."""
    # Its check may import vLLM, which reads the variables below.
    options = parse_options("generation", check, meaning=MEANING, checks_at_startup=True)
    for name, value in import_variables(options.config).items():
        os.environ.setdefault(name, value)
    os.environ.update(fixed_variables(options.config))
    keep_freed_memory()
    on_gpu = not torch_is_for_cpus()
    process = _fork(partial(_import_engine, options.config.model)) if on_gpu else None
    # After the options: importing vLLM takes seconds.
    with importing():
        from gspo.common.service.app import run_process
        from gspo.generation.app import run_generation
        from gspo.generation.engine.startup import import_engine, start_engine

        forks = import_engine(options.config.model)
    options = await_start(options)
    if forks and not on_gpu:
        process = _fork()
    run_process(options, lambda service: run_generation(service, partial(start_engine, process=process)))


def _import_engine(model: ModelConfig) -> None:
    from gspo.generation.engine.startup import import_engine  # here: it imports vLLM

    import_engine(model)


def _fork(prepare: Callable[[], object] | None = None) -> ForkedProcess | None:
    """The engine's process, before anything here has threads or connections; None where an import has made one."""
    try:
        return ForkedProcess(prepare)
    except RuntimeError as error:
        log.warning(
            "engine_not_forked", reason=str(error), detail="vLLM starts a process that imports everything again"
        )
        return None


if __name__ == "__main__":
    main()
