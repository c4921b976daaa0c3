"""The engine against transformers: its samples, its log-probs, and weights that change in flight."""

from __future__ import annotations

import asyncio
import math
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gspo.common.config.engines import GenerationConfig
from gspo.common.weights.changes import pack_changes
from gspo.common.weights.manifest import policy_digest
from gspo.generation.engine.api import Completion, EngineSampling, LoadFailedError, OnUpdate
from gspo.generation.engine.differences import Trials
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from tests.integration.generation.conftest import SharedEngine, running_engine
from tests.support.tiny_model import make_tiny_model
from tests.support.weights import stage

pytestmark = pytest.mark.asyncio(loop_scope="session")
TEMPERATURE = 0.7
EOS = 2
# The policies of all versions are made from one seed each; versions only go up within a module's engine.
PROMPTS = [[1, 33, 31, 17, 30, 98, 4 + number, 97, 6 + number] for number in range(16)]


@dataclass(frozen=True)
class Reference:
    """A policy in transformers, fp32."""

    model: Any

    @classmethod
    def load(cls, folder: Path) -> Reference:
        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    def logp(self, prompt: list[int], token_ids: list[int], temperature: float = TEMPERATURE) -> np.ndarray:
        """Log-prob of each token of an answer, [T]."""
        return self.logp_all(prompt, token_ids, temperature).gather(1, torch.tensor(token_ids)[:, None])[:, 0].numpy()

    def logp_all(self, prompt: list[int], token_ids: list[int], temperature: float = TEMPERATURE) -> torch.Tensor:
        """Log-prob of every token of the vocabulary at each place of an answer, [T, V]."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
            return torch.log_softmax(logits / temperature, dim=-1)


def sampling(max_tokens: int, **more: Any) -> EngineSampling:
    return EngineSampling(max_tokens=max_tokens, temperature=TEMPERATURE, **more)


async def answers(engine: Engine, how: EngineSampling) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(f"r{i}", p, how) for i, p in enumerate(PROMPTS)))


def difference(reference: Reference, prompts: list[list[int]], completions: list[Completion]) -> np.ndarray:
    """Reported minus reference log-prob of all tokens of all answers."""
    parts = [np.array(c.logp) - reference.logp(p, c.token_ids) for p, c in zip(prompts, completions, strict=True)]
    return np.concatenate(parts)


async def running(engine: Engine, how: EngineSampling) -> list[asyncio.Task[Completion]]:
    """Requests of which some tokens were sampled already."""
    tasks = [asyncio.create_task(engine.generate(f"f{i}", p, how)) for i, p in enumerate(PROMPTS)]
    first = await engine.generate("first", PROMPTS[0], sampling(20, ignore_eos=True))
    assert len(first.token_ids) == 20
    assert not any(task.done() for task in tasks)
    return tasks


async def test_digest_of_the_folder_is_the_digest_of_its_tensors(generator: SharedEngine) -> None:
    state = AutoModelForCausalLM.from_pretrained(generator.folder, dtype=torch.float32).state_dict()
    del state["lm_head.weight"]  # tied
    expected = policy_digest((name, "float32", tuple(t.shape), t.numpy()) for name, t in state.items())
    assert generator.copies.serving_digest() == expected


async def test_logp_of_the_unchanged_policy_is_transformers(generator: SharedEngine) -> None:
    completions = await answers(generator.engine, sampling(100))
    delta = difference(Reference.load(generator.folder), PROMPTS, completions)
    assert len(delta) > 200
    assert delta.std() < 1e-5
    assert np.abs(delta).max() < 1e-4
    assert all(set(c.version) == {generator.engine.version} for c in completions)


@pytest.mark.parametrize(
    "cut", [{"top_k": 5}, {"top_k": 20, "top_p": 0.95}, {"top_k": 64, "min_p": 0.05}, {"top_k": 64}], ids=str
)
async def test_the_tokens_that_top_k_top_p_and_min_p_keep_come_with_their_log_prob(
    generator: SharedEngine, cut: dict[str, Any]
) -> None:
    how, reference = sampling(40, keep_sets=True, **cut), Reference.load(generator.folder)
    sizes = []
    for prompt, completion in zip(PROMPTS, await answers(generator.engine, how), strict=True):
        logp_TV, ids = reference.logp_all(prompt, completion.token_ids), iter(completion.kept_ids)
        for place, (token, size) in enumerate(zip(completion.token_ids, completion.kept_sizes, strict=True)):
            kept = [next(ids) for _ in range(size)]
            assert sorted(kept) == sorted(kept_by(logp_TV[place], **cut))
            expected = logp_TV[place][token] - torch.logsumexp(logp_TV[place][kept], 0)
            assert completion.logp[place] == pytest.approx(float(expected), abs=1e-4)
        sizes += completion.kept_sizes
        assert next(ids, None) is None
    assert min(sizes) >= 1 and (max(sizes) == cut["top_k"] or len(cut) > 1)
    assert (await answers(generator.engine, sampling(2, **cut)))[0].kept_sizes == []


def kept_by(logp_V: torch.Tensor, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """The ids that are kept: of the likeliest, those that top_p and min_p leave."""
    ids = logp_V.topk(top_k).indices
    ids = ids[logp_V[ids] >= logp_V.max() + math.log(min_p)] if min_p else ids
    p_K = torch.softmax(logp_V[ids], 0)
    before_K = p_K.cumsum(0) - p_K
    return [int(token) for token in ids[before_K < top_p]]


@pytest.mark.long
async def test_an_engine_in_bfloat16_answers_by_the_units_that_the_cpu_has_for_it(tmp_path: Path) -> None:
    """On a CPU with AMX vLLM's attention uses it, which Linux lets no process do without a request."""
    async with running_engine(tmp_path, dtype="bfloat16") as half:
        completions = await answers(half.engine, sampling(40))
        delta = difference(Reference.load(half.folder), PROMPTS, completions)
    assert 1e-4 < delta.std() < 0.2


