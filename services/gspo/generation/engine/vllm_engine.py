"""vLLM as this service uses it: generate with a log-prob and a version for every token, load, sleep, wake, stop.

A failed load never serves a mixture of weights: the old ones are restored, or the engine is broken.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.v1.engine import PauseMode
from vllm.v1.engine import utils as vllm_processes
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from gspo.common.config.engines import MOST_KEPT, GenerationConfig
from gspo.common.host.machine import CACHE_ARGUMENT, GIB
from gspo.common.telemetry import metrics
from gspo.generation.engine.api import (
    Completion,
    Drafts,
    EngineBrokenError,
    EngineSampling,
    LoadFailedError,
    LoadTimes,
    OnUpdate,
    Tokens,
    WrongTensorsError,
)
from gspo.generation.engine.differences import Differences, Trials
from gspo.generation.engine.process import CPU_ENVIRONMENT, ForkedProcess
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.engine.vllm_requests import (
    completion_of,
    cut_by,
    drafts_of,
    sampling_params,
    tokens_of,
)
from gspo.generation.engine.weights import BACKEND, MISSING

# On a CPU vLLM's default is a worker process of its own, bound to all cores but one, and a scheduler process that
# spins for its answers on the other. One process needs no hop, no spinning, and one import less at the start. It is
# named by its path, since vLLM turns the short name "uni" back into "mp".
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# On a GPU vLLM forks its engine by default. This process has threads by then, and a child would never release the
# locks of gRPC's threads, so vLLM has to spawn. On a CPU vLLM spawns unless it gets a forked process.
GPU_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# vLLM's level of sleep that keeps nothing but the model's buffers: a wake loads every weight anyway, and level 1 would
# hold a further copy of them in host memory.
_DISCARD_ALL = 2
# vLLM's process says that it is dead a moment before its exception arrives here.
_CAUSE_S = 1.0
# vLLM's names of the memory that it gives back.
_WEIGHTS, _KV = "weights", "kv_cache"
# Tokens at the end of a request that are looked up in it for drafts: the longest run that occurs earlier, within these.
_LEAST_LOOKUP, _MOST_LOOKUP = 2, 5
T = TypeVar("T")
log = structlog.get_logger()


class Engine:
    """One vLLM engine and the version of the policy it serves. All calls from one event loop.

    Attributes:
        is_asleep: Whether its weights and its KV cache are away, from the beginning of `sleep` to the end of `wake`.
        drafts: Draft tokens of the requests that have ended, without the aborted ones.
    """

    def __init__(self, llm: AsyncLLM, version: int, process: ForkedProcess | None = None) -> None:
        self._process = process
        self.version, self.is_asleep, self.drafts = version, False, Drafts()
        self._llm, self._vocabulary = llm, llm.model_config.get_vocab_size()
        self._broken: str | None = None
        self._num_loads = 0
        self._changing = asyncio.Lock()
        self._num_restarts = 0
        # On a CPU vLLM multiplies with copies of the weights that no change reaches, and no comparison sees.
        self._may_change_in_place = not current_platform.is_cpu()
        self._trials = Trials()
        self._serving = asyncio.Event()
        self._serving.set()

    @classmethod
    async def start(cls, args: AsyncEngineArgs, version: int = 0, process: ForkedProcess | None = None) -> Engine:
        """Start vLLM with `engine_arguments` and answer one short request, so that the first real one is not slow.

        It takes some 3 s of processor time in `process`, and some 10 s if vLLM starts a process itself.

        Raises:
            ValueError: vLLM refuses an argument.
            EngineBrokenError: Its process has ended.
        """
        environment = _environment(CPU_ENVIRONMENT if current_platform.is_cpu() else GPU_ENVIRONMENT)
        with environment, _starting_in(process) if process else nullcontext():
            started = cls(await _in_thread(partial(_new_llm, args, process)), version, process)
        await started._llm.engine_core.set_weight_version_async(str(version))
        longest = started._llm.model_config.max_model_len
        # vLLM's linear attention on CPUs takes no prompt of one token.
        prompt = [0] * min(2, longest - 1)
        await started.generate("warm-up", prompt, EngineSampling(min(4, longest - len(prompt)), ignore_eos=True))
        return started

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: EngineSampling) -> Completion:
        """One answer to one prompt. Cancelling the call ends the request in vLLM.

        Two requests may have one id at a time; `abort` ends both.

        Raises:
            ValueError: vLLM refuses the request, for example a prompt longer than max_model_len.
            EngineBrokenError: The engine cannot serve any more.
        """
        # A request that is sent while the weights change would carry the salt of the old ones into the new. vLLM 0.33
        # refuses it where the pause ends requests. Nothing suspends between here and the message to vLLM's process.
        await self._serving.wait()
        self._raise_if_broken()
        if self._llm.vllm_config.speculative_config is not None and (key := cut_by(sampling)):
            raise ValueError(f"request {request_id} refused: {key} is not supported with generation.draft_tokens")
        num_restarts = self._num_restarts
        prompt = tokens_input(prompt_token_ids, cache_salt=str(self._num_loads))
        try:
            async for output in self._llm.generate(prompt, sampling_params(sampling, self._vocabulary), request_id):
                completion = completion_of(output.outputs[0], self._vocabulary)
                self._count_drafts(output.outputs[0])
                ended_by_load = completion.finish == "aborted" and self._num_restarts > num_restarts
                return replace(completion, finish="restart") if ended_by_load else completion
        except VLLMClientError as error:
            raise ValueError(f"request {request_id} refused: {error}") from error
        except EngineDeadError as error:
            raise self._died("vLLM died while generating") from error
        except EngineGenerateError as error:
            raise self._break(f"vLLM failed while generating: {error!r}") from error
        raise EngineBrokenError(f"vLLM ended request {request_id} without an output")

    def _count_drafts(self, output: CompletionOutput) -> None:
        proposed, accepted = drafts_of(output)
        self.drafts = Drafts(self.drafts.proposed + proposed, self.drafts.accepted + accepted)
        metrics.DRAFT_TOKENS.labels("accepted").inc(accepted)
        metrics.DRAFT_TOKENS.labels("rejected").inc(proposed - accepted)

    def num_sampled(self, request_id: str) -> int:
        state = self._request_state(request_id)
        return int(state.detokenizer.num_output_tokens()) if state is not None else 0

    def partial_output(self, request_id: str, first: int = 0) -> Tokens:
        """The tokens of a running request so far, from place `first` on.

        They are from vLLM's own records: streaming every token would cost more.
        """
        state = self._request_state(request_id)
        if state is None or state.logprobs_processor.logprobs is None:
            return Tokens([], [], [])
        listed, spans = state.logprobs_processor.logprobs, state._weight_version_spans()
        return tokens_of(state.detokenizer.output_token_ids, listed, spans, self._vocabulary, first)

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns the tokens sampled so far, as `aborted`."""
        await self._llm.abort(request_id)

    async def load(self, version: int, copies: PolicyCopies, *, on_update: OnUpdate, timeout_s: float) -> LoadTimes:
        """Serve the staged copy as `version`; in-flight requests continue under it.

        If the call is cancelled, the load still ends in the background.

        Args:
            on_update: `recompute` computes the KV of in-flight requests again, so later log-probs are exactly the new
                version's. `keep` keeps the old KV, which is cheaper. `restart` ends the requests, and their `generate`
                returns with `finish` restart.

        Raises:
            LoadFailedError: The new weights did not load, and the old ones serve again. Or the engine sleeps: an update
                of weights that are away would kill vLLM's processes.
            EngineBrokenError: The old weights could not be restored, or `timeout_s` has passed.
        """
        differences = await asyncio.to_thread(self._differences, copies)
        change = partial(self._load_paused, version, copies, differences, on_update)
        return await self._alone(f"the load of version {version}", timeout_s, change)

    async def sleep(self, *, on_update: OnUpdate, timeout_s: float) -> None:
        """Give back the memory of weights and KV cache until `wake`; an engine that sleeps already sleeps on.

        New requests wait, and those in flight stand still and continue after the wake; under `restart` they end, as
        under `load`. A CPU keeps its memory. If the call is cancelled, the engine still goes to sleep.

        Raises:
            EngineBrokenError: vLLM failed, or `timeout_s` has passed.
        """
        await self._alone("going to sleep", timeout_s, partial(self._sleep, on_update))

    async def wake(self, version: int, copies: PolicyCopies, *, timeout_s: float) -> LoadTimes:
        """Take the memory back and serve the staged copy as `version`; the caches are empty.

        The order is that of vLLM's memory: weights, the staged policy, the KV cache. So the GPU never holds the KV
        cache beside the tensors of a load.

        Raises:
            LoadFailedError: The new weights did not load, and the old ones serve. Or the engine does not sleep.
            EngineBrokenError: As `load`; or the memory is not free.
        """
        return await self._alone(f"the wake with version {version}", timeout_s, partial(self._wake, version, copies))

    async def stop(self, timeout_s: float = 20.0) -> None:
        """End vLLM's processes; requests in flight fail with EngineBrokenError."""
        self._break("stopped")
        self._serving.set()
        # In this order: requests fail first, so that vLLM does not report the end of its processes as a crash.
        self._llm.output_processor.propagate_error(EngineDeadError())
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        await asyncio.to_thread(self._llm.shutdown, timeout_s)

    @property
    def num_running(self) -> int:
        """Requests that vLLM holds: running and waiting."""
        return int(self._llm.get_num_unfinished_requests())

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens, of prompts and answers together, whose KV fits."""
        return int(self._llm.vllm_config.cache_config.kv_cache_size_tokens)

    async def _alone(self, what: str, timeout_s: float, change: Callable[[], Awaitable[T]]) -> T:
        """Make one change at a time, to its end, and send vLLM no request meanwhile."""
        return await asyncio.shield(asyncio.ensure_future(self._change(what, timeout_s, change)))

    async def _change(self, what: str, timeout_s: float, change: Callable[[], Awaitable[T]]) -> T:
        async with self._changing:
            self._raise_if_broken()
            self._serving.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    return await change()
            except TimeoutError as error:
                raise self._break(f"{what} did not end within {timeout_s} s") from error
            except EngineDeadError as error:
                raise self._died(f"vLLM died during {what}") from error
            finally:
                if not self.is_asleep:
                    self._serving.set()

    def _differences(self, copies: PolicyCopies) -> Differences | None:
        """In what the staged policy differs, where it may be loaded in place."""
        if not self._may_change_in_place:
            return None
        differences = Differences(copies.serving, copies.staged)
        return differences if differences.is_small else None

    async def _load_paused(
        self, version: int, copies: PolicyCopies, differences: Differences | None, on_update: OnUpdate
    ) -> LoadTimes:
        if self.is_asleep:
            raise LoadFailedError(f"version {version} was not loaded: the engine sleeps, and its weights are away")
        began = time.monotonic()
        await self._llm.pause_generation(mode=self._pause_mode(on_update), clear_cache=on_update != "keep")
        paused = time.monotonic()
        failure = await self._replace_weights(version, copies, differences)
        loaded = time.monotonic()
        await self._llm.resume_generation()
        return self._loaded(failure, version, LoadTimes(paused - began, loaded - paused, time.monotonic() - loaded))

    async def _sleep(self, on_update: OnUpdate) -> None:
        if self.is_asleep:
            return
        self.is_asleep = True
        try:
            await self._llm.sleep(_DISCARD_ALL, self._pause_mode(on_update))
        except Exception as error:
            raise self._break(f"vLLM failed while it went to sleep: {error!r}") from error

    async def _wake(self, version: int, copies: PolicyCopies) -> LoadTimes:
        if not self.is_asleep:
            raise LoadFailedError(f"version {version} was not loaded: the engine does not sleep")
        began = time.monotonic()
        await self._take_memory_back(_WEIGHTS)
        awake = time.monotonic()
        failure = await self._replace_weights(version, copies)
        loaded = time.monotonic()
        await self._take_memory_back(_KV)
        self.is_asleep = False
        return self._loaded(failure, version, LoadTimes(awake - began, loaded - awake, time.monotonic() - loaded))

    async def _take_memory_back(self, tag: str) -> None:
        """vLLM's scheduler runs again when all is back."""
        try:
            await self._llm.wake_up([tag])
        except Exception as error:
            raise self._break(f"vLLM did not get the memory of its {tag} back: {error!r}") from error

    def _pause_mode(self, on_update: OnUpdate) -> PauseMode:
        if on_update != "restart":
            return "keep"
        self._num_restarts += 1
        return "abort"

    async def _replace_weights(
        self, version: int, copies: PolicyCopies, differences: Differences | None = None
    ) -> Exception | None:
        """Load the staged copy, or the serving one again; returns the error that kept the staged one out."""
        failure: Exception | None = None
        if differences is None or not await self._is_changed(differences, str(version)):
            failure = await self._try_weights(copies.staged.update_info(), str(version))
        if failure is None:
            copies.promote()
            self.version = version
            # Salts the prefix cache: a new request never hits blocks computed before this load.
            self._num_loads += 1
            return None
        # A trial before it has been compared with nothing.
        self._trials = Trials()
        if (again := await self._try_weights(copies.serving.update_info(), str(self.version))) is not None:
            raise self._break(f"neither the new weights load ({failure}) nor the old ({again})") from again
        return failure

    def _loaded(self, failure: Exception | None, version: int, times: LoadTimes) -> LoadTimes:
        if failure is not None:
            kind = WrongTensorsError if MISSING in str(failure) else LoadFailedError
            raise kind(f"version {version} did not load, version {self.version} serves on: {failure}") from failure
        return times

    async def _is_changed(self, differences: Differences, version: str) -> bool:
        """Load differences in place; whether they have made the weights this version's.

        A whole load has to follow a trial. vLLM's process compares the tensors that both have left. If they are not the
        same, it refuses the next changes.
        """
        form = self._trials.form_of(differences.kinds)
        failure = await self._try_weights(differences.update_info(form), version)
        if failure is not None:
            self._may_change_in_place = False
            log.info("no_changes_in_place", reason=str(failure), detail="policies are loaded whole")
        return failure is None and form == "changes"

    async def _try_weights(self, update_info: dict[str, Any], version: str) -> Exception | None:
        """Load into the paused engine what weights.SharedPolicy describes; returns the error of a failure."""
        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info))
            await self._llm.finish_weight_update(version)
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - a remote error of any kind; the caller restores or gives up
            return error
        return None

    async def checksum(self, timeout_s: float) -> str:
        """A checksum of the weights in the engine, in the form that its kernels take.

        Engines of one kind of GPU with the same arguments have the same if their weights are equal.

        Raises:
            EngineBrokenError: There is no engine any more, or it does not answer in time.
        """
        self._raise_if_broken()
        try:
            async with asyncio.timeout(timeout_s):
                ranks = await self._llm.compute_weight_checksums()
        except TimeoutError as error:
            raise self._break(f"vLLM did not give checksums of its weights within {timeout_s:.0f} s") from error
        except EngineDeadError as error:
            raise self._died("vLLM's processes have died") from error
        tensors = sorted(item for rank in ranks for item in rank.items())
        return hashlib.sha256(repr(tensors).encode()).hexdigest()

    def _request_state(self, request_id: str) -> Any:
        """vLLM's record of a running request; the first of two requests with one id."""
        processor = self._llm.output_processor
        ids = processor.external_req_ids.get(request_id)
        return processor.request_states.get(ids[0]) if ids else None

    def _raise_if_broken(self) -> None:
        if self._broken is None and self._llm.errored:
            raise self._died("vLLM's processes have died")
        if self._broken is not None:
            raise EngineBrokenError(f"generation engine: {self._broken}")

    def _died(self, reason: str) -> EngineBrokenError:
        """Break the engine because its process has died; the reason has the exception of the process."""
        cause = self._process.failure(_CAUSE_S) if self._process and self._broken is None else ""
        return self._break(f"{reason}: {cause}" if cause else reason)

    def _break(self, reason: str) -> EngineBrokenError:
        self._broken = self._broken or reason
        return EngineBrokenError(f"generation engine: {self._broken}")


