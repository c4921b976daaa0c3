"""Which of vLLM's warnings are left out of its log."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from services.generation.vllm_logs import leave_out_expected


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What vLLM's logger writes."""
    stream = io.StringIO()
    logger, handler = logging.getLogger("vllm"), logging.StreamHandler(stream)
    before = logger.handlers
    logger.handlers = [handler]
    yield stream
    logger.handlers = before


def test_only_what_every_healthy_run_says_is_left_out(written: io.StringIO) -> None:
    leave_out_expected()
    leave_out_expected()
    (handler,) = logging.getLogger("vllm").handlers
    assert len(handler.filters) == 1
    log = logging.getLogger("vllm.config")
    log.warning("Triton is not installed. triton-cpu is expected on %s CPUs.", "x86")
    log.warning("The KV cache is nearly full")
    log.error("Triton is not installed, and this cannot go on")
    assert written.getvalue().splitlines() == [
        "The KV cache is nearly full",
        "Triton is not installed, and this cannot go on",
    ]