async def test_the_sampled_end_of_sequence_is_a_token_with_its_logp(generator: SharedEngine) -> None:
    completions = await answers(generator.engine, sampling(400))
    stopped = [(p, c) for p, c in zip(PROMPTS, completions, strict=True) if c.finish == "stop"]
    assert stopped
    reference = Reference.load(generator.folder)
    for prompt, completion in stopped:
        assert completion.token_ids[-1] == EOS
        assert EOS not in completion.token_ids[:-1]
        assert len(completion.logp) == len(completion.token_ids) == len(completion.version)
        expected = reference.logp(prompt, completion.token_ids)[-1]
        assert completion.logp[-1] == pytest.approx(expected, abs=1e-4)


async def test_length_and_stop_string_are_different_ends(generator: SharedEngine) -> None:
    cut = await generator.engine.generate("cut", PROMPTS[0], sampling(3, ignore_eos=True))
    assert (cut.finish, len(cut.token_ids), cut.stop_string) == ("length", 3, None)
    stops = tuple("aeiou")
    vowel = await generator.engine.generate("vowel", PROMPTS[0], sampling(500, ignore_eos=True, stop=stops))
    assert vowel.finish == "stop_string"
    assert vowel.stop_string in stops
    # The token that completed the stop string is the policy's too.
    assert len(vowel.logp) == len(vowel.token_ids) == len(vowel.version)
    delta = difference(Reference.load(generator.folder), [PROMPTS[0]], [vowel])
    assert np.abs(delta).max() < 1e-4


async def test_an_aborted_request_returns_what_it_has(generator: SharedEngine) -> None:
    task = asyncio.create_task(generator.engine.generate("gone", PROMPTS[1], sampling(500, ignore_eos=True)))
    await generator.engine.generate("wait", PROMPTS[0], sampling(10, ignore_eos=True))
    await generator.engine.abort("gone")
    completion = await task
    assert completion.finish == "aborted"
    assert 0 < len(completion.token_ids) == len(completion.logp) == len(completion.version) < 500


async def test_what_a_request_has_sampled_so_far_is_the_beginning_of_its_answer(generator: SharedEngine) -> None:
    engine = generator.engine
    task = asyncio.create_task(engine.generate("seen", PROMPTS[1], sampling(200, ignore_eos=True)))
    await engine.generate("wait", PROMPTS[0], sampling(10, ignore_eos=True))
    early, num_sampled = engine.partial_output("seen"), engine.num_sampled("seen")
    later = engine.partial_output("seen", 5)
    completion = await task
    assert (later.token_ids, later.logp, later.version) == (early.token_ids[5:], early.logp[5:], early.version[5:])
    assert 0 < num_sampled == len(early.token_ids) < 200
    assert early.token_ids == completion.token_ids[:num_sampled]
    assert early.logp == completion.logp[:num_sampled]
    assert early.version == [engine.version] * num_sampled
    assert (engine.num_sampled("seen"), engine.partial_output("seen").token_ids) == (0, [])


