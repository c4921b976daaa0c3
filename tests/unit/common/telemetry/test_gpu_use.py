"""MFU and tokens a second of each GPU, from the figures of a step and the GPUs of its processes."""

from __future__ import annotations

import pytest

from gspo.common.telemetry.gpu_use import gpu_use, mean_gpu_use

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
PEAK = 989.5e12
STEP = {"tokens": 6000.0, "train_s": 2.0, "step_s": 5.0, "train_flops": 4e15, "generation_flops": 1e15}


def test_the_learner_has_its_own_time_and_gpus_and_the_loop_all() -> None:
    use = gpu_use(STEP, {"a": PEAK, "b": PEAK}, {"c": H100, "d": H200})
    assert use == {
        "gpus": 4,
        "tokens_per_s_per_gpu": 6000 / 5 / 4,
        "learner_tokens_per_s_per_gpu": 6000 / 2 / 2,
        "learner_flops_per_s": 2e15,
        "learner_mfu": pytest.approx(2e15 / (2 * PEAK)),
        "mfu": pytest.approx(5e15 / 5 / (4 * PEAK)),
    }


def test_a_gpu_that_learner_and_generator_share_counts_once() -> None:
    use = gpu_use(STEP, {"a": PEAK}, {"a": H100})
    assert use["gpus"] == 1
    assert use["mfu"] == pytest.approx(5e15 / 5 / PEAK)


def test_generators_without_a_gpu_use_the_cores_of_the_learner() -> None:
    use = gpu_use(STEP, {"CPU of rank 0": 2e15}, {})
    assert (use["gpus"], use["learner_mfu"], use["mfu"]) == (1, 1.0, 0.5)


def test_an_unknown_gpu_leaves_the_flops_a_second() -> None:
    use = gpu_use(STEP, {"a": None}, {"b": H100})
    assert use.keys() == {"gpus", "tokens_per_s_per_gpu", "learner_tokens_per_s_per_gpu", "learner_flops_per_s"}
    # If only a generator's GPU is unknown, the learner's share is known.
    assert "mfu" not in gpu_use(STEP, {"a": PEAK}, {"b": "NVIDIA GB999"})
    assert "learner_mfu" in gpu_use(STEP, {"a": PEAK}, {"b": "NVIDIA GB999"})


def test_without_counted_flops_there_are_tokens_alone() -> None:
    figures = {name: STEP[name] for name in ("tokens", "train_s", "step_s")}
    assert gpu_use(figures, {"simulated": None}, {}).keys() == {
        "gpus",
        "tokens_per_s_per_gpu",
        "learner_tokens_per_s_per_gpu",
    }


def test_the_mean_over_steps_is_that_of_their_time() -> None:
    first = {"mfu": 0.1, "step_s": 1.0, "learner_mfu": 0.4, "train_s": 0.5}
    second = {"mfu": 0.4, "step_s": 3.0, "train_s": 1.0}
    assert mean_gpu_use([first, second]) == pytest.approx({"mfu": 0.325, "learner_mfu": 0.4})
    assert mean_gpu_use([]) == {}
