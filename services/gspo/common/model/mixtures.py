"""Mixtures of experts by their config.json, and those whose choice of experts cannot be replayed."""

from collections.abc import Mapping
from typing import Any

# Names of the number of experts in config.json.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Values of `model_type` whose layers choose experts without torch.topk over all of them, or hold experts of their own.
UNREPLAYED_TYPES = {
    "dbrx", "deepseek_v4", "doge", "jetmoe", "llama4", "llama4_text", "longcat_flash", "phimoe", "zaya",
}  # fmt: skip


def has_experts(facts: Mapping[str, Any]) -> bool:
    """Whether a language model's config.json declares several experts."""
    return any(isinstance(number := facts.get(name), int) and number > 1 for name in _NUM_EXPERTS)


def replays_experts(model_type: str) -> bool:
    """Whether the learner can replay a mixture's choice of experts (`algorithm.routing_replay`).

    It also tries it with the loaded model, which decides.
    """
    return model_type not in UNREPLAYED_TYPES
