"""Three chat templates with a tokenizer each: they differ in what stands between turns, and in what they drop.

They are cut down from published ones.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Trims contents, and ends a turn without a line break.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Drops the thinking of every answer but the last, and shows what tools say as a user's message.
QWEN3 = (
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What a policy says that thinks.
THOUGHT = "<think>\nhalf of it?\n</think>\n\n16 "
# What a policy spells letter by letter has other tokens than its text.
MERGES = [("h", "a"), ("o", "f"), ("i", "t")]


def tokenizer_of(template: str, specials: list[str], end: str) -> PreTrainedTokenizerFast:
    """A token for each byte, a few for two of them, and the template's markers, of which `end` ends a turn."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (*specials, "<|pad|>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=specials[0],
        eos_token=end,
        pad_token="<|pad|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


# The end of a turn is the second one: one model then speaks under every template.
IM = ["<|im_start|>", "<|im_end|>"]
HEADERS = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
TOKENIZERS = {
    "chatml": tokenizer_of(CHATML, IM, "<|im_end|>"),
    "llama3": tokenizer_of(LLAMA3, HEADERS, "<|eot_id|>"),
    "qwen3": tokenizer_of(QWEN3, IM, "<|im_end|>"),
}
