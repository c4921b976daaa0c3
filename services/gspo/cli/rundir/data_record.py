"""The digests of the data files, which are part of a run: a resume with other contents is refused, or on record."""

import json
import time
from pathlib import Path

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.durable_write import replace_file
from gspo.runlog.data_files import DATA_FILES, DataFilesRecord, Digests, differences, digest_of
from gspo.runlog.run_log import RunLog


def digests_of(config: Config) -> dict[str, dict[str, str]]:
    """The digests of all data files by the keys that name them; each file is read once."""
    files = {source.key("prompts"): source.prompts for source in config.sources}
    files |= {config.evaluation.key_of(name): (path,) for name, path in config.evaluation.files.items()}
    known = {path: digest_of(path) for paths in files.values() for path in paths}
    return {key: {str(path): known[path] for path in paths} for key, paths in files.items()}


def check_unchanged(run_dir: Path, config: Config, digests: Digests) -> tuple[str, ...]:
    """The accepted changes of contents since the last start of a run, a sentence each.

    A run without a record was started when cells of CSV were numbers, where they looked so.

    Raises:
        InputError: Contents have changed, and data.changed_files does not accept it.
    """
    records = RunLog(run_dir).data_files()
    if not records:
        cells = "cells are text from now on, and data.types makes numbers of a column"
        return tuple(
            f"{key}: {path}: {cells}" for key, files in digests.items() for path in files if path.endswith(".csv")
        )
    changes = differences(records[-1].digests, digests)
    if changes and config.data.changed_files == "refuse":
        key, rule = next(iter(changes.items()))
        more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise InputError(
            key,
            f"{rule}{more}: the order of prompts and the figures would no longer be those of one data set",
            "Restore the file; or set data.changed_files: accept in your configuration, and resume with it",
        )
    return tuple(f"{key}: {text}" for key, text in changes.items())


def write_record(run_dir: Path, digests: Digests, changes: tuple[str, ...]) -> None:
    """Record the digests of a start, unless the record before has the same."""
    log = RunLog(run_dir)
    records = log.data_files()
    if records and records[-1].digests == digests:
        return
    step = max(log.step_files(), default=0)
    record = DataFilesRecord(unix_s=time.time(), step=step, digests=digests, changes=changes)
    lines = [*(earlier.model_dump() for earlier in records), record.model_dump()]
    replace_file(run_dir / DATA_FILES, "".join(json.dumps(line) + "\n" for line in lines).encode())
