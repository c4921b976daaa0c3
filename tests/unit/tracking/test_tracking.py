"""The figures in trackers, read back with TensorBoard's and Weights & Biases' own readers."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gspo.common.config.evaluation import TrackingConfig
from gspo.common.config.loading import CONFIG_NAME, parse_config, write_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.learner import trackers
from gspo.learner.trackers import Trackers, check_trackers
from gspo.tracking.__main__ import follow
from gspo.tracking.follower import FigureRecord, Follower, TrackerPosition, hyperparameters
from gspo.tracking.tensorboard import TensorBoard

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord


@pytest.fixture
def config(tmp_path: Path) -> Config:
    raw_config = {
        "name": "small",
        "model": {"path": "."},
        "data": {"prompts": "p.jsonl"},
        "reward": {"functions": [{"path": "r.py"}]},
        "evaluation": {"prompts": {"easy": "e.jsonl"}},
        "run": {"total_steps": 10, "directory": str(tmp_path)},
        "services": {"redis_url": "redis://host:6379/0", "token_file": "secret"},
        "tracking": {
            "tensorboard": True,
            "wandb": {"project": "sums", "entity": "team", "mode": "offline", "tags": ["a", "b"]},
        },
    }
    config = parse_config(raw_config, tmp_path)
    (config.run_dir / "log").mkdir(parents=True)
    write_config(config, config.run_dir / CONFIG_NAME)
    return config


def record(config: Config, name: str, text: str) -> None:
    with (config.run_dir / "log" / name).open("a") as file:
        file.write(text)


def step(config: Config, number: int, **figures: float | None) -> None:
    line = {"step": number, "version": number, "unix_s": 1000.0 + number, "figures": figures}
    record(config, "metrics.jsonl", json.dumps(line) + "\n")


def evaluation(config: Config, version: int, **figures: float) -> None:
    line = {"label": f"v{version}/easy", "version": version, "step": version, "unix_s": 1000.5 + version}
    record(config, "evaluations.jsonl", json.dumps({**line, "file": "easy", "figures": figures}) + "\n")


def session(config: Config, tracker: str) -> None:
    """One session from its start to the last record."""
    ended = threading.Event()
    ended.set()
    follow(config.run_dir, tracker, config, ended)


def scalars(config: Config) -> dict[str, list[tuple[int, float, float]]]:
    """By tag, (step, value, unix time) of everything that TensorBoard shows."""
    shown = EventAccumulator(str(config.run_dir / "tensorboard"), size_guidance={"scalars": 0})
    shown.Reload()
    return {
        tag: [(e.step, e.value, e.wall_time) for e in shown.Scalars(tag)] for tag in sorted(shown.Tags()["scalars"])
    }


def test_tensorboard_shows_every_step_once_over_all_sessions(config: Config) -> None:
    evaluation(config, 0, sampled_mean=0.25)
    step(config, 1, reward_mean=0.5, noise_share=None)
    step(config, 2, reward_mean=0.625, noise_share=0.125)
    record(config, "metrics.jsonl", '{"step": 3, "version": 3, "fig')
    session(config, "tensorboard")
    record(config, "metrics.jsonl", 'ures": {"reward_mean": 0.75}, "unix_s": 1003.0}\n')
    evaluation(config, 2, sampled_mean=0.5)
    session(config, "tensorboard")
    session(config, "tensorboard")
    assert scalars(config) == {
        "eval/easy/sampled_mean": [(0, 0.25, 1000.5), (2, 0.5, 1002.5)],
        "finding/clip_is_noise": [(2, 1.0, 1002.0), (3, 1.0, 1003.0)],
        "train/noise_share": [(2, 0.125, 1002.0)],
        "train/reward_mean": [(1, 0.5, 1001.0), (2, 0.625, 1002.0), (3, 0.75, 1003.0)],
    }


def test_what_a_killed_session_wrote_and_did_not_remember_is_there_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(config, 1, reward_mean=0.5)
    session(config, "tensorboard")
    step(config, 2, reward_mean=0.75)
    with monkeypatch.context() as patch:
        patch.setattr(TrackerPosition, "write", lambda _self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session(config, "tensorboard")
    session(config, "tensorboard")
    assert scalars(config) == {"train/reward_mean": [(1, 0.5, 1001.0), (2, 0.75, 1002.0)]}


def test_tensorboard_has_the_configuration_as_hyperparameters(config: Config) -> None:
    step(config, 1, reward_mean=0.5)
    session(config, "tensorboard")
    shown = EventAccumulator(str(config.run_dir / "tensorboard"))
    shown.Reload()
    plugin = shown.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    keys = HParamsPluginData.FromString(plugin).session_start_info.hparams
    assert keys["algorithm.rollout_batch_size"].number_value == config.algorithm.rollout_batch_size
    assert "algorithm.rollout_batch_size" in shown.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_hyperparameters_hold_no_secret(config: Config) -> None:
    keys = hyperparameters(config)
    assert keys["learner.learning_rate"] == 1e-6
    assert str(keys["evaluation.prompts.easy"]).endswith("e.jsonl")
    assert keys["evaluation.limit"] == "null"
    assert "secret" not in str(keys)


def wandb_records(path: Path) -> Iterator[WandbRecord]:
    """The records of an offline run: LevelDB's log format, blocks of 32 KiB, behind a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord  # seconds, which each worker would take

    data, place, parts = path.read_bytes(), 7, b""
    assert data[:4] in (b":W&B", b"")
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _checksum, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield WandbRecord.FromString(parts)
            parts = b""


