"""The tokens that a chat template puts behind an answer of the policy.

The policy's own text is neither rendered nor tokenised again. A text of this module stands in its place when a
conversation is rendered; what follows that text follows any answer.
"""

import secrets
from typing import Any, Protocol

# No template trims, splits or drops it, and no message has it.
_TEXT = f"the-answer-of-the-policy-{secrets.token_hex(8)}"
ANSWER: dict[str, Any] = {"role": "assistant", "content": _TEXT}


class Encoder(Protocol):
    """A tokenizer, of any library."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text."""


def tokens_behind_answer(tokenizer: Encoder, rendered: str, last_token_id: int | None) -> list[int] | None:
    """The tokens behind ANSWER in a rendered conversation; None where the template does not show it unchanged.

    Args:
        last_token_id: The last token of the policy's turn. If it is the template's own end of a turn, that is not
            repeated.
    """
    _, answer, behind = rendered.partition(_TEXT)
    if not answer:
        return None
    token_ids = tokenizer.encode(behind, add_special_tokens=False)
    return token_ids[1:] if token_ids and token_ids[0] == last_token_id else token_ids
