"""The coordinator's check of a configuration: the prompts, and the tokenizer and chat template that they need.

It starts nothing and imports no torch.
"""

from __future__ import annotations

import asyncio

from gspo.common.config.schema import Config
from gspo.common.errors import warn
from gspo.common.host.machine import free_memory
from gspo.common.model.files import model_folder
from gspo.common.model.memory_needs import check_answers_fit, check_fits, coordinator_bytes
from gspo.common.model.template_trial import check_chat_template
from gspo.coordinator.data.prompts import PromptSet, held_out_prompts, training_prompts
from gspo.coordinator.data.tokenizer import load_tokenizer
from gspo.environments.mcp.tool_listing import with_listed_tools

_MEMORY = "the coordinator's memory"


def check(config: Config) -> None:
    """Read every prompt once; warn on standard error of skipped prompts and of held-out prompts that are trained on.

    Raises:
        InputError: Prompts or tokenizer cannot be used, or the groups of a batch do not fit into memory.
    """
    check_fits(config, coordinator_bytes(config), free_memory(), _MEMORY)
    config = asyncio.run(with_listed_tools(config))
    check_chat_template(model_folder(config.model))
    tokenizer = load_tokenizer(config.model)
    training = training_prompts(config, tokenizer)
    for prompts in training:
        if prompts.num_skipped:
            warn(f"{prompts.key}: {prompts.num_skipped} of {prompts.num_rows} prompts are too long and skipped")
        if prompts.num_continued:
            warn(
                f"{prompts.key}: {prompts.num_continued} of {prompts.num_rows} prompts end with a message of the "
                "assistant, which the policy continues (data.on_assistant_end)"
            )
    held_out = held_out_prompts(config, tokenizer)
    check_answers_fit(config, max(map(len, held_out.values()), default=0), free_memory(), _MEMORY)
    known = {hash(text) for prompts in training for text in prompts.texts()} if held_out else set()
    for prompts in held_out.values():
        _warn_of_overlap(known, prompts)


def _warn_of_overlap(trained_on: set[int], held_out: PromptSet) -> None:
    common = [number for number, text in enumerate(held_out.texts()) if hash(text) in trained_on]
    if common:
        warn(
            f"{held_out.key}: {len(common)} of {len(held_out)} held-out prompts are also training prompts, the first "
            f"in {held_out.place(common[0])}; the evaluation would measure memorised answers. Take them out of one of "
            "the two files"
        )
