"""The mismatch of engine and learner over the length of an answer, at equal weights. For a child process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from gspo.learner.storage.step_log import StepLog
from gspo_core.figures import mismatch_stats
from gspo_core.stats import figures

_SHORTEST = 4


@torch.inference_mode()
def mismatch(run_dir: str, model: str) -> list[dict[str, float]]:
    """The spread of log-ratios over the first tokens of the first step's answers, whose weights are the model's.

    Only at a lag of 0 are these the weights that sampled the step.

    Returns:
        A record for each number of `tokens`, doubled up to the median answer. `answers` have that length. `token` and
        `sequence` are standard deviations, of their tokens' log-ratios and of the means of these.
    """
    rows = StepLog(Path(run_dir) / "log").read(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    learner, behavior = [], []
    for row in rows:
        prompt, answer = row.prompt_token_ids.tolist(), torch.tensor(row.token_ids).long()
        logits = network(torch.tensor([[*prompt, *answer.tolist()]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits / row.temperature, dim=-1)
        learner.append(logp.gather(1, answer[:, None])[:, 0])
        behavior.append(torch.tensor(row.logp))
    lengths_B = torch.tensor([len(logp) for logp in behavior])
    learner_BT, behavior_BT = pad_sequence(learner, batch_first=True), pad_sequence(behavior, batch_first=True)
    measured, tokens = [], _SHORTEST
    while tokens <= lengths_B.median():
        mask_BT = (torch.arange(behavior_BT.shape[1]) < tokens) & (lengths_B >= tokens)[:, None]
        seen = figures(mismatch_stats(learner_BT, behavior_BT, mask_BT))
        measured.append(
            {
                "tokens": tokens,
                "answers": int((lengths_B >= tokens).sum()),
                "token": seen["mismatch_std"],
                "sequence": seen["sequence_mismatch_std"],
            }
        )
        tokens *= 2
    return measured
