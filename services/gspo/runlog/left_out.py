"""The steps that a user has left out of training: the lines of `log/left_out.jsonl`.

A step that is left out keeps its file and its number: its version has the weights of the version before.
"""

from collections.abc import Collection, Sequence

from pydantic import BaseModel, ConfigDict

LEFT_OUT = "left_out.jsonl"


class LeftOutRecord(BaseModel):
    """A step that is left out; the last line of a step counts.

    Attributes:
        tokens: Column of the token ledger -> tokens of the step that it counts.
        account: The token ledger's, in which they go to the column `left_out`; empty before its first record since.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    unix_s: float
    tokens: dict[str, int]
    account: str = ""


def why_not_left_out(step: int, *, logged: Collection[int], versions: Collection[int], checkpoint: int) -> str:
    """Why a step cannot be left out; empty where it can.

    Args:
        logged: The steps that have a file.
        versions: The policy versions on record.
        checkpoint: The step of the newest one, or 0.
    """
    if step <= checkpoint:
        return f"step {step} lies before the last checkpoint, of step {checkpoint}, whose weights have its update"
    if step in versions:
        return f"step {step} was applied: policy version {step} is on record, and rollouts may be of it"
    if step not in logged:
        return f"step {step} is not logged: the log ends with step {max(logged, default=0)}"
    return ""


def left_out_line(steps: Sequence[int]) -> str:
    """The steps that are left out of training, in one line; empty where there are none."""
    if not steps:
        return ""
    return f"left out of training (--leave-out): step {', '.join(map(str, steps))}"
