"""A request of vLLM and its answer, from and to the plain types of `api.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind

from gspo.common.config.engines import LEAST_TEMPERATURE, SPARE_TOKENS
from gspo.generation.engine.api import Completion, Drafts, EngineSampling, Finish, Tokens

# Messages carry float32.
_LEAST_TEMPERATURE = float(np.float32(LEAST_TEMPERATURE))
_FINISH: Mapping[str, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}


@lru_cache(maxsize=64)
def sampling_params(sampling: EngineSampling, vocabulary: int) -> SamplingParams:
    """vLLM's parameters of a request to a model with so many tokens.

    Raises:
        ValueError: vLLM refuses a value, or would sample at another temperature.
    """
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"temperature {sampling.temperature:g} is below {LEAST_TEMPERATURE}, vLLM's least above 0")
    values = asdict(sampling)
    num_logprobs = num_listed(sampling.top_k, vocabulary) if values.pop("keep_sets") else 0
    return SamplingParams(
        **values | {"stop": list(sampling.stop)},
        # The sampled token's log-prob, in one flat list instead of an object a token.
        logprobs=num_logprobs,
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


def num_listed(top_k: int, vocabulary: int) -> int:
    """Log-probs that are asked for at each place to see which tokens top_k has kept."""
    return min(top_k + SPARE_TOKENS, vocabulary)


def completion_of(output: CompletionOutput, vocabulary: int) -> Completion:
    """vLLM's answer with log-prob and version of each token, and the tokens that it was sampled from."""
    stop_string = output.stop_reason if isinstance(output.stop_reason, str) else None
    finish: Finish = "stop_string" if stop_string is not None else _FINISH[output.finish_reason]
    tokens = tokens_of(output.token_ids, output.logprobs, output.weight_versions, vocabulary)
    return Completion(**vars(tokens), finish=finish, stop_string=stop_string)


def tokens_of(
    token_ids: Sequence[int],
    listed: FlatLogprobs,
    spans: list[WeightVersionSpan] | None,
    vocabulary: int,
    first: int = 0,
) -> Tokens:
    """Sampled tokens from vLLM's records, from place `first` on.

    At each place vLLM lists the sampled token, and then the likeliest ones. Those that were cut off have minus
    infinity. If the last one listed is finite, further tokens may tie with it, and the set is not known.
    """
    sampled, version = list(token_ids[first:]), version_of_each(spans)[first:]
    width = len(listed.logprobs) // max(1, len(token_ids))
    if width <= 1:  # the sampled tokens alone
        return Tokens(sampled, list(listed.logprobs[first:]), version)
    logp_TL = np.array(listed.logprobs[first * width :], np.float64).reshape(-1, width)
    is_kept_TK = np.isfinite(logp_TL[:, 1:])
    if is_kept_TK.shape[1] < vocabulary:
        is_kept_TK &= ~is_kept_TK[:, -1:]
    id_TK = np.array(listed.token_ids[first * width :], np.int64).reshape(-1, width)[:, 1:]
    kept_sizes, kept_ids = is_kept_TK.sum(1).tolist(), id_TK[is_kept_TK].tolist()
    return Tokens(sampled, logp_TL[:, 0].tolist(), version, kept_sizes=kept_sizes, kept_ids=kept_ids)


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
