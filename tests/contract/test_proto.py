"""The contract: the generated code is that of the sources, and what travels arrives as it was sent.

What it is not: a test of protobuf. It holds what our readers rely on: schema numbers, exact floats, compact arrays.
"""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gspo_proto import generation_pb2, learner_pb2, reward_pb2, rollout_pb2
from gspo_proto.rollout_pb2 import Event, GroupFailure, GroupTask, Rollout, Score, Scored, ScoredRollout, Settlement

PROTO = Path(__file__).parents[2] / "proto"
FILES = (rollout_pb2, generation_pb2, reward_pb2, learner_pb2)
ENTRIES = (GroupTask, Rollout, Scored, Event)


def test_the_committed_code_is_what_the_sources_generate(tmp_path: Path) -> None:
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "grpc_python_out")]
    outputs += [f"--{kind}=quiet:{tmp_path}" for kind in ("mypy_out", "mypy_grpc_out")]
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("gspo_proto/*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
    # protoc finds the mypy plugins beside the interpreter.
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=PROTO, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    generated = {path.name: path.read_text() for path in tmp_path.glob("gspo_proto/*")}
    committed = {path.name: path.read_text() for path in PROTO.glob("gspo_proto/*_pb2*")}
    assert len(generated) == 4 * len(sources)
    stale = sorted(name for name in generated | committed if generated.get(name) != committed.get(name))
    assert stale == [], "run `make proto`"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry.DESCRIPTOR.name))
def test_a_stream_entry_begins_with_its_schema_number(entry: Any) -> None:
    """A reader of another release finds the number before it needs to understand anything else."""
    schema = entry.DESCRIPTOR.fields_by_name["schema"]
    assert (schema.number, schema.type) == (1, FieldDescriptor.TYPE_UINT32)
    assert entry(schema=3).SerializeToString() == b"\x08\x03"


def _messages(found: dict[str, Descriptor]) -> list[Descriptor]:
    return [message for outer in found.values() for message in (outer, *_messages(dict(outer.nested_types_by_name)))]


def test_every_list_of_numbers_is_packed() -> None:
    """A rollout of 4,096 tokens has four of them: unpacked, each value would carry its field number."""
    fields = [
        field
        for file in FILES
        for message in _messages(dict(file.DESCRIPTOR.message_types_by_name))
        for field in message.fields
    ]
    unpacked = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)
    numbers = [field for field in fields if field.is_repeated and field.type not in unpacked]
    assert len(numbers) >= 5
    assert [field.full_name for field in numbers if not field.is_packed] == []


def test_a_rollout_arrives_as_it_was_sent() -> None:
    """Log-probs are fp32 and must keep their bits: the ratio is made from them."""
    bits = struct.unpack("<3f", bytes.fromhex("cdccccbd010000800000c0ff"))  # -0.1, the smallest below zero, NaN
    sent = Rollout(
        schema=1,
        group=2**40,
        number=7,
        token_ids=[0, 151_935],
        logp=bits[:2],
        version=[-1, 12],
        mask=b"\x00\x01",
        text="Zoë 🙂\x00",
        temperature=0.7,
    )
    got = Rollout.FromString(sent.SerializeToString())
    assert got == sent
    assert struct.pack("<2f", *got.logp) == struct.pack("<2f", *bits[:2])
    assert list(got.version) == [-1, 12]
    assert math.isnan(Rollout.FromString(Rollout(logp=[bits[2]]).SerializeToString()).logp[0])


def test_a_score_is_a_number_or_a_reason_and_never_both() -> None:
    score = Score(reward=0.0)
    assert score.WhichOneof("result") == "reward"  # a reward of zero is there, and is not a failure
    score.failure = "it raised"
    assert score.WhichOneof("result") == "failure"
    assert Score().WhichOneof("result") is None


def test_a_reward_keeps_all_its_bits() -> None:
    reward = 0.1 + 0.2
    assert Score.FromString(Score(reward=reward).SerializeToString()).reward == reward


def test_scored_tells_a_rollout_from_a_group_that_was_given_up() -> None:
    rollout = Scored(schema=1, rollout=ScoredRollout(rollout=Rollout(group=0), score=Score(failure="hung")))
    given_up = Scored(schema=1, failure=GroupFailure(group=0, attempt=3, reason="deadline"))
    assert Scored.FromString(rollout.SerializeToString()).WhichOneof("what") == "rollout"
    assert Scored.FromString(given_up.SerializeToString()).WhichOneof("what") == "failure"


def test_a_group_ends_in_one_of_five_ways() -> None:
    names = {name.removeprefix("SETTLEMENT_").lower() for name in Settlement.keys()}  # noqa: SIM118 - an enum wrapper
    assert names == {"unspecified", "trained", "filtered", "stale", "failed", "unused"}


def test_an_entry_of_a_later_release_keeps_what_this_one_does_not_know() -> None:
    """Field 90 stands for one that is still to come: it is passed on, so a forwarding service loses nothing."""
    unknown = bytes.fromhex("d2050568656c6c6f")  # field 90, 5 bytes: hello
    got = Rollout.FromString(Rollout(schema=1, group=3).SerializeToString() + unknown)
    assert got.group == 3
    assert got.SerializeToString().endswith(unknown)