def _whole(path: Path) -> list[WandbRecord]:
    """The records of a session that has ended: wandb's own process may still write when `finish` returns."""
    deadline = time.monotonic() + 20
    while not ((records := [*wandb_records(path)]) and records[-1].HasField("exit")):
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.05)
    return records


def wandb_history(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """(run id, values) of every line of every offline session, in order."""
    records = []
    for path in sorted((config.run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        for line in _whole(path):
            if line.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in line.history.item}
                records.append((path.stem, {key: json.loads(value) for key, value in items.items()}))
    return records


def test_an_offline_run_of_wandb_holds_every_step_once_and_is_gone_on_with(config: Config) -> None:
    evaluation(config, 0, sampled_mean=0.25)
    step(config, 1, reward_mean=0.5)
    session(config, "wandb")
    step(config, 2, reward_mean=0.75)
    evaluation(config, 1, sampled_mean=0.375)
    session(config, "wandb")
    lines = wandb_history(config)
    assert len({run_id for run_id, _ in lines}) == 1
    runs = [record.run for path in config.run_dir.glob("wandb/offline-run-*/run-*.wandb") for record in _whole(path)]
    assert {(run.entity, run.project) for run in runs if run.run_id} == {("team", "sums")}
    # wandb's own counter continues after the first session; the x axis is `step`.
    assert [
        {name: value for name, value in values.items() if name in ("_step", "step") or "/" in name}
        for _, values in lines
    ] == [
        {"_step": 0, "step": 1, "train/reward_mean": 0.5},
        {"_step": 1, "step": 0, "eval/easy/sampled_mean": 0.25},
        {"_step": 2, "step": 2, "train/reward_mean": 0.75},
        {"_step": 3, "step": 1, "eval/easy/sampled_mean": 0.375},
    ]


async def test_the_learner_keeps_a_process_and_lets_it_finish(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_FIRST_PAUSE_S", 0.05)
    kept = Trackers(TrackingConfig(tensorboard=True), config.run_dir)
    running = asyncio.create_task(kept.run())
    step(config, 1, reward_mean=0.5)

    async def sent(num_sent: int) -> Any:
        path = config.run_dir / "tracking" / "tensorboard.json"
        async with asyncio.timeout(60):
            while not path.exists() or json.loads(path.read_text())["num_sent"] < num_sent:
                await asyncio.sleep(0.05)
        return kept._processes["tensorboard"]

    first = await sent(1)
    first.kill()
    step(config, 2, reward_mean=0.75)
    second = await sent(2)
    assert second.pid != first.pid
    step(config, 3, reward_mean=1.0)
    running.cancel()
    await kept.finish()
    assert second.returncode == 0
    assert [value for _, value, _ in scalars(config)["train/reward_mean"]] == [0.5, 0.75, 1.0]


async def test_a_tracker_that_hangs_does_not_hold_up_the_end(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trackers, "FINISH_S", 0.1)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    kept = Trackers(TrackingConfig(tensorboard=True), config.run_dir)
    running = asyncio.create_task(kept.run())
    async with asyncio.timeout(10):
        while not kept._processes:
            await asyncio.sleep(0.01)
        running.cancel()
        await kept.finish()
    assert kept._processes["tensorboard"].returncode == -9


def test_a_record_is_sent_after_the_position_is_known(config: Config) -> None:
    step(config, 1, reward_mean=0.5)
    position = TrackerPosition.read(config.run_dir, "tensorboard")
    tracker = TensorBoard(config.run_dir, config, position)
    follower = Follower(config.run_dir, config, tracker, position)
    assert [follower.send_new(), follower.send_new()] == [1, 0]
    again = TrackerPosition.read(config.run_dir, "tensorboard")
    assert (again.num_sent, again.last_step, again.run_id) == (1, 1, position.run_id)
    tracker.close()


def test_a_finding_is_a_figure_from_its_first_step_on_also_after_a_restart(config: Config) -> None:
    sent: list[dict[str, float]] = []

    class Kept:
        def send(self, record: FigureRecord) -> None:
            sent.append({name: value for name, value in record.figures.items() if name.startswith("finding/")})

        def flush(self) -> None: ...

        def close(self) -> None: ...

    for number in range(1, 5):
        step(config, number, zero_spread_groups=1.0, reward_mean=0.0)
        follower = Follower(config.run_dir, config, Kept(), TrackerPosition.read(config.run_dir, "kept"))
        assert follower.send_new() == 1
    step(config, 5, zero_spread_groups=0.2, reward_mean=0.5)
    assert follower.send_new() == 1
    assert sent == [{}, {}, {"finding/no_signal": 1.0}, {"finding/no_signal": 1.0}, {"finding/no_signal": 0.0}]


@pytest.mark.parametrize(
    ("tracking", "missing", "message"),
    [
        (
            {"tensorboard": True},
            "tensorboardX",
            r"tracking.tensorboard: needs the package tensorboardX.*gspo\[tensorbo",
        ),
        (
            {"wandb": {"project": "p"}},
            "wandb",
            r"tracking.wandb.project: needs the package wandb.*pip install 'gspo\[wan",
        ),
        (
            {"wandb": {"project": "p"}},
            "",
            r"tracking.wandb.mode: online needs a key.*`wandb login`, or set mode: offline",
        ),
    ],
)
def test_what_a_tracker_lacks_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tracking: dict[str, Any], missing: str, message: str
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(InputError, match=message):
        check_trackers(TrackingConfig(**tracking))


def test_a_key_or_offline_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    check_trackers(TrackingConfig(wandb={"project": "p"}))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    check_trackers(TrackingConfig(wandb={"project": "p", "mode": "offline"}))
    monkeypatch.setenv("WANDB_API_KEY", "key")
    check_trackers(TrackingConfig(wandb={"project": "p"}))
