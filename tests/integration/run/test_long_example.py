"""The example of long answers as a user starts it, on short sequences: its problems, rewards and lengths.

Not here: learning, for which a policy of so few lessons is too poor.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from gspo.common.config.loading import read_config
from tests.support.gspo_run import EXAMPLES, example_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
SUMS, ROLLOUTS = 5, 8 * 8
SIZES = ("--hidden", "64", "--layers", "2")
# By experts; so many that eight or nine of ten sampled answers are right. After two thirds it is one in 16, or none.
LESSONS = {0: 300, 4: 450}


def last_digits(prompt: str) -> str:
    """The result of a problem, from its text alone."""
    (start,) = re.findall(r"start at (\d{3})\n#1 ", prompt)
    digits = [int(digit) for digit in start]
    for _ in range(SUMS):
        digits.append((digits[-1] + digits[-3]) % 10)
    return "".join(map(str, digits[-3:]))


@pytest.mark.parametrize("experts", LESSONS)
def test_an_answer_earns_a_reward_if_its_result_is_that_of_the_sums(tmp_path: Path, experts: int) -> None:
    options = ["--steps", "1", "--sums", str(SUMS), "--experts", str(experts), *SIZES]
    run = example_run(EXAMPLES / "long", tmp_path, LESSONS[experts], *options)
    rows = run.rows(1)
    assert len(rows) == ROLLOUTS
    assert {row["failure"] for row in rows} == {None}
    results = [row["text"].rpartition("answer: ")[2] for row in rows]
    values = [last_digits(row["prompt"]) for row in rows]
    assert [row["reward"] for row in rows] == [float(a == b) for a, b in zip(results, values, strict=True)]
    assert 0 < sum(row["reward"] for row in rows) < ROLLOUTS
    # A sum's name is one token, and so is every other sign.
    assert {len(row["prompt_token_ids"]) for row in rows} == {13}
    token = r"\n#\d |\nanswer: |[+=\d]"
    config = read_config(run.run_dir / "config.yaml")
    # So poor a policy also samples special tokens between the signs, which a text does not show.
    special = AutoTokenizer.from_pretrained(config.model.path).all_special_ids
    ended = [row for row in rows if row["outcome"] == "eos" and re.fullmatch(f"({token})+", row["text"])]
    assert ended
    for row in ended:
        shown = [token_id for token_id in row["token_ids"] if token_id not in special]
        assert len(shown) == len(re.findall(token, row["text"]))
    assert (config.algorithm.prompt_length, config.algorithm.response_length) == (32, 46)
    assert getattr(AutoConfig.from_pretrained(config.model.path), "num_experts", 0) == experts
