"""The learner's ranks act as one: rank zero sends each call of the trainer to the others, and all make it.

TrainerThread and recovery.py call RankZero; it and follow_rank_zero call the Trainer of their rank.
Rank zero alone talks to Redis, gRPC and the log; the others know rank zero's calls and the run directory.
consumes: rank zero's calls. waits for: the next one, which comes at the latest with the next heartbeat.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import structlog
from torch import Tensor, distributed

from gspo.common.config.schema import Config
from gspo.common.service.failure import in_step
from gspo.learner.assembly.rows import Row, from_table, to_table
from gspo.learner.objective.loss_file import with_kept_loss
from gspo.learner.ranks.out_of_memory import ShortageRecords
from gspo.learner.ranks.process_group import RankBroadcast, rank_errors
from gspo.learner.storage.checkpoint_parts import PartWriter, wait_for_parts
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import Hyperparameters, NotFiniteError, TrainResult, WriteCheckpoint

log = structlog.get_logger()
_END, _HEARTBEAT, _BEGIN_SAVE = "end", "rank_heartbeat", "begin_save"
_MOVE_TO_HOST, _MOVE_TO_DEVICE = "move_to_host", "move_to_device"
# Calls that touch no state of training.
_WITHOUT_STATES = (_END, _HEARTBEAT, _MOVE_TO_HOST, _MOVE_TO_DEVICE)


class RankZero:
    """Rank zero's trainer, with the other ranks behind it; the trainer itself where there are no others.

    Args:
        run_dir: The shared run directory, as this host knows it.
    """

    def __init__(self, config: Config, model: Path, run_dir: Path) -> None:
        self._timeout_s, self._run_dir, self._is_away = config.learner.rank_timeout_s, run_dir, False
        self._shortages = ShortageRecords(run_dir)
        with rank_errors(self._timeout_s):
            self._trainer = Trainer(with_kept_loss(config, run_dir), model)
            self._broadcast = RankBroadcast(self._timeout_s) if distributed.get_world_size() > 1 else None

    @property
    def has_other_ranks(self) -> bool:
        """Whether there are other ranks."""
        return self._broadcast is not None

    @property
    def cards(self) -> Mapping[str, float | None]:
        """The card of each rank -> its peak flop/s."""
        return self._trainer.engine.cards

    def train(
        self, step: int, rows: Sequence[Row], not_applied: Collection[int], hyperparameters: Hyperparameters
    ) -> TrainResult:
        """As Trainer.train."""
        numbers = {"not_applied": sorted(not_applied), "hyperparameters": asdict(hyperparameters)}
        with self._all_ranks("train", rows, step=step, **numbers):
            return self._trainer.train(step, rows, not_applied, hyperparameters)

    def policy(self, *, is_reused: bool = False) -> dict[str, Tensor]:
        """As Trainer.policy."""
        with self._all_ranks("policy"):
            return self._trainer.engine.policy(is_reused=is_reused)

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """As Trainer.save, into a folder of the run directory."""
        with self._all_ranks("save", folder=folder, state=dict(state)):
            self._trainer.engine.save(folder, state)

    def begin_save(self, folder: Path, state: Mapping[str, Any]) -> WriteCheckpoint:
        """As Trainer.begin_save, into a folder of the run directory; the other ranks begin to write at once."""
        with self._all_ranks(_BEGIN_SAVE, folder=folder, state=dict(state)):
            write_own = self._trainer.engine.begin_save(folder, state)
        num_ranks, timeout_s = distributed.get_world_size(), self._timeout_s

        def write(is_given_up: Callable[[], bool]) -> None:
            write_own()
            wait_for_parts(folder, num_ranks, timeout_s, is_given_up)

        return write

    def load(self, folder: Path) -> dict[str, Any]:
        """As Trainer.load, from a folder of the run directory."""
        with self._all_ranks("load", folder=folder):
            return self._trainer.engine.load(folder)

    def export(self, folder: Path) -> None:
        """As Trainer.export, into a folder of the run directory."""
        with self._all_ranks("export", folder=folder):
            self._trainer.engine.export(folder)

    def move_to_host(self) -> None:
        """As Trainer.move_to_host."""
        with self._all_ranks(_MOVE_TO_HOST):
            self._trainer.engine.move_to_host()
        self._is_away = True

    def move_to_device(self) -> None:
        """As Trainer.move_to_device."""
        with self._all_ranks(_MOVE_TO_DEVICE):
            self._trainer.engine.move_to_device()
        self._is_away = False

    def rank_heartbeat(self) -> None:
        """Show the other ranks that there will be calls, and see that they are there."""
        with self._all_ranks(_HEARTBEAT):
            if self._broadcast:
                self._broadcast.barrier()

    def close(self) -> None:
        """Let the other ranks end."""
        with self._all_ranks(_END):
            pass

    @contextmanager
    def _all_ranks(self, name: str, rows: Sequence[Row] = (), **arguments: Any) -> Iterator[None]:
        """Have the other ranks make a call of the trainer, which this one makes in the block.

        Raises:
            RuntimeError: The states that the call needs are in host memory: a tensor without memory ends the process.
            StepOutOfMemoryError, InputError: As ShortageRecords.recording.
        """
        if self._is_away and name not in _WITHOUT_STATES:
            raise RuntimeError(f"the trainer cannot {name}: its states are in host memory, not on the device")
        with self._shortages.recording(), rank_errors(self._timeout_s):
            if self._broadcast:
                if "folder" in arguments:
                    # The run directory may be mounted elsewhere on another host.
                    arguments["folder"] = str(arguments["folder"].relative_to(self._run_dir))
                call = json.dumps({"name": name, **arguments}).encode()
                self._broadcast.exchange(call + b"\n" + _packed(rows))
            yield


def follow_rank_zero(config: Config, model: Path, run_dir: Path) -> None:
    """Make every call of the trainer that rank zero makes, until it says that this is the end.

    Raises:
        RanksError: Another rank has ended or is silent.
        StepOutOfMemoryError, InputError: As ShortageRecords.recording.
        OSError: This rank could not write its part of a checkpoint.
    """
    shortages = ShortageRecords(run_dir)
    with shortages.recording(), rank_errors(config.learner.rank_timeout_s), PartWriter() as parts:
        trainer = Trainer(with_kept_loss(config, run_dir), model)
        broadcast = RankBroadcast(config.learner.rank_timeout_s)
        log.info("rank_ready", rank=distributed.get_rank(), num_ranks=distributed.get_world_size())
        while True:
            head, _, table = broadcast.exchange().partition(b"\n")
            parts.raise_error()
            call = json.loads(head)
            if call["name"] == _END:
                return
            if call["name"] == _HEARTBEAT:
                broadcast.barrier()
                continue
            try:
                _execute(trainer, parts, call, table, run_dir)
            except NotFiniteError as error:
                # Rank zero came to the same end, and decides what follows.
                log.info("training_ended", reason=str(error))


def _execute(trainer: Trainer, parts: PartWriter, call: Mapping[str, Any], table: bytes, run_dir: Path) -> None:
    """Make one call of the trainer as rank zero makes it."""
    match call["name"]:
        case "train":
            rows, hyperparameters = from_table(pa.ipc.open_stream(table).read_all()), call["hyperparameters"]
            with in_step(call["step"]):
                trainer.train(call["step"], rows, call["not_applied"], Hyperparameters(**hyperparameters))
        case "policy":
            trainer.engine.policy()
        case "save":
            trainer.engine.save(run_dir / call["folder"], call["state"])
        case "begin_save":
            parts.begin(trainer.engine.begin_save(run_dir / call["folder"], call["state"]))
        case "load":
            trainer.engine.load(run_dir / call["folder"])
        case "move_to_host":
            trainer.engine.move_to_host()
        case "move_to_device":
            trainer.engine.move_to_device()
        case "export":
            trainer.engine.export(run_dir / call["folder"])
        case unknown:
            raise ValueError(f"rank zero calls {unknown!r}, which this rank does not know: the ranks' versions differ")


def _packed(rows: Sequence[Row]) -> bytes:
    table, sink = to_table(rows), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed
