"""Which of vLLM's warnings are left out of its log."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from gspo.generation.engine.vllm_logs import filter_expected_warnings


@pytest.fixture
def handler() -> Iterator[logging.StreamHandler[io.StringIO]]:
    """Writes what vLLM's logger says. pytest may have handlers of its own there, once vLLM has set its logger up."""
    logger, handler = logging.getLogger("vllm"), logging.StreamHandler(io.StringIO())
    before = logger.handlers
    logger.handlers = [handler]
    yield handler
    logger.handlers = before


def test_only_what_every_healthy_run_says_is_left_out(handler: logging.StreamHandler[io.StringIO]) -> None:
    filter_expected_warnings()
    filter_expected_warnings()
    assert len(handler.filters) == 1
    log = logging.getLogger("vllm.config")
    log.warning("Triton is not installed. triton-cpu is expected on %s CPUs.", "x86")
    log.warning("The KV cache is nearly full")
    log.error("Triton is not installed, and this cannot go on")
    assert handler.stream.getvalue().splitlines() == [
        "The KV cache is nearly full",
        "Triton is not installed, and this cannot go on",
    ]
