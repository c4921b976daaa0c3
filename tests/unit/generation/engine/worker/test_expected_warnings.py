"""The filter of vLLM's expected warnings."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from gspo.generation.engine.worker.expected_warnings import filter_expected_warnings


@pytest.fixture
def handler() -> Iterator[logging.StreamHandler[io.StringIO]]:
    """A handler of vLLM's logger in place of pytest's own handlers."""
    logger, handler = logging.getLogger("vllm"), logging.StreamHandler(io.StringIO())
    before = logger.handlers
    logger.handlers = [handler]
    yield handler
    logger.handlers = before


def test_only_the_warnings_of_every_healthy_run_are_dropped(handler: logging.StreamHandler[io.StringIO]) -> None:
    filter_expected_warnings()
    filter_expected_warnings()
    assert len(handler.filters) == 1
    log = logging.getLogger("vllm.config")
    log.warning("Triton is not installed. triton-cpu is expected on %s CPUs.", "x86")
    log.warning("%s: Failed to load weights", "YaRNScalingRotaryEmbedding")
    log.warning("%s: Failed to load weights", "QKVParallelLinear")
    log.error("Triton is not installed, and this cannot go on")
    assert handler.stream.getvalue().splitlines() == [
        "QKVParallelLinear: Failed to load weights",
        "Triton is not installed, and this cannot go on",
    ]
