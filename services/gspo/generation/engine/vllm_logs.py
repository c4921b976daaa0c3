"""A filter of vLLM's expected warnings, which follow from our own settings or hold for every CPU.

They would be in the log of every healthy run, and hide warnings that matter. It runs in every process of vLLM.
"""

from __future__ import annotations

import logging
import warnings

from vllm.logger import DEFAULT_LOGGING_CONFIG

# The beginnings of their texts.
_EXPECTED = (
    # Of generation.engine's enforce_eager, which is ours unless a user says otherwise, and what follows from it.
    "Enforce eager set",
    "TORCH_COMPILE_DISABLE is set",
    "Inductor compilation was disabled by user settings",
    # There is no Triton for CPUs in the packages that vLLM's CPU build comes with.
    "Triton is not installed",
    "Model Runner V2 requires Triton",
    # Preloading them changed nothing that could be measured.
    "libtcmalloc is not found",
    "libiomp is not found",
    # It also appears for models without such layers.
    "Reset SSM cache type",
    # After every push: its table is computed, and no checkpoint holds it.
    "RotaryEmbedding: Failed to load weights",
)


class ExpectedWarningFilter(logging.Filter):
    """Drops the expected warnings."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be written."""
        return record.levelno != logging.WARNING or not record.getMessage().startswith(_EXPECTED)


def filter_expected_warnings() -> None:
    """Leave these warnings out of vLLM's log in this process; a second call changes nothing.

    vLLM sets its handlers up when it reads its configuration, and a child of its engine's has them already.
    """
    DEFAULT_LOGGING_CONFIG.setdefault("filters", {})["unexpected"] = {"()": ExpectedWarningFilter}
    DEFAULT_LOGGING_CONFIG["handlers"]["vllm"]["filters"] = ["unexpected"]
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(installed, ExpectedWarningFilter) for installed in handler.filters):
            handler.addFilter(ExpectedWarningFilter())
    # vLLM looks through every name of torch, deprecated ones too.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.reduce_op", category=FutureWarning)