def _new_llm(args: AsyncEngineArgs, process: ForkedProcess | None) -> AsyncLLM:
    try:
        return AsyncLLM.from_engine_args(args)
    except RuntimeError as error:
        if process and (cause := process.failure(_CAUSE_S)):
            raise EngineBrokenError(f"generation engine: vLLM died while starting: {cause}") from error
        raise


def engine_arguments(
    model: Path,
    generation: GenerationConfig,
    *,
    max_model_len: int,
    seed: int = 0,
    trust_remote_code: bool = False,
    sleeps: bool = False,
) -> AsyncEngineArgs:
    """vLLM's arguments, ours and the user's, which `check_engine_args` has checked.

    Args:
        sleeps: Whether the engine will be put to sleep. Its memory then comes from an allocator of vLLM's own, which a
            CPU does not have.
    """
    own: dict[str, Any] = {}
    of_user = dict(generation.engine)
    if current_platform.is_cpu():
        # Compiling takes a CPU half a minute at the first start and ten seconds at each later one.
        own["enforce_eager"] = True
        own["distributed_executor_backend"] = IN_PROCESS_EXECUTOR
        # On a GPU vLLM takes its share of memory, or what a run's start planned for it.
        of_user[CACHE_ARGUMENT] = int(generation.kv_cache_gb * GIB)
    elif sleeps:
        own["enable_sleep_mode"] = True
    return AsyncEngineArgs(
        model=str(model),
        dtype=generation.dtype,
        seed=seed,
        max_model_len=max_model_len,
        logprobs_mode="processed_logprobs",
        max_logprobs=MOST_KEPT,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        enable_prefix_caching=True,
        language_model_only=True,
        max_num_seqs=generation.max_rollouts,
        **_draft_arguments(generation.draft_tokens),
        trust_remote_code=trust_remote_code,
        load_format="safetensors",
        disable_log_stats=True,
        **{**own, **of_user},
    )


