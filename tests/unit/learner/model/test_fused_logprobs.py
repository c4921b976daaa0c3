"""The compiled output layer against gspo_core's."""

from __future__ import annotations

import pytest
import torch

from gspo.learner.model.fused_logprobs import fused_token_logprobs
from gspo_core.logprobs import token_logprobs

WIDTH, VOCABULARY = 8, 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_the_figures_and_gradients_of_the_reference(dtype: torch.dtype) -> None:
    """Chunks that divide the rows and that do not, one and both outputs with a gradient, no rows at all."""
    # Under bfloat16 the gradient of a logit may round the other way.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for num_rows, chunk_size, of_logp, of_entropy in ((15, 4, 1, 1), (15, 1024, 1, 0), (8, 4, 0, 1), (0, 4, 1, 1)):
        torch.manual_seed(0)
        hidden_ND = torch.randn(num_rows, WIDTH).requires_grad_()
        weight_VD = torch.randn(VOCABULARY, WIDTH).requires_grad_()
        target_N, up_N = torch.randint(VOCABULARY, (num_rows,)), torch.randn(num_rows)
        results = []
        for function in (token_logprobs, fused_token_logprobs):
            logp_N, entropy_N = function(
                hidden_ND.to(dtype), weight_VD, target_N, temperature=0.7, chunk_size=chunk_size
            )
            outputs = [it for it, is_used in ((logp_N, of_logp), (entropy_N, of_entropy)) if is_used]
            gradients = torch.autograd.grad(
                torch.stack([(it * up_N).sum() for it in outputs]).sum(), (hidden_ND, weight_VD)
            )
            results.append((logp_N, entropy_N, *gradients))
        torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
