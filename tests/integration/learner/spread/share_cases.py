"""One rank of several, for test_shares_of_ranks.py: makes versions from the shares of all, under every ZeRO stage.

Called by torchrun as `-m tests.integration.learner.spread.share_cases OUT NAME=MODEL...`; every rank writes the names
that it owns, and rank 0 the digests of the versions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch import distributed

from gspo.learner.push.policy_weights import weights_from
from gspo.learner.training.trainer import Trainer
from tests.support.training.rollout_rows import make_config, make_rows, train

# Model and keys of the learner.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero-0": ("plain", {}),
    "zero-1": ("plain", {"zero_stage": 1}),
    "zero-2": ("plain", {"zero_stage": 2}),
    "zero-3": ("plain", {"zero_stage": 3}),
    "zero-0-mixture": ("mixture", {}),
    "zero-3-mixture": ("mixture", {"zero_stage": 3}),
    "zero-3-adapters": ("plain", {"zero_stage": 3, "lora": {"rank": 2}}),
}
GENERATION = {"dtype": "bfloat16"}


def main() -> None:
    """The versions before and after a step in each case."""
    out, models = Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
    digests, owned = dict[str, list[str]](), dict[str, list[str]]()
    for case, (model, learner) in CASES.items():
        folder = Path(models[model])
        trainer = Trainer(make_config(folder, learner=learner, generation=GENERATION), folder)
        first = trainer.engine.begin_version(0, "", is_reused=True)()
        train(trainer, 1, make_rows(folder))
        second = trainer.engine.begin_version(1, "", is_reused=True)()
        owned[case] = list(second.bits)
        whole = trainer.engine.policy()
        if distributed.get_rank() == 0:
            digests[case] = [first.digest, second.digest, weights_from(1, whole).digest]
    rank = distributed.get_rank()
    (out / f"owned-{rank}.json").write_text(json.dumps(owned))
    if rank == 0:
        (out / "digests.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main()
