"""The mapping `generation.engine`: passed through, refused where it is ours, and checked without importing vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.generation.engine_args import OWN_ARGS, check_engine_args, engine_arg_names


def test_vllms_own_arguments_pass() -> None:
    check_engine_args({"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "quantization": "fp8"})


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"generation\.engine\.tensor_paralel_size: 2 .*'tensor_parallel_size'"):
        check_engine_args({"tensor_paralel_size": 2})


def test_an_argument_of_the_service_is_refused_with_the_way_to_go() -> None:
    with pytest.raises(ValueError, match=r"generation\.engine\.dtype: 'half' .*set `generation\.dtype`"):
        check_engine_args({"dtype": "half"})


def test_a_second_way_to_say_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"generation\.engine\.max_num_seqs: 8 .*set `generation\.max_rollouts`"):
        check_engine_args({"max_num_seqs": 8})


def test_every_argument_we_keep_exists() -> None:
    assert OWN_ARGS.keys() <= engine_arg_names()


def test_the_check_does_not_import_vllm() -> None:
    code = (
        "import sys; from services.generation.engine_args import check_engine_args as check; "
        "check({'block_size': 8}); assert not {'vllm', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
