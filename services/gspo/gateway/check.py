"""The gateway's checks before the start. They import vLLM only for a parser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gspo.common.config.schema import Config
from gspo.common.errors import InputError, nearest
from gspo.common.model.files import model_folder
from gspo.common.model.tokenizer_trial import check_tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check(config: Config) -> None:
    """Refuse parsers that vLLM does not know, and a model without a chat template.

    Raises:
        InputError: Names the key.
    """
    from transformers import AutoTokenizer  # here: without a gateway nothing is checked

    folder = model_folder(config.model)
    check_tokenizer_files(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    if not tokenizer.chat_template:
        raise InputError(
            "model.path",
            f"{folder} has no chat template, and a gateway serves chats",
            "Add chat_template to its tokenizer files, or start no gateway (gateway.replicas: 0)",
        )
    _check_parsers(config, tokenizer)


def _check_parsers(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    gateway = config.gateway
    if gateway.tool_parser is None and gateway.reasoning_parser is None:
        return
    from vllm.reasoning import ReasoningParserManager  # here: importing vLLM takes seconds
    from vllm.tool_parsers import ToolParserManager

    for key, name, known in (
        ("tool_parser", gateway.tool_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", gateway.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name is not None and name not in known:
            raise InputError(f"gateway.{key}", f"{name} is not a parser of vLLM", nearest(name, known))
    from vllm.parser import ParserManager

    names, keys = (gateway.tool_parser or "", gateway.reasoning_parser or ""), ("tool_parser", "reasoning_parser")
    try:
        ParserManager.get_parser(*names, enable_auto_tools=True, tokenizer=tokenizer)
    except Exception as error:  # of one parser among many, each with its own
        key = f"gateway.{keys[0] if names[0] else keys[1]}"
        fix = "Name the parser of this model's family, or leave the key out"
        raise InputError(
            key, f"vLLM's parser does not work with this model: {error.__cause__ or error}", fix
        ) from error
