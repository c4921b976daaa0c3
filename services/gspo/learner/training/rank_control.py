"""The learner's ranks act as one: each call of rank zero's trainer is sent to the other ranks, and all make it.

TrainerThread and recovery.py call RankZero. It and follow_rank_zero make each call on their rank's Trainer or its
engine, so that a call is written there and in TrainerApi alone.
Rank zero alone talks to Redis, gRPC and the log; the others know rank zero's calls and the run directory.
consumes: rank zero's calls. waits for: the next one, which comes at the latest with the next heartbeat.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa
import structlog
from torch import distributed

from gspo.common.config.schema import Config
from gspo.common.service.failure import in_step
from gspo.learner.assembly.rows import from_table, to_table
from gspo.learner.objective.loss_file import with_kept_loss
from gspo.learner.ranks.out_of_memory import ShortageRecords
from gspo.learner.ranks.process_group import RankBroadcast, rank_errors
from gspo.learner.shares.share_server import ShareServer
from gspo.learner.storage.checkpoint_parts import BesideThread
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import Hyperparameters, NotFiniteError, TrainerApi

log = structlog.get_logger()
_CLOSE, _HEARTBEAT = "close", "rank_heartbeat"
_MOVE_TO_HOST, _MOVE_TO_DEVICE = "move_to_host", "move_to_device"
# Calls that touch no state of training.
_WITHOUT_STATES = (_CLOSE, _HEARTBEAT, _MOVE_TO_HOST, _MOVE_TO_DEVICE, "write_share")
Call = TypeVar("Call", bound=Callable[..., Any])


def _on_all_ranks(call: Call) -> Call:
    """The same call, made by every rank."""
    signature = inspect.signature(call)

    @wraps(call)
    def dispatched(zero: RankZero, *values: Any, **named: Any) -> Any:
        bound = signature.bind(zero, *values, **named)
        bound.apply_defaults()
        return zero._call(call.__name__, {name: bound.arguments[name] for name in list(bound.arguments)[1:]})

    return cast("Call", dispatched)


class RankZero:
    """Rank zero's trainer, with the other ranks behind it; the trainer itself where there are no others.

    Folders of checkpoints and models are in the run directory, as any host may have mounted it elsewhere.

    Args:
        run_dir: The shared run directory, as this host knows it.
    """

    def __init__(self, config: Config, model: Path, run_dir: Path) -> None:
        self._timeout_s, self._run_dir, self._is_away = config.learner.rank_timeout_s, run_dir, False
        self._shortages = ShortageRecords(run_dir)
        with rank_errors(self._timeout_s):
            self._trainer = Trainer(with_kept_loss(config, run_dir), model)
            self._broadcast = RankBroadcast(self._timeout_s) if distributed.get_world_size() > 1 else None

    train = _on_all_ranks(TrainerApi.train)
    begin_version = _on_all_ranks(TrainerApi.begin_version)
    write_share = _on_all_ranks(TrainerApi.write_share)
    save = _on_all_ranks(TrainerApi.save)
    begin_save = _on_all_ranks(TrainerApi.begin_save)
    load = _on_all_ranks(TrainerApi.load)
    export = _on_all_ranks(TrainerApi.export)
    move_to_host = _on_all_ranks(TrainerApi.move_to_host)
    move_to_device = _on_all_ranks(TrainerApi.move_to_device)
    rank_heartbeat = _on_all_ranks(TrainerApi.rank_heartbeat)
    close = _on_all_ranks(TrainerApi.close)

    @property
    def has_other_ranks(self) -> bool:
        return self._broadcast is not None

    @property
    def gpus(self) -> Mapping[str, float | None]:
        """The GPU of each rank -> its peak flop/s."""
        return self._trainer.engine.gpus

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Make a call here and on the other ranks.

        Raises:
            RuntimeError: The states that the call needs are in host memory: a tensor without memory ends the process.
            StepOutOfMemoryError, InputError: As ShortageRecords.recording.
        """
        if self._is_away and name not in _WITHOUT_STATES:
            raise RuntimeError(f"the trainer cannot {name}: its states are in host memory, not on the device")
        with self._shortages.recording(), rank_errors(self._timeout_s):
            if self._broadcast:
                self._broadcast.exchange(_encoded(name, arguments, self._run_dir))
            result = _make(self._trainer, self._broadcast, name, arguments)
        if name in (_MOVE_TO_HOST, _MOVE_TO_DEVICE):
            self._is_away = name == _MOVE_TO_HOST
        return result


