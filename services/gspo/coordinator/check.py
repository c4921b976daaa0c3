"""The coordinator's check of a configuration: the prompts, and the tokenizer and chat template that they need.

It starts nothing and imports no torch.
"""

import asyncio

from gspo.common.config.schema import Config
from gspo.common.errors import warn
from gspo.common.host.machine import free_memory
from gspo.common.model.files import model_folder
from gspo.common.model.memory_needs import check_answers_fit, check_fits, coordinator_bytes
from gspo.common.model.tokenizer_trial import check_tokenizer_files
from gspo.coordinator.data.prompt_checks import prompt_findings
from gspo.coordinator.data.prompts import held_out_prompts, training_prompts
from gspo.coordinator.data.tokenizer import load_tokenizer
from gspo.environments.mcp.tool_listing import with_listed_tools

_MEMORY = "the coordinator's memory"


def check(config: Config, *, is_evaluation: bool = False) -> None:
    """Read every prompt once; warn on standard error of skipped prompts and of held-out prompts that are trained on.

    Args:
        is_evaluation: Nothing is trained: the prompts are the held-out ones.

    Raises:
        InputError: Prompts or tokenizer cannot be used, or the groups of a batch do not fit into memory.
    """
    check_fits(config, coordinator_bytes(config), free_memory(), _MEMORY)
    config = asyncio.run(with_listed_tools(config))
    check_tokenizer_files(model_folder(config.model))
    tokenizer = load_tokenizer(config.model)
    training = [] if is_evaluation else training_prompts(config, tokenizer)
    held_out = held_out_prompts(config, tokenizer)
    check_answers_fit(config, max(map(len, held_out.values()), default=0), free_memory(), _MEMORY)
    for finding in prompt_findings(training, held_out.values()):
        warn(finding.text)
