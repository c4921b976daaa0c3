"""Changes in place, by vLLM's loader of patches, into a model whose layers fuse and derive."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gspo.generation.engine.differences import Differences, Trials
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.engine.worker.in_place import ChangesInPlace

SHAPES = {"layers.0.q": (2, 3), "layers.0.k": (2, 3), "layers.1.q": (2, 3), "layers.1.k": (2, 3), "norm": (3,)}


class Attention(nn.Module):
    """Keeps q and k in one tensor, as vLLM's models do."""

    product: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16), requires_grad=False)


class FusedModel(nn.Module):
    """Two layers and a norm.

    Args:
        derives: Whether a layer also keeps a product of its weights, made after a whole load alone.
    """

    def __init__(self, *, derives: bool) -> None:
        super().__init__()
        self.attentions = [Attention(), Attention()]
        self.layers = nn.ModuleList(self.attentions)
        self.norm = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
        self._derives = derives

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names = set()
        for name, tensor in weights:
            *layer, part = name.split(".")
            whole = self.attentions[int(layer[1])].qk if layer else self.norm
            (whole if not layer else whole[:2] if part == "q" else whole[2:]).data.copy_(tensor)
            names.add(name)
        return names

    def load_whole(self, policy: dict[str, Tensor]) -> None:
        self.load_weights(policy.items())
        if self._derives:
            for layer in self.attentions:
                layer.product = layer.qk[:2] @ layer.qk[2:].T

    def tensors(self) -> dict[str, Tensor]:
        return {name: it.clone() for name, it in self.state_dict().items()}


def policy(seed: int, changed: Iterable[str] = SHAPES) -> dict[str, Tensor]:
    """The policy of seed 0, with one element changed in each of these tensors."""
    chance = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=chance).bfloat16() for name, shape in SHAPES.items()}
    for name in changed if seed else ():
        tensors[name].view(-1)[seed % 3] = -float(seed)
    return tensors


def put(copies: PolicyCopies, tensors: dict[str, Tensor]) -> None:
    copies.begin(changes=False)
    for name, tensor in tensors.items():
        copies.write(name, 0, tensor.view(torch.int16).numpy().tobytes())


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> PolicyCopies:
    # These tensors have few elements, so a change of one is much.
    monkeypatch.setattr("gspo.generation.engine.differences._MOST_OF_POLICY", 2.0)
    copies = PolicyCopies(SHAPES, "bfloat16")
    put(copies, policy(0))
    copies.promote()
    return copies


def update(copies: PolicyCopies, tensors: dict[str, Tensor], tried: Iterable[str] = ()) -> dict[str, Any]:
    put(copies, tensors)
    differences = Differences(copies.serving, copies.staged)
    assert differences.is_small
    trials = Trials()
    trials.form_of(set(tried))
    info = differences.update_info(trials.form_of(differences.kinds))
    # As in another process, which maps the file before it is closed here.
    info["kept"] = differences
    return info


def load(changes: ChangesInPlace, info: dict[str, Any]) -> None:
    is_trial = info["form"] == "trial"
    changes.load(info["path"], info["tensors"], torch.device("cpu"), is_trial=is_trial)


@pytest.mark.parametrize("at_a_time", [1, 1 << 28])
def test_after_a_good_trial_changes_give_the_weights_of_a_whole_load(
    copies: PolicyCopies, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr("gspo.generation.engine.worker.in_place._AT_A_TIME_BYTES", at_a_time)
    model, expected = FusedModel(derives=False), FusedModel(derives=False)
    model.load_whole(policy(0))
    changes = ChangesInPlace(model)
    load(changes, update(copies, policy(2)))
    changes.forget_trial()
    model.load_whole(policy(0))
    changes.compare()
    trial = update(copies, policy(1))
    assert trial["form"] == "trial"
    load(changes, trial)
    model.load_whole(policy(1))
    changes.compare()
    copies.promote()
    for number in (2, 3, 0):
        info = update(copies, policy(number), {"layers.N.q", "layers.N.k", "norm"})
        assert info["form"] == "changes"
        load(changes, info)
        copies.promote()
        expected.load_whole(policy(number))
        assert all(torch.equal(it, expected.tensors()[name]) for name, it in model.tensors().items())


def test_a_model_that_keeps_what_no_change_reaches_is_loaded_whole(copies: PolicyCopies) -> None:
    model = FusedModel(derives=True)
    model.load_whole(policy(0))
    changes = ChangesInPlace(model)
    load(changes, update(copies, policy(1)))
    model.load_whole(policy(1))
    changes.compare()
    before = model.tensors()
    with pytest.raises(RuntimeError, match=r"left another model\..*\.product than a whole load"):
        load(changes, update(copies, policy(2)))
    assert all(torch.equal(it, before[name]) for name, it in model.tensors().items())


def test_a_kind_of_tensor_that_changes_for_the_first_time_is_a_trial(copies: PolicyCopies) -> None:
    put(copies, policy(1, ["layers.0.q", "layers.1.q"]))
    differences = Differences(copies.serving, copies.staged)
    assert differences.kinds == {"layers.N.q"}
    assert [it["name"] for it in differences.update_info("trial")["tensors"]] == ["layers.0.q", "layers.1.q"]
    assert update(copies, policy(2, ["layers.0.q", "norm"]), differences.kinds)["form"] == "trial"
    assert update(copies, policy(2, ["layers.1.q"]), differences.kinds)["form"] == "changes"


def test_after_some_loads_in_place_a_trial_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.generation.engine.differences._MOST_IN_PLACE", 3)
    trials = Trials()
    loads = [{"q"}, {"q", "k"}, *[{"k"}] * 3, {"k"}, {"q"}, *[{"q", "k"}] * 3, {"q"}]
    forms = ["trial", "trial", *["changes"] * 3, "trial", "trial", *["changes"] * 3, "trial"]
    assert [trials.form_of(kinds) for kinds in loads] == forms


def test_many_changes_and_none_are_a_whole_load(copies: PolicyCopies) -> None:
    put(copies, {name: tensor + 1 for name, tensor in policy(0).items()})
    assert not Differences(copies.serving, copies.staged).is_small
    put(copies, policy(0))
    assert not Differences(copies.serving, copies.staged).is_small
    tensors = policy(1)
    del tensors["norm"]
    put(copies, tensors)
    assert not Differences(copies.serving, copies.staged).is_small


def test_what_vllm_cannot_patch_is_its_error(copies: PolicyCopies) -> None:
    changes = ChangesInPlace(FusedModel(derives=False))
    tensors = policy(0)
    tensors["norm"][1] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        load(changes, update(copies, tensors))
    assert Path(update(copies, policy(1))["path"]).name.isdigit()
