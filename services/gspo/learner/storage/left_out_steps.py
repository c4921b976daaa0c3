"""The steps that are left out of training, durably; and their tokens, each once in one account of the token ledger."""

import time
from collections import Counter
from collections.abc import Iterable

from gspo.learner.assembly.ended_tokens import trained_tokens
from gspo.learner.assembly.rows import Row
from gspo.learner.storage.durable_files import JsonLines
from gspo.runlog.left_out import LeftOutRecord
from gspo.runlog.token_ledger import LEFT_OUT_TOKENS


class LeftOutSteps:
    """The records of log/left_out.jsonl.

    Raises:
        ValueError: A line is not the learner's.
    """

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._records = {record.step: record for record in lines.records(LeftOutRecord.model_validate)}

    def __contains__(self, step: int) -> bool:
        return step in self._records

    def add(self, step: int, rows: Iterable[Row]) -> None:
        """Record a step with its rows; on the disk when this returns."""
        tokens: Counter[str] = Counter()
        for row in rows:
            counted = trained_tokens(row)
            tokens.update({counted.column: counted.num, counted.masked_column: counted.num_masked})
        counts = {column: num for column, num in tokens.items() if num}
        self._append(LeftOutRecord(step=step, unix_s=time.time(), tokens=counts))

    def moved(self, account: str) -> dict[str, int]:
        """The changes of an account's counts by the steps: column -> tokens, whose sum is 0.

        Redis counts a step when it is logged, and may lose its data at any time. So each step belongs to the account of
        the first call after it was left out, which is on the disk when this returns.
        """
        for record in [record for record in self._records.values() if not record.account]:
            self._append(record.model_copy(update={"account": account}))
        changes: Counter[str] = Counter()
        for record in self._records.values():
            if record.account == account:
                changes.subtract(record.tokens)
                changes[LEFT_OUT_TOKENS] += sum(record.tokens.values())
        return dict(changes)

    def _append(self, record: LeftOutRecord) -> None:
        self._lines.append([record.model_dump()])
        self._records[record.step] = record
