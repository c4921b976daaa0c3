"""Log-probs over the tokens that were kept: by hand, and against a softmax over all logits with the others masked."""

import math

import pytest
import torch
from torch import Tensor

from gspo_core.kept_logprobs import NO_TOKEN, kept_logprobs
from gspo_core.logprobs import token_logprobs


def masked_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, kept_NK: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The dense form: every logit outside of the set is minus infinity."""
    is_kept_NV = torch.zeros(len(hidden_ND), len(weight_VD) + 1, dtype=torch.bool)
    is_kept_NV[torch.arange(len(hidden_ND))[:, None], kept_NK.clamp(min=-1)] = True
    is_kept_NV = is_kept_NV[:, :-1]  # the fillings went to the last column
    z_NV = (hidden_ND @ weight_VD.T / temperature).masked_fill(~is_kept_NV, -math.inf)
    logp_NV = torch.log_softmax(z_NV, -1)
    entropy_N = -(logp_NV.exp() * logp_NV.masked_fill(~is_kept_NV, 0.0)).sum(-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0], entropy_N


def sets(num: int, V: int, K: int) -> tuple[Tensor, Tensor]:
    """Random sets of 1 to K tokens, and a target in each."""
    torch.manual_seed(1)
    kept_NK = torch.stack([torch.randperm(V)[:K] for _ in range(num)])
    size_N = torch.randint(1, K + 1, (num,))
    kept_NK = kept_NK.masked_fill(torch.arange(K) >= size_N[:, None], NO_TOKEN)
    place_N = (torch.rand(num) * size_N).long()
    return kept_NK, kept_NK.gather(1, place_N[:, None])[:, 0]


def test_literal() -> None:
    weight_VD = torch.tensor([[math.log(1.0)], [math.log(2.0)], [math.log(5.0)]])
    kept_NK = torch.tensor([[2, 0, NO_TOKEN]])  # 1 and 5 of 8: the 2 is outside
    logp_N, entropy_N = kept_logprobs(torch.ones(1, 1), weight_VD, torch.tensor([2]), kept_NK)
    assert logp_N.item() == pytest.approx(math.log(5 / 6))
    assert entropy_N.item() == pytest.approx(-(math.log(1 / 6) + 5 * math.log(5 / 6)) / 6)


@pytest.mark.parametrize("chunk_size", [1, 4, 1024])
@pytest.mark.parametrize("num", [0, 1, 9])
def test_equals_a_dense_masked_softmax_forward_and_backward(num: int, chunk_size: int) -> None:
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(num, 8).requires_grad_(), torch.randn(40, 8).requires_grad_()
    kept_NK, target_N = sets(num, 40, 7) if num else (torch.zeros(0, 7).long(), torch.zeros(0).long())
    up_logp, up_entropy = torch.randn(num), torch.randn(num)
    results = []
    for function, option in ((masked_logprobs, {}), (kept_logprobs, {"chunk_size": chunk_size})):
        outputs = function(hidden_ND, weight_VD, target_N, kept_NK, temperature=0.7, **option)
        loss = (outputs[0] * up_logp + outputs[1] * up_entropy).sum()
        results.append((*outputs, *torch.autograd.grad(loss, (hidden_ND, weight_VD))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_set_of_the_whole_vocabulary_is_no_cut() -> None:
    torch.manual_seed(0)
    hidden_ND, weight_VD, target_N = torch.randn(5, 8), torch.randn(40, 8), torch.randint(40, (5,))
    kept_NK = torch.arange(40).expand(5, 40)
    whole = token_logprobs(hidden_ND, weight_VD, target_N, temperature=0.9)
    torch.testing.assert_close(kept_logprobs(hidden_ND, weight_VD, target_N, kept_NK, temperature=0.9), whole)


def test_a_set_of_one_token_has_no_gradient() -> None:
    hidden_ND = torch.randn(3, 8).requires_grad_()
    target_N = torch.tensor([1, 5, 7])
    logp_N, entropy_N = kept_logprobs(hidden_ND, torch.randn(40, 8), target_N, target_N[:, None])
    assert logp_N.tolist() == entropy_N.tolist() == [0.0, 0.0, 0.0]
    (gradient_ND,) = torch.autograd.grad(logp_N.sum() + entropy_N.sum(), hidden_ND)
    assert not gradient_ND.any()


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([[0, 1], [2, 3]], "a target is not among the tokens that were kept for it"),
        ([[1, 40], [2, 3]], "ids outside the vocabulary"),
        ([[1, -2], [2, 3]], "ids outside the vocabulary"),
        ([[1, 2]], r"kept has shape \(1, 2\)"),
    ],
)
def test_impossible_sets_are_refused(kept: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kept_logprobs(torch.randn(2, 8), torch.randn(40, 8), torch.tensor([1, 1]), torch.tensor(kept))
