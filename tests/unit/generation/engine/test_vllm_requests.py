"""A request reaches vLLM with the values that it has, or is refused: vLLM replaces none of them unseen."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams, sampling_params
from vllm.exceptions import VLLMValidationError

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
    kept: Any = vllm_requests.sampling_params(asked)
    assert {**{name: getattr(kept, name) for name in asdict(asked)}, "stop": tuple(kept.stop)} == asdict(asked)


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
        vllm_requests.sampling_params(EngineSampling(1, temperature))


def test_the_least_temperature_is_sampled_at_also_as_a_message_carries_it() -> None:
    assert SamplingConfig(temperature=LEAST_TEMPERATURE).temperature == LEAST_TEMPERATURE
    asked = EngineSampling(1, float(np.float32(LEAST_TEMPERATURE)))
    assert vllm_requests.sampling_params(asked).temperature == pytest.approx(LEAST_TEMPERATURE, rel=1e-6)