def _draft_arguments(draft_tokens: int) -> dict[str, Any]:
    """vLLM's arguments for drafts from a request's own earlier tokens (n-gram speculation); none for 0."""
    if not draft_tokens:
        return {}
    ngram = {"method": "ngram", "prompt_lookup_min": _LEAST_LOOKUP, "prompt_lookup_max": _MOST_LOOKUP}
    return {
        "speculative_config": ngram | {"num_speculative_tokens": draft_tokens},
        # Of each request, since vLLM's own metrics are not collected.
        "per_request_spec_decode_metrics": "summary",
    }


async def _in_thread(start: Callable[[], AsyncLLM]) -> AsyncLLM:
    """Start vLLM while the event loop runs on: it takes minutes where it compiles and records CUDA graphs.

    If the call is cancelled, vLLM is ended as soon as it has started, since it cannot be before.
    """
    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        (await starting).shutdown()
        raise


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables for the processes that are started inside; the user's own values stay."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _starting_in(process: ForkedProcess) -> Iterator[None]:
    """A block in which vLLM starts its engine in this process.

    vLLM has no argument for it, so its function that chooses how processes are started is replaced.
    """
    original = vllm_processes.get_mp_context
    vllm_processes.get_mp_context = lambda: process
    try:
        yield
    finally:
        vllm_processes.get_mp_context = original
