"""The end of all ranks after a step that ran out of memory on one, with a record for their next start.

A rank that failed within a pass has left the collective calls of the others, and a failed optimizer step may have
changed a part of the weights. So every rank ends. The next process recovers the state before the step from the log, and
makes the step with smaller micro-batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from gspo.common.errors import InputError, StartAgainError
from gspo.common.host.durable_write import replace_file
from gspo.learner.ranks.process_group import RanksError
from gspo.runlog.memory_shortages import MemoryShortage, shortage_files, shortage_path
from gspo.runlog.run_log import LOG_FOLDER

log = structlog.get_logger()


class StepOutOfMemoryError(StartAgainError):
    """A step ran out of memory on a rank."""

    def __init__(self, shortage: MemoryShortage) -> None:
        super().__init__(shortage.sentence)
        self.shortage = shortage


class ShortageRecords:
    """Puts the record of this rank on the disk, and knows that of another one by which all ranks end.

    Args:
        run_dir: As this host knows it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / LOG_FOLDER
        self._earlier = set(shortage_files(self._folder))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A block of calls of the trainer.

        Raises:
            StepOutOfMemoryError: A step ran out of memory, here or on a rank that has ended; its record is on the disk.
            InputError: So, and nothing smaller is left to try.
        """
        try:
            yield
        except StepOutOfMemoryError as error:
            line = f"{error.shortage.model_dump_json()}\n"
            replace_file(shortage_path(self._folder, error.shortage), line.encode())
            log.error("step_out_of_memory", step=error.shortage.step, reason=error.shortage.sentence)
            raise _ending(error.shortage) from error
        except RanksError as error:
            files = [path for path in shortage_files(self._folder) if path not in self._earlier]
            if not files:
                raise
            raise _ending(MemoryShortage.model_validate_json(files[0].read_bytes())) from error


def _ending(shortage: MemoryShortage) -> Exception:
    if not shortage.is_last:
        return StepOutOfMemoryError(shortage)
    return InputError(
        "learner.micro_batch_tokens",
        shortage.sentence,
        "Resume with learner.offload, a higher learner.zero_stage, or more learner.ranks or learner.sequence_ranks",
    )
