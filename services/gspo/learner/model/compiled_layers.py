"""The layers of a dense model compiled by torch: what lies between two products becomes one kernel.

The attention is not compiled: it reads the packed line from outside the layer, and is a kernel of its own.
"""

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.common.model.mixtures import has_experts
from gspo.learner.model.attention import stay_uncompiled

# A kernel rounds to bfloat16 where the layer's own code does, and not only at its end.
_OPTIONS = {"emulate_precision_casts": True}
# Kinds of layers, with and without gradients, in training and in evaluation: more than torch's limit of 8.
_MOST_FORMS = 64


def compile_layers(causal_lm: PreTrainedModel) -> None:
    """Have each layer compiled at its first pass, for any number of tokens.

    The first pass takes some 20 s, and less where torch finds what an earlier process compiled. Under gradient
    checkpointing the compiled layer runs again in the backward pass. The layers of a mixture stay as they are, since
    the sizes of their products depend on the tokens.
    """
    if has_experts(causal_lm.config.to_dict()):
        return
    stay_uncompiled()
    torch._dynamo.config.recompile_limit = _MOST_FORMS
    for module in causal_lm.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True, options=_OPTIONS)
