"""A tokenizer that needs no download: one token a byte, ChatML markers and role names as single tokens.

Not trained on any text, and good for any text: every UTF-8 string survives encoding and decoding.
Used by near_miss.py; saved beside the model, so engines load it as they load any other.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
# Single tokens halve the prompt: spelt out, the role names are longer than the problem.
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte tokens 0..255, then the markers (special) and the role names; `<|im_end|>` ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (START, END, PAD)])
    backend.add_tokens([AddedToken(role, special=False) for role in ROLES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
