"""The time and the kernels of a training step by operation, as parts of `make gpu-test` count them, on a CPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from gspo.learner.training.trainer import Trainer
from tests.gpu.breakdown import _named_modules, host_seconds, seconds_by_part
from tests.gpu.parts.repeat import refused_kernels
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train, with_version

NUM_LAYERS = 2
# Of each layer: queries, keys, values, output, and three of the feed-forward part.
NUM_LINEAR = 7 * NUM_LAYERS


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[FunctionEvent]:
    """Those of one mini-batch in one micro-batch."""
    folder = make_tiny_model(tmp_path_factory.mktemp("policy"), layers=NUM_LAYERS)
    learner = {"micro_batch_tokens": 100_000}
    config = make_config(folder, algorithm={"pg_clip": 0.05, "num_mini_batches": 1}, learner=learner)
    trainer, rows = Trainer(config, folder), make_rows(folder, num_mini_batches=1)
    train(trainer, 1, rows)
    with _named_modules(trainer), profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(trainer, 2, with_version(rows, 1))
    return list(profiled.events() or [])


def parts_of(events: list[FunctionEvent], operation: str) -> Counter[str]:
    """Part -> calls of an operation."""

    def is_it(event: FunctionEvent) -> float:
        return float(event.name == operation)

    return Counter({part: int(num) for part, num in seconds_by_part(events, is_it).items()})


def test_every_part_has_operations(events: list[FunctionEvent]) -> None:
    parts = seconds_by_part(events, host_seconds)
    layers = {"attention", "linear layers", "norms", "activations", "rotary", "residual sums"}
    others = {"embedding", "head and loss", "optimizer", "casts and copies", "sums of gradients"}
    assert layers | others <= parts.keys()


def test_operations_go_to_their_parts_in_both_passes(events: list[FunctionEvent]) -> None:
    # One product forward, and two in the backward pass.
    assert parts_of(events, "aten::mm")["linear layers"] == 3 * NUM_LINEAR
    assert parts_of(events, "aten::_fused_adamw_").keys() == {"optimizer"}
    assert parts_of(events, "aten::rsqrt").keys() == {"norms"}
    assert parts_of(events, "aten::silu").keys() == {"activations"}
    assert parts_of(events, "aten::silu_backward").keys() == {"activations"}
    assert parts_of(events, "aten::_softmax").keys() == {"attention"}
    assert parts_of(events, "aten::_softmax_backward_data").keys() == {"attention"}
    assert parts_of(events, "aten::_log_softmax").keys() == {"head and loss"}


def test_kernels_without_a_deterministic_form_are_named() -> None:
    done: list[bool] = []

    def work() -> None:
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
        done.append(torch.are_deterministic_algorithms_enabled())

    assert (refused_kernels(work), done) == (["put_"], [True])
    assert (refused_kernels(lambda: None), torch.are_deterministic_algorithms_enabled()) == ([], False)


def test_another_error_is_no_kernel_without_such_a_form() -> None:
    def work() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        refused_kernels(work)
