"""The models whose packed lines ranks can share (`learner.sequence_ranks`), and the shares of their attention heads."""

from collections.abc import Iterable

# Layers that keep the rollouts of a line apart; others, such as recurrent ones, would mix them.
PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Values of `model_type` whose rollouts cannot lie in one line, as docs/models.md found them.
PADDED_TYPES = {
    "axk2", "bamba", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "bloom", "deepseek_v32",
    "deepseek_v4", "doge", "falcon", "falcon_h1", "falcon_mamba", "glm_moe_dsa", "gpt_neo", "gpt_neox_japanese",
    "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "jamba", "lfm2_moe", "mamba", "mamba2", "marian", "mbart",
    "mimo_v2_flash", "minimax", "mvp", "nemotron_h", "olmo_hybrid", "openai-gpt", "pegasus", "plbart", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "reformer", "rwkv", "trocr", "xglm",
}  # fmt: skip


def shares_lines(model_type: str, layer_types: Iterable[str] | None) -> bool:
    """Whether ranks can share the packed lines of a model, by these keys of its config.json.

    A model with an attention of its own, or with recurrent layers, cannot. The learner also tries
    it with the loaded model, which decides for the types that docs/models.md does not list.
    """
    return model_type not in PADDED_TYPES and PACKED_LAYERS.issuperset(layer_types or ())


def heads_divide(num_heads: int, num_key_heads: int, num_ranks: int) -> bool:
    """Whether each rank can take as many query heads, and the key heads that these need.

    Fewer key heads than ranks are repeated: then a rank has one, and several ranks have the same.
    """
    return num_heads % num_ranks == 0 and (num_key_heads % num_ranks == 0 or num_ranks % num_key_heads == 0)
