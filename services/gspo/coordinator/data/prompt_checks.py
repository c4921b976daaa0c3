"""Faults of readable prompts: findings that a run keeps, since no figure of a step shows them."""

from collections.abc import Iterable, Iterator, Sequence

from gspo.common.telemetry.findings import Finding
from gspo.coordinator.data.prompts import PromptSet

# The others follow from a choice of the user's: they are shown, and are no alert.
FAULTS = ("held_out_in_training", "held_out_twice", "scores_differ")


def prompt_findings(training: Sequence[PromptSet], held_out: Iterable[PromptSet]) -> list[Finding]:
    """Prompts that are skipped or continued, or are there twice, and held-out prompts that are trained on."""
    held_out, known = list(held_out), set[int]()
    findings = [finding for prompts in training for finding in _of_training(prompts)]
    for prompts in training if held_out else ():
        known.update(prompts.hashes)
    return [*findings, *(finding for prompts in held_out for finding in _of_held_out(prompts, known))]


def _of_training(prompts: PromptSet) -> Iterator[Finding]:
    if prompts.num_skipped:
        seen = f"{prompts.key}: {prompts.num_skipped} of {prompts.num_rows} prompts are too long and skipped"
        yield Finding("prompts_skipped", seen)
    if prompts.num_continued:
        yield Finding(
            "prompts_continued",
            f"{prompts.key}: {prompts.num_continued} of {prompts.num_rows} prompts end with a message of the "
            "assistant, which the policy continues (data.on_assistant_end)",
        )
    if prompts.num_like_messages:
        types, column = prompts.source.key("types"), prompts.source.prompt_column
        yield Finding(
            "prompts_like_messages",
            f"{prompts.key}: {prompts.num_like_messages} of {prompts.num_rows} prompts are text that begins as a list "
            "of messages does, and get no chat template",
            tries=(f"{types}: {{{column}: json}}, which reads a list in JSON",),
        )
    for role, count in prompts.left_out_roles.items():
        yield Finding(
            "messages_left_out",
            f"{prompts.key}: the chat template leaves out what messages of the role '{role}' say, in {count} of "
            f"{prompts.num_rows} prompts",
            tries=("the roles that it knows, such as system and user",),
        )


def _of_held_out(prompts: PromptSet, trained_on: set[int]) -> Iterator[Finding]:
    if common := [number for number, text in enumerate(prompts.hashes) if text in trained_on]:
        yield Finding(
            "held_out_in_training",
            f"{prompts.key}: {len(common)} of {len(prompts)} held-out prompts are also training prompts, the first "
            f"in {prompts.place(common[0])}; the evaluation would measure memorised answers",
            tries=("taking them out of one of the two files",),
        )
    if repeated := len(prompts) - len(set(prompts.hashes)):
        yield Finding(
            "held_out_twice",
            f"{prompts.key}: {repeated} of {len(prompts)} held-out prompts are there before, so the standard errors "
            "of the evaluation are too small",
            tries=("taking them out of the file",),
        )
