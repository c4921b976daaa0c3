"""A request reaches vLLM with the values that it has, or is refused: vLLM replaces none of them unseen."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams, sampling_params
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs

from gspo.common.config.engines import LEAST_TEMPERATURE, MOST_TEMPERATURE, SamplingConfig
from gspo.generation.engine import vllm_requests
from gspo.generation.engine.api import EngineSampling

# As a message carries it.
FLOATS_32 = st.floats(LEAST_TEMPERATURE, MOST_TEMPERATURE).map(lambda value: float(np.float32(value)))


@settings(max_examples=100, deadline=None)
@given(
    temperature=st.just(0.0) | FLOATS_32.filter(lambda value: LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3),
    seed=st.none() | st.integers(0, 2**31),
    max_tokens=st.integers(1, 10_000),
)
def test_vllm_keeps_every_value(temperature: float, stop: list[str], seed: int | None, max_tokens: int) -> None:
    asked = EngineSampling(max_tokens, temperature, stop=tuple(stop), seed=seed)
    kept: Any = vllm_requests.sampling_params(asked, 100)
    names = asdict(asked).keys() - {"keep_sets"}
    assert {**{name: getattr(kept, name) for name in names}, "stop": tuple(kept.stop), "keep_sets": False} == asdict(
        asked
    )
    assert kept.logprobs == 0


def test_the_bounds_of_the_configuration_are_those_of_vllm() -> None:
    assert sampling_params._MAX_TEMP == LEAST_TEMPERATURE
    assert SamplingParams(temperature=MOST_TEMPERATURE).temperature == MOST_TEMPERATURE
    with pytest.raises(VLLMValidationError, match="temperature must be in"):
        SamplingParams(temperature=MOST_TEMPERATURE + 0.01)
    with pytest.raises(VLLMValidationError, match="empty string"):
        SamplingParams(stop=[""])


@pytest.mark.parametrize("temperature", [1e-6, 0.005, 0.0099])
def test_a_temperature_that_vllm_would_replace_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature {temperature:g} is below 0.01"):
        vllm_requests.sampling_params(EngineSampling(1, temperature), 100)


def test_the_least_temperature_is_sampled_at_also_as_a_message_carries_it() -> None:
    assert SamplingConfig(temperature=LEAST_TEMPERATURE).temperature == LEAST_TEMPERATURE
    asked = EngineSampling(1, float(np.float32(LEAST_TEMPERATURE)))
    assert vllm_requests.sampling_params(asked, 100).temperature == pytest.approx(LEAST_TEMPERATURE, rel=1e-6)


@pytest.mark.parametrize(
    ("top_k", "vocabulary", "listed"), [(20, 1000, 36), (64, 1000, 80), (20, 30, 30), (20, 20, 20)]
)
def test_more_tokens_than_top_k_are_listed_as_far_as_there_are_some(top_k: int, vocabulary: int, listed: int) -> None:
    asked = EngineSampling(1, top_k=top_k, top_p=0.95, min_p=0.1, keep_sets=True)
    kept = vllm_requests.sampling_params(asked, vocabulary)
    assert (kept.logprobs, kept.top_k, kept.top_p, kept.min_p) == (listed, top_k, 0.95, 0.1)
    assert vllm_requests.sampling_params(replace(asked, keep_sets=False), vocabulary).logprobs == 0


def listed_logprobs(*places: dict[int, float]) -> FlatLogprobs:
    """vLLM's list: at each place the sampled token, and then the likeliest ones."""
    listed = FlatLogprobs()
    for place in places:
        ids, values = list(place), list(place.values())
        listed.append_fast([ids[1], *ids], [values[1], *values], itertools.count(1), itertools.repeat(None))
    return listed


def test_the_tokens_that_were_kept_are_those_with_a_finite_log_prob() -> None:
    cut = -math.inf
    listed = listed_logprobs(
        {7: -0.5, 9: -1.0, 3: cut, 4: cut},
        {5: -0.5, 6: -1.0, 8: -3.0, 1: cut},
        {5: -1.0, 6: -1.0, 8: -1.0, 1: -1.0},  # the last one is kept too: a fifth may tie with it
    )
    tokens = vllm_requests.tokens_of([9, 6, 6], listed, None, 100)
    assert (tokens.token_ids, tokens.logp) == ([9, 6, 6], [-1.0, -1.0, -1.0])
    assert (tokens.kept_sizes, tokens.kept_ids) == ([2, 3, 0], [7, 9, 5, 6, 8])
    last = vllm_requests.tokens_of([9, 6, 6], listed, None, 100, first=1)
    assert (last.token_ids, last.logp, last.kept_sizes, last.kept_ids) == ([6, 6], [-1.0, -1.0], [3, 0], [5, 6, 8])
    assert vllm_requests.tokens_of([9, 6, 6], listed, None, 100, first=3).kept_sizes == []
    whole = vllm_requests.tokens_of([6], listed_logprobs({0: -1.0, 1: -1.0, 2: -1.0, 3: -1.0}), None, 4)
    assert (whole.kept_sizes, whole.kept_ids) == ([4], [0, 1, 2, 3])  # there is no further token
    plain = vllm_requests.tokens_of([6], FlatLogprobs([0], [1], [6], [-1.0], [1], [None]), None, 100)
    assert (plain.logp, plain.kept_sizes, plain.kept_ids) == ([-1.0], [], [])
    none = vllm_requests.tokens_of([], FlatLogprobs(), None, 100)
    assert (none.token_ids, none.kept_sizes) == ([], [])
