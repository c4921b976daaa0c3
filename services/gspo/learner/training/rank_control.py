"""How the learner's ranks act as one: rank 0 tells the others each call of the trainer, and they make it too.

Rank 0 alone talks to Redis, gRPC and the log; the others know the run directory for its checkpoints, and what they
are told. consumes: rank 0's orders. waits for: the next one, which comes at the latest with the next sign of life.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import structlog
from torch import Tensor, distributed

from gspo.common.config.schema import Config
from gspo.learner.assembly.rows import Row, from_table, to_table
from gspo.learner.ranks.process_group import RankBroadcast, rank_errors
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import Hyperparameters, NotFiniteError, TrainResult

log = structlog.get_logger()
_END, _HEARTBEAT = "end", "rank_heartbeat"


class RankZero:
    """Rank 0's trainer, with the others behind it; the trainer itself where there are no others.

    Args:
        run_dir: The shared run directory, as this host knows it.
    """

    def __init__(self, config: Config, model: Path, run_dir: Path) -> None:
        self._timeout_s, self._run_dir = config.learner.rank_timeout_s, run_dir
        with rank_errors(self._timeout_s):
            self._trainer = Trainer(config, model, seed=config.seed)
            self._line = RankBroadcast(self._timeout_s) if distributed.get_world_size() > 1 else None

    @property
    def has_other_ranks(self) -> bool:
        """Whether there are other ranks."""
        return self._line is not None

    def train(
        self,
        step: int,
        rows: Sequence[Row],
        known: Collection[int] = (),
        hyperparameters: Hyperparameters | None = None,
    ) -> TrainResult:
        """As Trainer.train."""
        with rank_errors(self._timeout_s):
            values = asdict(hyperparameters) if hyperparameters else None
            self._send_call("train", rows, step=step, known=sorted(known), hyperparameters=values)
            return self._trainer.train(step, rows, known, hyperparameters)

    def policy(self) -> dict[str, Tensor]:
        """As Trainer.policy."""
        with rank_errors(self._timeout_s):
            self._send_call("policy")
            return self._trainer.policy()

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """As Trainer.save, into a folder of the run directory."""
        with rank_errors(self._timeout_s):
            self._send_call("save", folder=str(folder.relative_to(self._run_dir)))
            self._trainer.save(folder, state)

    def load(self, folder: Path) -> dict[str, Any]:
        """As Trainer.load, from a folder of the run directory."""
        with rank_errors(self._timeout_s):
            self._send_call("load", folder=str(folder.relative_to(self._run_dir)))
            return self._trainer.load(folder)

    def export(self, folder: Path) -> None:
        """As Trainer.export."""
        with rank_errors(self._timeout_s):
            self._send_call("export", folder=str(folder.relative_to(self._run_dir)))
            self._trainer.export(folder)

    def rank_heartbeat(self) -> None:
        """Show the others that there will be orders, and see that they are there."""
        with rank_errors(self._timeout_s):
            self._send_call(_HEARTBEAT)
            if self._line:
                self._line.barrier()

    def close(self) -> None:
        """Let the others end."""
        with rank_errors(self._timeout_s):
            self._send_call(_END)

    def _send_call(self, what: str, rows: Sequence[Row] = (), **details: Any) -> None:
        if self._line:
            head = json.dumps({"what": what, **details}).encode()
            self._line.send(head + b"\n" + _packed(rows))


def follow_rank_zero(config: Config, model: Path, run_dir: Path) -> None:
    """Make every call of the trainer that rank 0 makes, until it says that this is the end.

    Raises:
        RanksError: Another rank has ended or is silent.
    """
    with rank_errors(config.learner.rank_timeout_s):
        trainer = Trainer(config, model, seed=config.seed)
        line = RankBroadcast(config.learner.rank_timeout_s)
        log.info("rank_ready", rank=distributed.get_rank(), num_ranks=distributed.get_world_size())
        while True:
            head, _, table = line.receive().partition(b"\n")
            order = json.loads(head)
            if order["what"] == _END:
                return
            if order["what"] == _HEARTBEAT:
                line.barrier()
            else:
                _execute(trainer, order, table, run_dir)


def _execute(trainer: Trainer, order: Mapping[str, Any], table: bytes, run_dir: Path) -> None:
    match order["what"]:
        case "train":
            values = order["hyperparameters"]
            hyperparameters = Hyperparameters(**values) if values else None
            try:
                trainer.train(order["step"], _unpacked(table), order["known"], hyperparameters)
            except NotFiniteError as error:
                log.info("training_ended", reason=str(error))  # rank 0 came to the same end, and says what follows
        case "policy":
            trainer.policy()
        case "save":
            trainer.save(run_dir / order["folder"], {})
        case "load":
            trainer.load(run_dir / order["folder"])
        case "export":
            trainer.export(run_dir / order["folder"])
        case unknown:
            raise ValueError(f"rank 0 ordered {unknown!r}, which nobody knows: the ranks run unlike versions")


def _packed(rows: Sequence[Row]) -> bytes:
    table = to_table(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _unpacked(packed: bytes) -> list[Row]:
    return from_table(pa.ipc.open_stream(packed).read_all())
