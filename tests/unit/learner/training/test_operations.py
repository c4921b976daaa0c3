"""The operations of a step in bfloat16, as torch dispatches them: which weights are rounded, and what stays float32."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo.common.planning.memory import FUSED_ROWS
from gspo.learner.model import network
from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train, with_version

WIDTH, NUM_LAYERS, NUM_MINI_BATCHES = 64, 2, 2
# Of each layer: queries, keys, values, output, and three of the feed-forward part.
NUM_LINEAR = 7 * NUM_LAYERS


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a step does.

    Attributes:
        roundings: Copies of weights in bfloat16, by whether a micro-batch was in progress.
        wide: Float32 tensors of [tokens, width] or more, outside norms: operation and place -> number.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roundings: Counter[bool] = Counter()
        self.wide: Counter[str] = Counter()
        policy = trainer.engine.model
        self._weights = {weight.untyped_storage()._cdata for weight in policy.parameters()}
        self._open: list[nn.Module] = []
        self._of_norms: list[Any] = []
        self._num_tokens = 0
        for module in policy.modules():
            module.register_forward_pre_hook(lambda module, _: self._open.append(module))
            module.register_forward_hook(self._close)
        policy.register_forward_pre_hook(self._begin)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name, node = function.__name__, torch._C._current_autograd_node()
        in_norm = any(map(is_norm, self._open)) if node is None else node in self._of_norms
        for tensor in filter(torch.is_tensor, tree_leaves(out)):
            is_wide = self._num_tokens in tensor.shape and tensor.numel() >= self._num_tokens * WIDTH
            if tensor.dtype == torch.float32 and is_wide and self._num_tokens and not in_norm:
                place = node.name() if node else type(self._open[-1]).__name__ if self._open else ""
                self.wide[f"{name} in {place}"] += 1
            if tensor.dtype == torch.bfloat16 and name.startswith("_to_copy"):
                self.roundings[bool(self._open or node)] += args[0].untyped_storage()._cdata in self._weights
        return out

    def _begin(self, _: nn.Module, inputs: Any) -> None:
        self._num_tokens = inputs[0].numel()

    def _close(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._open.pop()
        if is_norm(module) and output.requires_grad:
            to_visit = [output.grad_fn]
            while to_visit:
                node = to_visit.pop()
                if node is None or node is inputs[0].grad_fn or node in self._of_norms or "Accumulate" in node.name():
                    continue
                self._of_norms.append(node)
                to_visit += [before for before, _ in node.next_functions]


def is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def operations_of_a_step(folder: Path, **learner: Any) -> Operations:
    keys = {"dtype": "bfloat16", "micro_batch_tokens": 256, **learner}
    algorithm = {"pg_clip": 0.05, "num_mini_batches": NUM_MINI_BATCHES}
    trainer = Trainer(make_config(folder, algorithm=algorithm, learner=keys), folder)
    rows = make_rows(folder, num_mini_batches=NUM_MINI_BATCHES)
    train(trainer, 1, rows)
    operations = Operations(trainer)
    with operations:
        train(trainer, 2, with_version(rows, 1))
    return operations


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), hidden_size=WIDTH, layers=NUM_LAYERS)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_weights_are_rounded_once_a_mini_batch_and_states_stay_bfloat16(folder: Path, zero_stage: int) -> None:
    operations = operations_of_a_step(folder, zero_stage=zero_stage)
    assert operations.roundings[True] == 0
    assert operations.roundings[False] == NUM_MINI_BATCHES * NUM_LINEAR
    assert_only_the_embedding_is_wide(operations)


def assert_only_the_embedding_is_wide(operations: Operations) -> None:
    """A float32 row of the embedding is looked up, and its gradient added, once a micro-batch."""
    assert operations.wide.keys() == {"embedding.default in Embedding", "_to_copy.default in ToCopyBackward0"}
    assert len(set(operations.wide.values())) == 1


def test_adapters_take_states_as_they_are(folder: Path) -> None:
    operations = operations_of_a_step(folder, lora={"rank": 4})
    # Each layer has two matrices of adapters.
    assert operations.roundings[False] == NUM_MINI_BATCHES * 2 * NUM_LINEAR
    assert operations.wide.keys() == {"embedding.default in Embedding"}


def test_experts_are_rounded_once_a_mini_batch_too(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "mixture", hidden_size=WIDTH, layers=NUM_LAYERS, num_experts=4)
    operations = operations_of_a_step(folder)
    # Four of each layer's attention, and two tensors of its experts; a router is rounded where it is used.
    assert operations.roundings[False] == NUM_MINI_BATCHES * 6 * NUM_LAYERS
    assert_only_the_embedding_is_wide(operations)


def test_a_run_that_began_before_keeps_float32_states(folder: Path) -> None:
    operations = operations_of_a_step(folder, bfloat16_states=False)
    assert operations.roundings[True] == 0
    assert operations.wide["add.Tensor in Qwen3DecoderLayer"] > 0


def test_under_checkpointing_each_layer_rounds_its_own_weights(folder: Path) -> None:
    operations = operations_of_a_step(folder, gradient_checkpointing=True)
    assert operations.roundings[False] == 0 < operations.roundings[True]


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({"dtype": "bfloat16"}, 2 * FUSED_ROWS),  # of which gspo_core takes half at a time
        ({"dtype": "bfloat16", "torch_compile": True}, FUSED_ROWS),
        ({"dtype": "bfloat16", "bfloat16_states": False}, 1024),
        ({}, 1024),
    ],
)
def test_on_a_gpu_the_gradient_of_the_output_layer_is_written_once_for_4096_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], rows: int
) -> None:
    sizes: list[int] = []
    name = "fused_token_logprobs" if keys.get("torch_compile") else "token_logprobs"
    monkeypatch.setattr(network, name, lambda *_, chunk_size, **__: sizes.append(chunk_size))

    class OfGpu:
        """Stands for states on a GPU with a vocabulary of 151,936."""

        is_cuda = True

        def to(self, _: torch.dtype) -> OfGpu:
            return self

    class OnlyOutputLayer(nn.Module):
        def get_output_embeddings(self) -> Any:
            return nn.Linear(1, 151_936, bias=False)

    policy: Any = network.PolicyModel(OnlyOutputLayer(), make_config(folder, learner=keys))
    policy._logprobs(OfGpu(), Tensor(), None, None)
    assert sizes == [rows]