async def test_a_prompt_that_does_not_fit_is_refused_and_the_engine_still_answers(generator: SharedEngine) -> None:
    with pytest.raises(ValueError, match="512"):
        await generator.engine.generate("long", [3] * 600, sampling(5))
    assert (await generator.engine.generate("short", [3], sampling(5))).token_ids


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_a_push_with_requests_in_flight(generator: SharedEngine, tmp_path: Path, on_update: OnUpdate) -> None:
    engine, copies = generator.engine, generator.copies
    old_folder, old = generator.folder, engine.version
    new_folder = make_tiny_model(tmp_path / "new", seed=10 + old, scale=4.0)
    tasks = await running(engine, sampling(300, ignore_eos=True))
    stage(copies, new_folder)
    digest = copies.staged_digest()
    times = await engine.load(old + 1, copies, on_update=on_update, timeout_s=60)
    generator.folders.append(new_folder)
    completions = await asyncio.gather(*tasks)

    assert copies.serving_digest() == digest
    assert times.pause_s > 0 and times.load_s > 0 and times.resume_s > 0
    assert all(len(c.token_ids) == 300 and c.finish == "length" for c in completions)
    before, after = Reference.load(old_folder), Reference.load(new_folder)
    drift = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        num_old = completion.version.count(old)
        assert 0 < num_old < 300
        assert completion.version == [old] * num_old + [old + 1] * (300 - num_old)
        reported = np.array(completion.logp)
        under_old = reported - before.logp(prompt, completion.token_ids)
        under_new = reported - after.logp(prompt, completion.token_ids)
        assert np.abs(under_old[:num_old]).max() < 1e-4
        # The other policy is a different one: a token with the wrong version could not pass.
        assert np.abs(under_new[:num_old]).max() > 0.1
        drift.append(under_new[num_old:])
    worst = float(np.abs(np.concatenate(drift)).max())
    if on_update == "recompute":
        assert worst < 1e-4
    else:
        assert math.isfinite(worst)
        assert worst > 1e-3, "the old KV left no trace: it was not kept"
    fresh = await answers(engine, sampling(60))
    delta = difference(after, PROMPTS, fresh)
    assert delta.std() < 1e-5, "a request after the push met the KV of before it"
    assert np.abs(delta).max() < 1e-4


async def test_a_push_under_restart_ends_in_flight_requests(generator: SharedEngine, tmp_path: Path) -> None:
    engine, copies, old = generator.engine, generator.copies, generator.engine.version
    folder = make_tiny_model(tmp_path / "new", seed=10 + old, scale=4.0)
    tasks = await running(engine, sampling(300, ignore_eos=True))
    stage(copies, folder)
    await engine.load(old + 1, copies, on_update="restart", timeout_s=60)
    generator.folders.append(folder)
    for completion in await asyncio.gather(*tasks):
        assert completion.finish == "restart"
        assert set(completion.version) == {old}
        assert 0 < len(completion.token_ids) == len(completion.logp) < 300
    delta = difference(Reference.load(folder), PROMPTS, await answers(engine, sampling(60)))
    assert delta.std() < 1e-5


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_what_goes_on_after_a_push_meets_no_keys_and_values_of_before_it(
    generator: SharedEngine, tmp_path: Path, on_update: OnUpdate
) -> None:
    """A prompt of several blocks, and an answer that is paused before the weights change and resumed after."""
    engine, copies, old = generator.engine, generator.copies, generator.engine.version
    prompt = [4 + place % 90 for place in range(300)]
    first = await engine.generate("first", prompt, sampling(40, ignore_eos=True))
    longer = prompt + first.token_ids
    again = await engine.generate("again", longer, sampling(20, ignore_eos=True))
    before = Reference.load(generator.folder)
    assert np.abs(np.array(again.logp) - before.logp(longer, again.token_ids)).max() < 1e-4

    folder = make_tiny_model(tmp_path / "new", seed=10 + old, scale=4.0)
    await engine.load(old + 1, stage(copies, folder), on_update=on_update, timeout_s=60)
    generator.folders.append(folder)
    later = await engine.generate("later", longer, sampling(20, ignore_eos=True))
    after = Reference.load(folder)
    reported = np.array(later.logp)
    assert set(later.version) == {old + 1}
    assert np.abs(reported - after.logp(longer, later.token_ids)).max() < 1e-4
    # Had the prefix's blocks been found, they would be of the other policy.
    assert np.abs(reported - before.logp(longer, later.token_ids)).max() > 0.1


