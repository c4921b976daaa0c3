"""An extension of vLLM's worker on a CPU: it multiplies with the weights themselves, as a GPU does, not with copies."""

from vllm import _custom_ops

# Without oneDNN vLLM falls back to torch's own product.
_custom_ops._supports_onednn = False


class PlainProducts:
    """Nothing more: vLLM imports this module before it loads a model."""
