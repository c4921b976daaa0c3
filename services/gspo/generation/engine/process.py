"""The engine's process before it has vLLM: the variables to set, and a fork that is made early and gets its work later.

torch, OpenMP and vLLM read the variables when they are loaded, so none of them is imported here. A fork has every
module that its parent has imported, and ends without tearing an interpreter down. It is safe only while there is one
thread: another thread's lock would stay locked in the fork for ever. vLLM's modules for GPUs open the driver, which has
threads. There the fork is made before they are imported, and imports them at the same time as its parent.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
from collections.abc import Callable, Mapping
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gspo.common.config.schema import Config
from gspo.common.host.machine import torch_is_for_cpus
from gspo.common.host.process_tuning import WAITING
from gspo.common.model.files import read_model_config

# Threads float over the cores: a learner shares them, and a bound thread would wait for a core that is taken.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **WAITING}
# On a GPU vLLM would import flashinfer at its start, for a sampler that it cannot use: it gives no log-probs after
# temperature, the mode of our engines.
NO_FLASHINFER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
# Triton multiplies float32 as TF32 by default, and vLLM's attention in float32 is Triton's: its log-probs would have
# 10 bits. The learner's products of float32 have 23.
WHOLE_FLOAT32 = {"TRITON_F32_DEFAULT": "ieee"}
# The engine's process is forked from one without threads. numpy would start some for linear algebra at its import, and
# pyarrow one for an allocator. The service needs neither.
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# vLLM compiles one function of its sampler even where it compiles no model: it counts the tokens that are likelier than
# the sampled one. Compiling takes 24 s at the first start on a machine and 2 s at each later one. Uncompiled it takes
# 4 us longer for every 1,000 tokens of the vocabulary, for each sampled token: more than that is worth compiling.
_SMALL_VOCABULARY = 4096


def import_variables(config: Config) -> dict[str, str]:
    """Variables to set unless the user has set them."""
    if not torch_is_for_cpus():
        return {**NO_THREADS, **(WHOLE_FLOAT32 if config.generation.dtype == "float32" else {})}
    values = {**CPU_ENVIRONMENT, **NO_THREADS}
    if config.generation.engine.get("enforce_eager", True) and _vocabulary(config.model.path) <= _SMALL_VOCABULARY:
        values["TORCH_COMPILE_DISABLE"] = "1"
    return values


def generation_threads(configured: int) -> int:
    """Threads of an engine; 0 is every core but one, as in vLLM: its scheduler and event loop need one."""
    return configured or max(1, len(os.sched_getaffinity(0)) - 1)


def fixed_variables(config: Config) -> dict[str, str]:
    """Variables that are always ours: the number of threads, without which vLLM takes one, and NO_FLASHINFER."""
    return {"OMP_NUM_THREADS": str(generation_threads(config.generation.threads)), **NO_FLASHINFER}


def _vocabulary(model: str) -> float:
    """Tokens of the model in this folder; infinite where it cannot be read, which the service's check refuses."""
    facts = read_model_config(Path(model))
    try:
        return int(facts.get("vocab_size") or facts["text_config"]["vocab_size"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class ForkedProcess:
    """A forked process that waits for its work; a multiprocessing.Process, and the context that makes it, in one.

    It also ends when this process ends before it has work. Several threads may wait for its end.

    Args:
        prepare: It runs this while it waits for its work.

    Raises:
        RuntimeError: This process has more than one thread.
    """

    def __init__(self, prepare: Callable[[], object] | None = None) -> None:
        names = [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
        if len(names) > 1:
            reason = f"a process is forked while there is one thread, and there are {len(names)}"
            raise RuntimeError(f"{reason}: {', '.join(sorted(names))}")
        context = get_context("fork")
        receiver, self._sender = context.Pipe(duplex=False)
        self._failures, failures = context.Pipe(duplex=False)
        self._process = context.Process(target=_wait_for_work, args=(receiver, self._sender, failures, prepare))
        self._process.start()
        receiver.close()
        failures.close()
        # It comes before multiprocessing's own exit handler, which joins the processes and would wait for this one.
        atexit.register(self._sender.close)
        self._asking = threading.Lock()
        self._work: tuple[Callable[..., None], Mapping[str, Any]] | None = None

    def Process(self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]) -> ForkedProcess:
        """As a multiprocessing context's: the process that will run `target(**kwargs)`. There is only one.

        Raises:
            RuntimeError: This is the second call.
        """
        if self._work is not None:
            raise RuntimeError(f"process {name}: the one forked process has its work already")
        self._work = (target, kwargs)
        self._process.name = name
        return self

    def start(self) -> None:
        """Let it run its work, with the environment variables of this moment."""
        self._sender.send((self._process.name, dict(os.environ), self._work))
        self._sender.close()

    def failure(self, timeout_s: float) -> str:
        """The exception of its work in words, if it arrives within so many seconds; else empty."""
        try:
            return str(self._failures.recv()) if self._failures.poll(timeout_s) else ""
        except EOFError:  # it was killed, or this was asked before
            return ""

    # Two threads of vLLM wait for the end, and the system gives the exit code to one of them. Until that one has
    # written it down, multiprocessing tells the other that the process is alive, and vLLM warns of one to kill.

    @property
    def exitcode(self) -> int | None:
        """As a process's; None while it runs."""
        with self._asking:
            return self._process.exitcode

    def is_alive(self) -> bool:
        with self._asking:
            return self._process.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """As a process's: wait for its end, for ever without a timeout."""
        if wait([self._process.sentinel], timeout_s):
            with self._asking:
                self._process.join()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the process's own: pid, sentinel, terminate, kill."""
        return getattr(self._process, name)


def _wait_for_work(
    receiver: Connection, sender: Connection, failures: Connection, prepare: Callable[[], object] | None
) -> None:
    # The other end is the parent's alone: its death is then the end of the stream.
    sender.close()
    if prepare is not None:
        prepare()
    try:
        current_process().name, environment, (target, kwargs) = receiver.recv()
    except EOFError:
        return
    receiver.close()
    # The objects of the fork stay frozen: vLLM would collect them three times before it ends (2 s).
    gc.unfreeze = lambda: None
    os.environ.clear()
    os.environ.update(environment)
    try:
        target(**kwargs)
    except Exception as error:
        failures.send(f"{type(error).__name__}: {error}")
        raise