def follow_rank_zero(config: Config, model: Path, run_dir: Path, server: ShareServer | None = None) -> None:
    """Make every call of the trainer that rank zero makes, until it says that this is the end.

    Args:
        server: Serves this rank's share of each version; None where nothing is pushed.

    Raises:
        RanksError: Another rank has ended or is silent.
        StepOutOfMemoryError, InputError: As ShortageRecords.recording.
        OSError: This rank could not write its part of a checkpoint.
    """
    shortages = ShortageRecords(run_dir)
    with (
        shortages.recording(),
        rank_errors(config.learner.rank_timeout_s),
        BesideThread("checkpoint") as parts,
        BesideThread("version") as versions,
    ):
        trainer = Trainer(with_kept_loss(config, run_dir), model, server)
        broadcast = RankBroadcast(config.learner.rank_timeout_s)
        log.info("rank_ready", rank=distributed.get_rank(), num_ranks=distributed.get_world_size())
        name = ""
        while name != _CLOSE:
            name, arguments = _decoded(broadcast.exchange(), run_dir)
            parts.raise_error()
            versions.raise_error()
            try:
                with in_step(arguments["step"]) if "step" in arguments else nullcontext():
                    result = _make(trainer, broadcast, name, arguments)
            except NotFiniteError as error:
                # Rank zero came to the same end, and decides what follows.
                log.info("training_ended", reason=str(error))
                continue
            if name == "begin_save":
                parts.begin(partial(result, lambda: False))
            if name == "begin_version":
                versions.begin(result)
            # Its copies are free when the version is.
            del result


def _make(trainer: Trainer, broadcast: RankBroadcast | None, name: str, arguments: Mapping[str, Any]) -> Any:
    if name == _HEARTBEAT:
        return broadcast.barrier() if broadcast else None
    if name == _CLOSE:
        return None
    owner = trainer if name == "train" else trainer.engine
    if not hasattr(owner, name):
        raise ValueError(f"rank zero calls {name!r}, which this rank does not know: the ranks' versions differ")
    return getattr(owner, name)(**arguments)


def _encoded(name: str, arguments: Mapping[str, Any], run_dir: Path) -> bytes:
    """A line of JSON, and the rows as an Arrow stream."""

    def plain(value: Any) -> Any:
        match value:
            case Path():
                return str(value.relative_to(run_dir))
            case Hyperparameters():
                return asdict(value)
            case Mapping():
                return dict(value)
            case str():
                return value
            case Collection():
                return sorted(value)
        return value

    head = json.dumps([name, {key: plain(value) for key, value in arguments.items() if key != "rows"}])
    sink = pa.BufferOutputStream()
    if "rows" in arguments:
        table = to_table(arguments["rows"])
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    return head.encode() + b"\n" + bytes(sink.getvalue().to_pybytes())


def _decoded(message: bytes, run_dir: Path) -> tuple[str, dict[str, Any]]:
    head, _, table = message.partition(b"\n")
    name, arguments = json.loads(head)
    if "folder" in arguments:
        arguments["folder"] = run_dir / arguments["folder"]
    if "hyperparameters" in arguments:
        arguments["hyperparameters"] = Hyperparameters(**arguments["hyperparameters"])
    if table:
        arguments["rows"] = from_table(pa.ipc.open_stream(table).read_all())
    return name, arguments