def stage_changes(generator: SharedEngine, folder: Path) -> None:
    """Two elements of the policy that serves, as changes; and the whole of it in a folder."""
    copies, model = generator.copies, AutoModelForCausalLM.from_pretrained(generator.folder, dtype=torch.float32)
    changed = {"model.embed_tokens.weight": (1000, 1.5), "model.layers.0.self_attn.k_proj.weight": (5, 0.5)}
    copies.begin(changes=True)
    for name, (position, value) in changed.items():
        old = copies.serving.bits(name)
        new = old.copy()
        new.view(np.float32)[position] += value
        copies.change(name, 0, len(new), pack_changes(new, old))
        model.get_parameter(name).data.view(-1)[position] += value
    model.save_pretrained(folder)


async def test_changes_give_the_same_weights_as_a_full_push(generator: SharedEngine, tmp_path: Path) -> None:
    engine, copies = generator.engine, generator.copies
    stage_changes(generator, tmp_path)
    whole = PolicyCopies.from_folder(tmp_path, "float32")
    assert copies.staged_digest() == whole.serving_digest() != copies.serving_digest()
    whole.close()
    await engine.load(engine.version + 1, copies, on_update="recompute", timeout_s=60)
    generator.folders.append(tmp_path)
    delta = difference(Reference.load(tmp_path), PROMPTS, await answers(engine, sampling(60)))
    assert delta.std() < 1e-5


@pytest.mark.parametrize("tried", [(), ("embed_tokens", "layers.N.self_attn.k_proj")])
async def test_changes_in_place_that_fail_are_loaded_whole_and_a_rollback_serves_the_old_weights(
    generator: SharedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: tuple[str, ...]
) -> None:
    """On a CPU vLLM multiplies with copies of its weights, and its loader of patches fails; as a trial and after it."""
    engine, copies, version = generator.engine, generator.copies, generator.engine.version
    checksums = [await engine.checksum(60)]
    stage_changes(generator, tmp_path)
    good = copies.staged.update_info
    for is_good in (False, True):
        monkeypatch.setattr(engine, "_may_change_in_place", True)
        monkeypatch.setattr(engine, "_trials", trials := Trials())
        kinds = {f"model.{name}.weight" for name in tried}
        trials.form_of(kinds)
        copies.staged.update_info = (  # type: ignore[method-assign]
            good if is_good else lambda: with_short_shape(good(), "model.layers.1.mlp.up_proj.weight")
        )
        with nullcontext() if is_good else pytest.raises(LoadFailedError, match=f"version {version} serves on"):
            await engine.load(version + 1, copies, on_update="recompute", timeout_s=60)
        assert not engine._may_change_in_place
        assert is_good or not kinds or engine._trials.form_of(kinds) == "trial", "it was compared with nothing"
        completions = await answers(engine, sampling(60))
        assert all(set(it.version) == {version + is_good} for it in completions)
        expected = Reference.load(tmp_path if is_good else generator.folder)
        assert difference(expected, PROMPTS, completions).std() < 1e-5
        checksums.append(await engine.checksum(60))
    generator.folders.append(tmp_path)
    before, after_rollback, after = checksums
    assert before == after_rollback != after


