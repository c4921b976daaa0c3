"""The token ledger on the disk: the counts in Redis, in `log/ledger.jsonl` after each step and at the end.

consumes: the hash `tokens`, log/left_out.jsonl. produces: log/ledger.jsonl, gspo_ledger_tokens.
A wipe of Redis begins another account; the last that was read of the one before is then recorded.
"""

import asyncio
import time

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.token_counts import close, read_counts
from gspo.common.telemetry import metrics
from gspo.learner.assembly.settlements import GroupEnding
from gspo.learner.storage.run_directory import RunDir
from gspo.runlog.token_ledger import COLUMNS, SUPERSEDED, LedgerRecord

log = structlog.get_logger()
_READ_EVERY_S = 2.0


class TokenAccount:
    """Reads the counts of the present Redis, and records them."""

    def __init__(self, service: Service, run_dir: RunDir) -> None:
        self._service, self._run_dir = service, run_dir
        self._newest: LedgerRecord | None = None

    async def run(self) -> None:
        """Follow the counts until cancelled: for the metrics, and to have the last ones before a wipe."""
        while True:
            await self._read(step=self._newest.step if self._newest else 0)
            await asyncio.sleep(_READ_EVERY_S)

    async def record(self, step: int) -> None:
        """Record the counts; on the disk when this returns.

        Args:
            step: The newest.
        """
        if (record := await self._read(step)) is None:
            return
        if record.difference:
            log.warning("ledger_differs", step=step, tokens=record.difference, look=f"{self._run_dir.path}/log")
        await asyncio.to_thread(self._run_dir.append_ledger, record)

    async def close(self, step: int) -> None:
        """Record the last counts of a run that is finished: rollouts that are too late go to their group's column.

        Args:
            step: The newest.
        """
        await close(self._service.redis, self._service.keys, self._column_of_late)
        await self.record(step)

    def _column_of_late(self, group: int) -> str:
        """The rows of a trained group have counted its rollouts; the rest was made twice, or came late."""
        ending = self._run_dir.settlements.get(group)
        if ending is None:
            return ""
        return SUPERSEDED if ending is GroupEnding.TRAINED else ending.value

    async def _read(self, step: int) -> LedgerRecord | None:
        """The counts of this moment; None while Redis has none."""
        account, counts = await read_counts(self._service.redis, self._service.keys)
        if not account:
            return None
        for column, num in (await asyncio.to_thread(self._run_dir.left_out.moved, account)).items():
            counts[column] = counts.get(column, 0) + num
        newest = LedgerRecord(step=step, unix_s=time.time(), account=account, tokens=counts)
        before, self._newest = self._newest, newest
        if before is not None and before.account != account:
            await asyncio.to_thread(self._run_dir.append_ledger, before)
        for name in COLUMNS:
            metrics.LEDGER_TOKENS.labels(name).set(counts.get(name, 0))
        metrics.LEDGER_DIFFERENCE.set(newest.difference)
        return newest
