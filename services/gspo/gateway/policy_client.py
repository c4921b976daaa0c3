"""The policy as vLLM's serving classes see it: an engine client that samples with the run's generators.

vLLM makes texts, deltas, stop strings and log-probs of the tokens by its own code, as behind an engine of its own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing
from copy import copy
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.exceptions import RetryableRequestError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from gspo.common.streams.entries import tokens_between
from gspo.common.telemetry import metrics
from gspo.gateway.generators import Generators, NoGeneratorError
from gspo.gateway.sessions.recorder import Recorder
from gspo.gateway.sessions.session_renderer import SessionRenderer
from gspo_proto.generation_pb2 import SampledTokens
from gspo_proto.rollout_pb2 import Sampling

_TASKS = ("generate",)
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
# Parameters of a request that only the engine could carry out, and that generators do not take: they would change the
# distribution that log-probs are of.
_REFUSED = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "structured_outputs",
    "thinking_token_budget",
)
_DEFAULTS = SamplingParams()


class PolicyClient:
    """The calls that vLLM's serving classes make of their `EngineClient`.

    Args:
        timeout_s: Longest time of one answer.
    """

    errored = False
    dead_error = RuntimeError("no engine here")

    def __init__(self, vllm_config: VllmConfig, generators: Generators, timeout_s: float) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._outputs = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self._generators, self._timeout_s = generators, timeout_s
        self._recorder: Recorder | None = None
        self._versions: set[int] = set()

    def of_request(self, recorder: Recorder | None, versions: set[int]) -> PolicyClient:
        """The client of one HTTP request, which shares everything else.

        Args:
            recorder: Records the request, if it is an agent's.
            versions: Gets the versions that sample the answer.
        """
        client = copy(self)
        client.renderer = SessionRenderer(self.renderer, recorder)
        client._recorder, client._versions = recorder, versions
        return client

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admit every request: the generators queue."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Text generation alone."""
        return _TASKS

    async def is_tracing_enabled(self) -> bool:
        """No: vLLM's traces are not collected."""
        return False

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, *, session_id: str | None = None, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        """The answer to one rendered prompt, in the pieces that the request's output kind asks for.

        Raises:
            VLLMValidationError: A parameter that generators do not take, or a prompt that does not fit.
            RetryableRequestError: No generator has finished the answer in time.
        """
        _check(sampling_params)
        async with AsyncExitStack() as ending:
            if (recorder := self._recorder) is not None:
                ending.push_async_callback(recorder.close)
                sampling_params = await recorder.started(sampling_params)
                session_id = recorder.session.name
            request = self.input_processor.process_inputs(request_id, prompt, sampling_params, supported_tasks=_TASKS)
            self.input_processor.assign_request_id(request)
            outputs = self._outputs_of(request, prompt.get("prompt"), sampling_params, session_id)
            async with aclosing(outputs):
                async for output in outputs:
                    yield output

    async def _outputs_of(
        self, request: EngineCoreRequest, text: str | None, sampling_params: SamplingParams, session_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's outputs of the tokens that the generators sample, each recorded before."""
        self._outputs.add_request(request, text, None, 0, None)
        end = "cancelled"
        try:
            # vLLM has put the defaults of the model into its own copy.
            params = request.sampling_params or sampling_params
            async with aclosing(self._pieces(request, params, session_id)) as pieces:
                async for piece in pieces:
                    processed = self._outputs.process_outputs([_core_output(request, piece)])
                    is_last = bool(piece.finish or processed.reqs_to_abort)  # the latter at a stop string
                    end = "finished" if is_last else end
                    if self._recorder is not None:
                        await _record(self._recorder, piece, processed.request_outputs, params, is_last=is_last)
                    for output in processed.request_outputs:
                        yield output
                    if is_last:
                        return
        except ValueError as error:
            end = "refused"
            raise VLLMValidationError(str(error)) from error
        except NoGeneratorError as error:
            end = "failed"
            raise RetryableRequestError(str(error)) from error
        finally:
            metrics.GATEWAY_ANSWERS.labels(end).inc()
            self._outputs.abort_requests([request.request_id], internal=True)

    async def _pieces(
        self, request: EngineCoreRequest, params: SamplingParams, session_id: str | None
    ) -> AsyncGenerator[SampledTokens, None]:
        """The tokens, counted, with their versions noted for the HTTP reply."""
        began_s = time.monotonic()
        pieces = self._generators.sample(
            request.request_id,
            request.prompt_token_ids or [],
            _sampling(params, keep_sets=self._recorder is not None and self._recorder.keeps_sets),
            session=session_id,
            timeout_s=self._timeout_s,
        )
        async with aclosing(pieces):
            num_tokens = 0
            async for piece in pieces:
                self._versions.update(piece.version)
                if not num_tokens:
                    metrics.GATEWAY_FIRST_TOKEN_SECONDS.observe(time.monotonic() - began_s)
                num_tokens += len(piece.token_ids)
                metrics.GATEWAY_TOKENS.inc(len(piece.token_ids))
                # A stop string may end within a piece, and the tokens behind it are not of the answer.
                for part in _single_tokens(piece) if params.stop else (piece,):
                    yield part


async def _record(
    recorder: Recorder, piece: SampledTokens, outputs: list[Any], params: SamplingParams, *, is_last: bool
) -> None:
    """Save a piece, and the end of the answer with the last one."""
    await recorder.add(piece)
    if is_last:
        reason = None if piece.finish or not outputs else outputs[-1].outputs[0].stop_reason
        stop = reason if isinstance(reason, str) else ""
        finish = "stop_string" if stop else piece.finish or "stop"
        await recorder.end(finish, stop, skip_special_tokens=params.skip_special_tokens)


def _single_tokens(piece: SampledTokens) -> Iterator[SampledTokens]:
    """A piece token by token; the last one has the end."""
    last = len(piece.token_ids) - 1
    for place in range(last + 1):
        finish = piece.finish if place == last else ""
        yield SampledTokens(**tokens_between(piece, place, place + 1), finish=finish)
    if last < 0:
        yield piece


def _check(params: SamplingParams) -> None:
    """Refuse what generators do not take."""
    unknown = [name for name in _REFUSED if (getattr(params, name) or None) != (getattr(_DEFAULTS, name) or None)]
    if params.logprobs:
        unknown.append("top_logprobs")
    if unknown:
        why = "the policy's own distribution is sampled. Leave it out"
        if unknown[0] == "n":
            why = "a request gets one answer. Send one for each"
        raise VLLMValidationError(f"{unknown[0]} is not supported here: {why}", parameter=unknown[0])


def _sampling(params: SamplingParams, *, keep_sets: bool) -> Sampling:
    """The generators' form of a request's parameters; stop strings are found here, in the text."""
    return Sampling(
        temperature=params.temperature,
        max_tokens=params.max_tokens or 0,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        seed=params.seed or 0,
        keep_sets=keep_sets,
    )


def _core_output(request: EngineCoreRequest, piece: SampledTokens) -> EngineCoreOutput:
    """A piece as vLLM's engine would report it."""
    token_ids = list(piece.token_ids)
    logprobs = LogprobsLists(
        logprob_token_ids=_column(token_ids, np.int64),
        logprobs=_column(piece.logp, np.float32),
        sampled_token_ranks=np.zeros(len(token_ids), dtype=np.int64),  # not known, and in no reply
    )
    params = request.sampling_params
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=token_ids,
        new_logprobs=logprobs if params is not None and params.logprobs is not None else None,
        finish_reason=_FINISH.get(piece.finish),
    )


def _column(values: Iterable[float], dtype: type) -> np.ndarray[Any, Any]:
    return np.array(list(values), dtype=dtype)[:, None]
