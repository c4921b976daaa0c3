"""The floating-point operations that a model needs for a sequence: the one formula of plans and of measured MFU.

These are model flops: what the mathematics needs, without the operations that code repeats (gradient checkpointing, the
output layer's second product), pads or masks. So two implementations of one model have the same number.
A product of a matrix with E elements and a vector takes 2 E operations, a multiplication and an addition for each.
Norms, activations, softmax and the optimizer are left out, as in https://arxiv.org/abs/2204.02311, appendix B.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# The window of a layer that sees every earlier token.
UNLIMITED = 0


@dataclass(frozen=True)
class ModelFlops:
    """The matrices of one model that its operations follow from, in elements.

    Attributes:
        body: Elements of the layers' matrices that multiply one token; for a mixture those of the token's own experts.
        head: Elements of the output layer.
        attention: Window of layers, in tokens, or UNLIMITED -> heads * (width of a key + width of a value) / 2, summed
            over these layers.
        trained_body, trained_head: The part of `body` and `head` that is trained: under LoRA the adapters alone.
    """

    body: float
    head: float
    attention: Mapping[int, float]
    trained_body: float
    trained_head: float

    def forward(self, length: int, num_predicted: int) -> float:
        """Operations of one forward pass over a sequence.

            2 (body S + head N) + 4 sum_w attention_w pairs(S, w)

        Args:
            length: S, the tokens that the layers read.
            num_predicted: N, the positions whose logits are needed.
        """
        return 2 * (self.body * length + self.head * num_predicted) + self._attention(length)

    def backward(self, length: int, num_predicted: int) -> float:
        """Operations of the backward pass of `forward`: the gradient of every input, and of every trained matrix.

        2 ((body + trained_body) S + (head + trained_head) N) + 8 sum_w attention_w pairs(S, w)
        """
        body, head = self.body + self.trained_body, self.head + self.trained_head
        return 2 * (body * length + head * num_predicted) + 2 * self._attention(length)

    def sampling(self, prompt_length: int, lengths_and_sampled: list[tuple[int, int]]) -> float:
        """Operations that sampling one group's answers needs: its prompt is read once.

        Args:
            prompt_length: Tokens of the prompt.
            lengths_and_sampled: For each rollout, the tokens that the layers read, prompt included, and those sampled.
        """
        prompt = self.forward(prompt_length, 0)
        return prompt + sum(self.forward(length, sampled) - prompt for length, sampled in lengths_and_sampled)

    def _attention(self, length: int) -> float:
        """Operations of one forward pass: the products of queries with keys, and of scores with values."""
        return 4 * sum(width * causal_pairs(length, window) for window, width in self.attention.items())


def causal_pairs(length: int, window: int = UNLIMITED) -> int:
    """Pairs of a token and one that it sees, itself included, in a sequence.

    S (S + 1) / 2 without a window; with a window w < S, w (w + 1) / 2 + (S - w) w.
    """
    seen = min(length, window) if window else length
    return seen * (seen + 1) // 2 + (length - seen) * seen
