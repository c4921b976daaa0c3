"""A random model with a long context, a tokenizer of pieces for the prompts of coding agents, and a scripted engine.

A prompt of 80,000 characters is 30,000 tokens here; tiny_model.py has a token a character.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gspo.generation.engine.api import Completion, EngineSampling, Tokens
from tests.support.tiny_model import SPECIAL_TOKENS, make_tiny_model

MAX_LENGTH = 131_072
# Tools and calls as Qwen's templates have them, so that the parser hermes reads the calls.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_long_model(folder: Path) -> tuple[Path, PreTrainedTokenizerFast]:
    """Write it to `folder`; the folder, and the tokenizer, which learns its pieces from the project's pages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pages = sorted((Path(__file__).parents[3] / "docs").glob("[a-m]*.md"))
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(page) for page in pages], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    return make_tiny_model(folder, layers=1, max_length=MAX_LENGTH, scale=4.0, tokenizer=fast), fast


class PromptedEngine:
    """An engine whose answer follows from the text of its prompt.

    Attributes:
        prompts: Texts that it was asked with.
    """

    version, is_asleep, num_running = 3, False, 0

    def __init__(self, tokenizer: PreTrainedTokenizerFast, answer: Callable[[str], str]) -> None:
        self._tokenizer, self._answer = tokenizer, answer
        self._running: dict[str, list[int]] = {}
        self.prompts: list[str] = []

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: EngineSampling) -> Completion:
        """All of it, after a while in which its half can be seen."""
        prompt = self._tokenizer.decode(prompt_token_ids)
        self.prompts.append(prompt)
        token_ids = self._tokenizer.encode(self._answer(prompt), add_special_tokens=False)
        self._running[request_id] = [*token_ids, self._tokenizer.eos_token_id]
        await asyncio.sleep(0.1)
        whole = self._tokens(self._running[request_id])
        del self._running[request_id]
        return Completion(**vars(whole), finish="stop")

    def num_sampled(self, request_id: str) -> int:
        """Half of the answer."""
        return len(self._running.get(request_id, ())) // 2

    def partial_output(self, request_id: str, first: int = 0) -> Tokens:
        """Half of the answer."""
        return self._tokens(self._running.get(request_id, [])[first : self.num_sampled(request_id)])

    def _tokens(self, token_ids: list[int]) -> Tokens:
        return Tokens(token_ids, [-0.5] * len(token_ids), [self.version] * len(token_ids))
