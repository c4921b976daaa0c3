"""A request of vLLM and its answer, from and to the plain types of `api.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache

import numpy as np
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind

from gspo.common.config.engines import LEAST_TEMPERATURE
from gspo.generation.engine.api import Completion, Drafts, EngineSampling, Finish

# Messages carry float32.
_LEAST_TEMPERATURE = float(np.float32(LEAST_TEMPERATURE))
_FINISH: Mapping[str, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}


@lru_cache(maxsize=64)
def sampling_params(sampling: EngineSampling) -> SamplingParams:
    """vLLM's parameters of a request.

    Raises:
        ValueError: vLLM refuses a value, or would sample at another temperature.
    """
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"temperature {sampling.temperature:g} is below {LEAST_TEMPERATURE}, vLLM's least above 0")
    return SamplingParams(
        **asdict(sampling) | {"stop": list(sampling.stop)},
        # Exactly the sampled token's log-prob, in one flat list instead of an object a token.
        logprobs=0,
        flat_logprobs=True,
        # Only stop strings need text.
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        # vLLM copies the parameters of each request; these never change, so a shallow copy is enough.
        skip_clone=True,
    )


def cut_by(sampling: EngineSampling) -> str:
    """The parameter that cuts the distribution; empty where none does.

    With draft tokens vLLM takes no min_p, and top_k ends its process at a step in which no request has a draft.
    """
    off = EngineSampling(sampling.max_tokens)
    return next((key for key in ("top_p", "top_k", "min_p") if getattr(sampling, key) != getattr(off, key)), "")


def completion_of(output: CompletionOutput) -> Completion:
    """vLLM's answer with log-prob and version of each token."""
    token_ids = list(output.token_ids)
    version = version_of_each(output.weight_versions)
    stop_string = output.stop_reason if isinstance(output.stop_reason, str) else None
    finish: Finish = "stop_string" if stop_string is not None else _FINISH[output.finish_reason]
    return Completion(token_ids, list(output.logprobs.logprobs), version, finish, stop_string)


def drafts_of(output: CompletionOutput) -> Drafts:
    """The draft tokens of an answer; vLLM counts none for an aborted one."""
    if (counts := output.spec_decode_metrics) is None:
        return Drafts()
    return Drafts(counts.num_draft_tokens, sum(accepted * steps for accepted, steps in enumerate(counts.histogram)))


def version_of_each(spans: list[WeightVersionSpan] | None) -> list[int]:
    """The version of each token, from vLLM's runs of tokens of one version."""
    version: list[int] = []
    for span in spans or []:
        version.extend([int(span.version)] * (span.end - span.start))
    return version
