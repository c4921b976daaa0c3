"""vLLM's warnings that every healthy run would have, left out of its log."""

import logging
import warnings

from vllm.logger import DEFAULT_LOGGING_CONFIG

# Beginnings of vLLM's warnings that follow from our own settings or hold for every CPU. In the log of every healthy run
# they would hide the warnings that matter.
_EXPECTED = (
    # Of generation.engine's enforce_eager, which is ours unless a user says otherwise, and what follows from it.
    "Enforce eager set",
    "TORCH_COMPILE_DISABLE is set",
    "Inductor compilation was disabled by user settings",
    # In bfloat16 on a CPU without its instructions; torch's products, which it falls back to, are then made in float32.
    "Failed to create oneDNN linear",
    # There is no Triton for CPUs in the packages that vLLM's CPU build comes with.
    "Triton is not installed",
    "Model Runner V2 requires Triton",
    # Preloading them changed nothing that could be measured.
    "libtcmalloc is not found",
    "libiomp is not found",
    # It also appears for models without such layers.
    "Reset SSM cache type",
    # Of every sleep and wake under placement: shared.
    "sleep mode is not supported on CPU",
    # Of generation.draft_tokens: vLLM refuses a request with one of the two, and schedules one step at a time.
    "min_p and logit_bias parameters won't work with speculative decoding",
    "Async scheduling not supported with ngram-based",
    "max_num_scheduled_tokens is set to",
)
# Their ends. After every push, of all kinds of them: the table is computed, and no checkpoint holds it.
_EXPECTED_ENDS = ("RotaryEmbedding: Failed to load weights",)


class ExpectedWarningFilter(logging.Filter):
    """Drops the expected warnings."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return record.levelno != logging.WARNING or not (text.startswith(_EXPECTED) or text.endswith(_EXPECTED_ENDS))


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
