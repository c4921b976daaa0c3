"""vLLM's warnings that say nothing to a user of ours: they follow from what we set, or hold for every CPU.

They would stand in the log of every healthy run, and hide the ones that matter. Neighbour: weights.py calls it in
every process of vLLM.
"""

from __future__ import annotations

import logging
import warnings

from vllm.logger import DEFAULT_LOGGING_CONFIG

# How they begin.
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
    # Said of models that have no such layers, too.
    "Reset SSM cache type",
    # After every push: its table is computed, and no checkpoint holds it.
    "RotaryEmbedding: Failed to load weights",
)


class ExpectedWarningFilter(logging.Filter):
    """Lets everything through but these warnings."""

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
        if not any(isinstance(found, ExpectedWarningFilter) for found in handler.filters):
            handler.addFilter(ExpectedWarningFilter())
    # vLLM looks through every name of torch, deprecated ones too.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.reduce_op", category=FutureWarning)