async def test_a_failed_load_leaves_the_old_weights_serving(generator: SharedEngine, tmp_path: Path) -> None:
    engine, copies = generator.engine, generator.copies
    version, digest = engine.version, copies.serving_digest()
    stage(copies, make_tiny_model(tmp_path / "new", seed=99, scale=4.0))
    checksum = await engine.checksum(60)
    tasks = await running(engine, sampling(300, ignore_eos=True))
    # In the middle of the second layer, when the first has taken its new weights already.
    good = copies.staged.update_info
    copies.staged.update_info = lambda: with_short_shape(good(), "model.layers.1.mlp.up_proj.weight")  # type: ignore[method-assign]
    with pytest.raises(LoadFailedError, match=f"version {version} serves on"):
        await engine.load(version + 1, copies, on_update="recompute", timeout_s=60)
    copies.staged.update_info = good  # type: ignore[method-assign]

    assert engine.version == version
    assert copies.serving_digest() == digest
    completions = await asyncio.gather(*tasks)
    assert all(c.version == [version] * 300 for c in completions)
    delta = difference(Reference.load(generator.folder), PROMPTS, completions)
    assert np.abs(delta).max() < 1e-4
    # And the next good push loads.
    assert await engine.checksum(60) == checksum
    await engine.load(version + 1, copies, on_update="recompute", timeout_s=60)
    assert await engine.checksum(60) != checksum
    delta = difference(Reference.load(tmp_path / "new"), PROMPTS, await answers(engine, sampling(60)))
    assert delta.std() < 1e-5
    generator.folders.append(tmp_path / "new")


async def test_a_push_may_leave_out_what_the_engine_ignores_and_nothing_else(
    generator: SharedEngine, tmp_path: Path
) -> None:
    engine, version = generator.engine, generator.engine.version
    plain = make_tiny_model(tmp_path / "plain", seed=10 + version, scale=4.0)
    folder = shutil.copytree(plain, tmp_path / "with_more")
    # Checkpoints of older models have it; every architecture passes it over.
    ignored = "model.layers.0.self_attn.rotary_emb.inv_freq"
    file = folder / "model.safetensors"
    save_file(load_file(file) | {ignored: torch.zeros(4)}, file, metadata={"format": "pt"})
    copies = PolicyCopies.from_folder(folder, "float32")
    bits = {name: copies.serving.bits(name).copy() for name in copies.places}

    def pushed_without(*names: str) -> PolicyCopies:
        copies.begin(changes=False)
        for name in bits.keys() - set(names):
            copies.write(name, 0, bits[name].tobytes())
        return copies

    digest_of_all = copies.serving_digest()
    await engine.load(version + 1, pushed_without(ignored), on_update="recompute", timeout_s=60)
    whole = PolicyCopies.from_folder(plain, "float32")
    assert copies.serving_digest() == whole.serving_digest() != digest_of_all
    delta = difference(Reference.load(plain), PROMPTS, await answers(engine, sampling(60)))
    assert delta.std() < 1e-5

    needed = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(LoadFailedError, match=f"the push has no tensor '{needed}', which this model loads"):
        await engine.load(version + 2, pushed_without(ignored, needed), on_update="recompute", timeout_s=60)
    assert (engine.version, copies.serving_digest()) == (version + 1, whole.serving_digest())
    await engine.load(version + 2, stage(generator.copies, plain), on_update="recompute", timeout_s=60)
    delta = difference(Reference.load(plain), PROMPTS, await answers(engine, sampling(60)))
    assert delta.std() < 1e-5
    generator.folders.append(plain)
    whole.close()
    copies.close()


def with_short_shape(update_info: dict[str, Any], name: str) -> dict[str, Any]:
    """The manifest with one row less in one tensor."""
    for place in update_info["tensors"]:
        if place["name"] == name:
            place["shape"] = (place["shape"][0] - 1, *place["shape"][1:])
    return update_info


async def test_a_running_engine_reports_its_kv_cache(generator: SharedEngine) -> None:
    assert generator.engine.num_running == 0
    assert generator.engine.kv_capacity_tokens > 512


@pytest.mark.long
async def test_compiled_graphs_serve_pushed_weights(tmp_path: Path) -> None:
    folders = [make_tiny_model(tmp_path / str(seed), seed=seed, scale=4.0) for seed in (1, 2)]
    copies = PolicyCopies.from_folder(folders[0], "float32")
    # A run that began on a GPU has the bytes of its cache there, which a CPU does not take.
    compiled = {"enforce_eager": False, "kv_cache_memory_bytes": 1}
    engine = await Engine.start(
        engine_arguments(
            folders[0], GenerationConfig(max_rollouts=64, kv_cache_gb=0.25, engine=compiled), max_model_len=512
        )
    )
    try:
        for version, folder in enumerate(folders):
            if version:
                await engine.load(version, stage(copies, folder), on_update="recompute", timeout_s=60)
            delta = difference(Reference.load(folder), PROMPTS, await answers(engine, sampling(60)))
            assert delta.std() < 1e-5
            assert np.abs(delta).max() < 1e-4
    finally:
        await engine.stop()
        copies.close()
