"""Answers with draft tokens: samples of the policy, with its log-probs and versions, also across a push.

Whether tokens are samples is decided by sums of a score over them, less its mean under the exact distribution of each
token. Divided by the standard deviation, such a sum is normal if the tokens are samples (a martingale).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import FalconH1Config

from gspo.common.config.engines import GenerationConfig
from gspo.common.errors import InputError
from gspo.environments.environment import Environment
from gspo.generation.engine.api import Completion, EngineSampling, OnUpdate
from gspo.generation.engine.startup import check_values
from gspo.generation.engine.vllm_engine import Engine
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto.rollout_pb2 import GroupTask, Prompt, Sampling
from tests.integration.generation.conftest import SharedEngine, running_engine
from tests.integration.generation.test_engine import EOS, Reference
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model, make_tokenizer
from tests.support.weights import stage

pytestmark = pytest.mark.timeout(120)
DRAFT_TOKENS = 4
# Beyond this is one sum of two million.
Z_LIMIT = 5.0
TEMPERATURES = (0.4, 0.7, 1.0)
GREEDY = 0.0
# Text that repeats itself, so that the first answers have drafts too.
PROMPTS = [[1, *([20 + number, 33, 31 + number, 17, 30] * 4), 4 + number] for number in range(16)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drafting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedEngine]:
    async with running_engine(tmp_path_factory.mktemp("policy"), draft_tokens=DRAFT_TOKENS) as shared:
        yield shared


async def answers(engine: Engine, hows: list[EngineSampling]) -> list[tuple[list[int], EngineSampling, Completion]]:
    """An answer to each prompt in each way, all in one batch: (prompt, way, answer)."""
    asked = [(prompt, how) for prompt in PROMPTS for how in hows]
    completions = await asyncio.gather(*(engine.generate(f"a{i}", *request) for i, request in enumerate(asked)))
    return [(*request, completion) for request, completion in zip(asked, completions, strict=True)]


def exact_logp(reference: Reference, prompt: list[int], token_ids: list[int], how: EngineSampling) -> np.ndarray:
    """Log-prob of every token of the vocabulary at each token of an answer, [T, V]."""
    with torch.inference_mode():
        logits_TV = reference.model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits_TV / (how.temperature or 1.0), dim=-1).numpy()


def followers(prompt: list[int], token_ids: list[int]) -> Iterator[int]:
    """For each token of an answer, the token that followed the two before it when they first occurred, or -1."""
    context, first = prompt + token_ids, dict[tuple[int, int], int]()
    for place in range(2, len(context)):
        pair = (context[place - 2], context[place - 1])
        if place >= len(prompt):
            yield first.get(pair, -1)
        first.setdefault(pair, context[place])


class Deviation:
    """Sums over tokens of scores less their exact means, and of their variances."""

    def __init__(self) -> None:
        self.sums, self.variances = np.zeros(2), np.zeros(2)

    def add(self, logp_TV: np.ndarray, prompt: list[int], token_ids: list[int], places: slice = slice(None)) -> None:
        """Add the tokens of an answer at `places`, under two scores: the log-prob, and being the likely draft."""
        is_draft_TV = np.arange(logp_TV.shape[1]) == np.array(list(followers(prompt, token_ids)))[:, None]
        scores = np.stack([logp_TV, is_draft_TV])[:, places]
        probs_TV, ids_T = np.exp(logp_TV[places]), np.array(token_ids[places])
        sampled = np.take_along_axis(scores, ids_T[None, :, None], axis=2)[..., 0]
        mean = (probs_TV * scores).sum(-1)
        self.sums += (sampled - mean).sum(-1)
        self.variances += ((probs_TV * scores**2).sum(-1) - mean**2).sum(-1)

    @property
    def z(self) -> list[float]:
        """One for each score."""
        return list(self.sums / np.sqrt(self.variances))


def check_logp(logp_TV: np.ndarray, completion: Completion, places: slice = slice(None)) -> None:
    """Every reported log-prob is that of its token under the exact distribution."""
    expected = logp_TV[np.arange(len(logp_TV)), completion.token_ids]
    assert np.abs(np.array(completion.logp) - expected)[places].max() < 1e-4


async def test_answers_are_samples_of_the_policy_with_its_log_probs(drafting: SharedEngine) -> None:
    """All temperatures and greedy answers are in one batch, since the drafts of all are checked at once."""
    engine, before = drafting.engine, drafting.engine.drafts
    hows = [EngineSampling(150, temperature, ignore_eos=True) for temperature in (GREEDY, *TEMPERATURES)]
    reference, deviations = Reference.load(drafting.folder), {how: Deviation() for how in hows}
    for prompt, how, completion in await answers(engine, hows):
        assert (len(completion.token_ids), set(completion.version)) == (150, {engine.version})
        logp_TV = exact_logp(reference, prompt, completion.token_ids, how)
        check_logp(logp_TV, completion)
        if how.temperature == GREEDY:
            assert np.abs(np.array(completion.logp) - logp_TV.max(-1)).max() < 1e-4
        else:
            deviations[how].add(logp_TV, prompt, completion.token_ids)
    accepted = engine.drafts.accepted - before.accepted
    assert accepted > 500 and engine.drafts.proposed - before.proposed > accepted + 500
    for how in hows[1:]:
        assert np.abs(deviations[how].z).max() < Z_LIMIT, (how, deviations[how].z)


@pytest.mark.parametrize("on_update", ["recompute", "keep", "restart"])
async def test_a_push_between_drafts(drafting: SharedEngine, tmp_path: Path, on_update: OnUpdate) -> None:
    engine, copies, old = drafting.engine, drafting.copies, drafting.engine.version
    before, proposed = Reference.load(drafting.folder), engine.drafts.proposed
    how = EngineSampling(250, 0.7, ignore_eos=True)
    # Made before the answers, which go on meanwhile and must not end before the push.
    drafting.folders.append(make_tiny_model(tmp_path / "new", seed=10 + old, scale=4.0))
    after = Reference.load(drafting.folder)
    staged = stage(copies, drafting.folder)
    running = asyncio.create_task(answers(engine, [how]))
    await engine.generate("first", PROMPTS[0], EngineSampling(40, 0.7, ignore_eos=True))
    await engine.load(old + 1, staged, on_update=on_update, timeout_s=60)

    deviation = Deviation()
    for prompt, _, completion in await running:
        num_old, num = completion.version.count(old), len(completion.token_ids)
        assert 0 < num_old < 250 and num == len(completion.logp)
        assert completion.version == [old] * num_old + [old + 1] * (num - num_old)
        assert (num, completion.finish) == ((num_old, "restart") if on_update == "restart" else (250, "length"))
        parts = [(before, slice(0, num_old))]
        parts += [(after, slice(num_old, num))] if on_update == "recompute" else []
        for reference, places in parts:
            logp_TV = exact_logp(reference, prompt, completion.token_ids, how)
            check_logp(logp_TV, completion, places)
            deviation.add(logp_TV, prompt, completion.token_ids, places)
        if on_update == "keep":
            logp_TV = exact_logp(after, prompt, completion.token_ids, how)
            assert np.isfinite(completion.logp).all()
            with pytest.raises(AssertionError):  # the old keys and values leave a trace
                check_logp(logp_TV, completion, slice(num_old, num))
    assert np.abs(deviation.z).max() < Z_LIMIT, deviation.z
    assert on_update == "restart" or engine.drafts.proposed > proposed


async def test_a_saved_rollout_goes_on_elsewhere_under_other_weights(drafting: SharedEngine, tmp_path: Path) -> None:
    engine, old = drafting.engine, drafting.engine.version
    before = Reference.load(drafting.folder)
    tokenizer = make_tokenizer()
    driver = RolloutDriver(engine, tokenizer, GenerationConfig(), Episodes(cast("Environment", None), tokenizer))
    task = GroupTask(num_rollouts=1, prompt=Prompt(token_ids=PROMPTS[0]))
    task.sampling.CopyFrom(Sampling(temperature=0.4, max_tokens=300))
    num_sampled = 0
    async with asyncio.timeout(60):
        while num_sampled < 40:  # an answer may end before
            rollout = InFlightRollout(task, 0, "one")
            driving = asyncio.create_task(driver.drive(rollout))
            while not driving.done() and (num_sampled := engine.num_sampled(rollout.request_id)) < 40:
                await asyncio.sleep(0.002)
    partial = engine.partial_output(rollout.request_id)
    assert num_sampled == len(partial.token_ids) == len(partial.logp) == len(partial.version)
    saved = rollout.snapshot(partial, 1)
    driving.cancel()

    drafting.folders.append(make_tiny_model(tmp_path / "new", seed=10 + old, scale=4.0))
    await engine.load(old + 1, stage(drafting.copies, drafting.folder), on_update="recompute", timeout_s=60)
    finished = await driver.drive(InFlightRollout(task, 0, "other", saved.SerializeToString()))
    assert finished is not None
    token_ids, version = list(finished.token_ids), list(finished.version)
    assert token_ids[:num_sampled] == partial.token_ids and num_sampled < len(token_ids) <= 300
    assert version == [old] * num_sampled + [old + 1] * (len(token_ids) - num_sampled)
    whole = Completion(token_ids, list(finished.logp), version, "length")
    how = EngineSampling(300, 0.4)
    for reference, places in (
        (before, slice(0, num_sampled)),
        (Reference.load(drafting.folder), slice(num_sampled, None)),
    ):
        check_logp(exact_logp(reference, PROMPTS[0], token_ids, how), whole, places)


async def test_an_answer_ends_at_its_last_token_though_more_drafts_were_accepted(drafting: SharedEngine) -> None:
    tokenizer, reference = make_tokenizer(), Reference.load(drafting.folder)
    stops = ("a", "7", "x")
    finishes = set()
    for how in (EngineSampling(60, 0.7), EngineSampling(60, 0.7, stop=stops)):
        for prompt, _, completion in await answers(drafting.engine, [how] * 4):
            finishes.add(completion.finish)
            text = tokenizer.decode(completion.token_ids[:-1], skip_special_tokens=True)
            assert not any(stop in text for stop in how.stop) and EOS not in completion.token_ids[:-1]
            if completion.finish == "stop_string":
                assert tokenizer.decode(completion.token_ids).endswith(completion.stop_string or "?")
            elif completion.finish == "stop":
                assert completion.token_ids[-1] == EOS
            else:
                assert len(completion.token_ids) == 60
            assert len(completion.token_ids) == len(completion.logp) == len(completion.version)
            check_logp(exact_logp(reference, prompt, completion.token_ids, how), completion)
    assert finishes == {"stop", "stop_string", "length"}


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.5), ("top_k", 3), ("min_p", 0.1)])
async def test_a_cut_distribution_is_refused(drafting: SharedEngine, key: str, value: float) -> None:
    changed: dict[str, Any] = {key: value}
    with pytest.raises(ValueError, match=rf"{key} is not supported with generation\.draft_tokens"):
        await drafting.engine.generate("cut", PROMPTS[0], replace(EngineSampling(4), **changed))
    assert (await drafting.engine.generate("next", PROMPTS[0], EngineSampling(4, ignore_eos=True))).token_ids


def test_a_model_whose_layers_keep_a_state_is_refused(tmp_path: Path) -> None:
    """The check before the start, on a configuration and a tokenizer alone."""
    tokenizer, sizes = make_tokenizer(), {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16}
    model = FalconH1Config(vocab_size=len(tokenizer), hidden_size=64, head_dim=32, **sizes, **mamba)
    model.architectures = ["FalconH1ForCausalLM"]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = make_run(tmp_path, tmp_path, generation={"draft_tokens": DRAFT_TOKENS})
    with pytest.raises(InputError, match=r"draft_tokens: 4 is refused for .*: its layers keep a state"):
        check_values(config, tmp_path)


def test_asynchronous_scheduling_is_refused(drafting: SharedEngine, tmp_path: Path) -> None:
    keys = {"draft_tokens": DRAFT_TOKENS, "engine": {"async_scheduling": True}}
    config = make_run(tmp_path, drafting.folder, generation=keys)
    with pytest.raises(InputError, match="vLLM refuses draft_tokens: 4, async_scheduling: True"):
        check_values(config, drafting.folder)
