"""Limits of a run's rollouts: tokens of the model's vocabulary, log-probs up to 0, lengths that the run allows.

A rollout beyond them would end the training, or corrupt it unseen. services/gspo/common/streams/entries.py has the
rules of every entry, and rows.py those of a rollout's arrays.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gspo.common.config.engines import MOST_KEPT
from gspo.common.config.schema import Config
from gspo.common.model.files import model_folder
from gspo.common.plain_json import read_json_file
from gspo.common.streams.entries import kept_problem
from gspo_proto.rollout_pb2 import Rollout, ScoredRollout

# A probability is at most 1; engines that round reach a little beyond.
_HIGHEST_LOGP = 1e-2
# Columns of the log hold token ids and counts as int32.
_END_OF_INT32 = 2**31


@dataclass(frozen=True)
class RolloutLimits:
    """The limits of one run.

    Attributes:
        num_rollouts: Rollouts of a group.
        prompt_length, response_length: In tokens, at most.
        rollout_length: Tokens of all branches with their contexts, at most.
        vocabulary: Tokens that the model has.
        keeps_sets: Whether every policy token has the tokens that it was sampled from (sampling.top_k).
        is_taught: Whether every scored rollout has a teacher's log-probs (teacher.address).
    """

    num_rollouts: int
    prompt_length: int
    response_length: int
    rollout_length: int
    vocabulary: int
    is_taught: bool = False
    keeps_sets: bool = False

    def check(self, scored: ScoredRollout) -> None:
        """Refuse a rollout that cannot be of this run.

        Raises:
            ValueError: Names the rollout and the limit.
        """
        rollout = scored.rollout
        if problem := self._problem(rollout) or self._teacher_problem(scored) or _number_problem(scored):
            raise ValueError(f"rollout {rollout.group}-{rollout.number}: {problem}")

    def has_rollout(self, rollout: Rollout) -> bool:
        """Whether a group of this run has a rollout of this number."""
        return rollout.num_rollouts == self.num_rollouts and rollout.number < self.num_rollouts

    def _problem(self, rollout: Rollout) -> str:
        if not self.has_rollout(rollout):
            return f"number {rollout.number} of {rollout.num_rollouts}, and a group of this run has {self.num_rollouts}"
        if rollout.token_ids and not rollout.prompt.token_ids:
            return "its prompt has no token"
        prompt, answer = (np.array(ids, np.uint32) for ids in (rollout.prompt.token_ids, rollout.token_ids))
        return (
            self._token_problem("prompt", prompt, self.prompt_length)
            or self._branch_problem(rollout)
            or self._token_problem("answer", answer, self.rollout_length)
            or _logp_problem(np.array(rollout.logp, np.float32), "a behavior log-prob")
            or self._set_problem(rollout)
        )

    def _branch_problem(self, rollout: Rollout) -> str:
        """Branches that do not lie in the arrays, lack a context, or have too many tokens."""
        starts, num_tokens = list(rollout.branch_starts), len(rollout.token_ids)
        first, *others = [end - start for start, end in pairwise([0, *starts, num_tokens])]
        if others and min(first, *others) < 1:
            return f"branch_starts {starts} do not ascend within its {num_tokens} tokens"
        if without := [start for start in starts if rollout.mask[start : start + 1] != b"\0"]:
            return f"its branch at token {without[0]} begins without a context"
        if first > self.response_length:
            return f"its answer has {first} tokens, and one of this run has at most {self.response_length}"
        longest, whole = self.prompt_length + self.response_length, len(rollout.prompt.token_ids) + num_tokens
        if others and max(others) > longest:
            return f"a branch of {max(others)} tokens, and one of this run has at most {longest}"
        if whole > self.rollout_length:
            return f"its branches have {whole} tokens, and those of a rollout at most {self.rollout_length} in this run"
        return ""

    def _set_problem(self, rollout: Rollout) -> str:
        """Tokens with sets in a run without sampling.top_k or the reverse, or a token that is not in its set."""
        if problem := kept_problem(rollout):
            return problem
        if bool(rollout.kept_sizes) != (self.keeps_sets and bool(rollout.token_ids)):
            with_sets = "has" if rollout.kept_sizes else "lacks"
            return f"it {with_sets} the tokens that each was sampled from, unlike rollouts of this run (sampling.top_k)"
        size_T, kept_N = np.array(rollout.kept_sizes, np.int64), np.array(rollout.kept_ids, np.int64)
        if (widest := int(size_T.max(initial=0))) > MOST_KEPT:
            return f"a set of {widest} tokens, and one has at most {MOST_KEPT}"
        if (highest := int(kept_N.max(initial=0))) >= self.vocabulary:
            return f"token {highest} in a set, and the model's vocabulary has {self.vocabulary}"
        place_N = np.repeat(np.arange(len(size_T)), size_T)
        # One number for each token and set: sorted, two of the same are neighbours.
        in_set_N = np.sort(place_N * self.vocabulary + kept_N)
        if (in_set_N[1:] == in_set_N[:-1]).any():
            return "a token is twice in a set"
        is_own_N = kept_N == np.array(rollout.token_ids, np.int64)[place_N]
        if (num := int(is_own_N.sum())) != (of := int((size_T > 0).sum())):
            return f"{of - num} tokens are not in the sets that they were sampled from"
        return ""

    def _teacher_problem(self, scored: ScoredRollout) -> str:
        if not self.is_taught or scored.score.WhichOneof("result") == "failure":
            return ""
        num_scored, num_tokens = len(scored.score.teacher_logp), len(scored.rollout.token_ids)
        if num_scored != num_tokens:
            return f"{num_scored} log-probs of the teacher for {num_tokens} tokens"
        return _logp_problem(np.array(scored.score.teacher_logp, np.float32), "a teacher's log-prob")

    def _token_problem(self, part: str, token_ids_T: NDArray[np.uint32], most: int) -> str:
        if len(token_ids_T) > most:
            return f"its {part} has {len(token_ids_T)} tokens, and one of this run has at most {most}"
        if (highest := int(token_ids_T.max(initial=0))) >= self.vocabulary:
            return f"token {highest} in its {part}, and the model's vocabulary has {self.vocabulary}"
        return ""


def _logp_problem(logp_T: NDArray[np.float32], what: str) -> str:
    lowest, highest = logp_T.min(initial=0.0), logp_T.max(initial=-1.0)  # NaN where one is
    if highest <= _HIGHEST_LOGP and lowest > -math.inf:
        return ""
    impossible_T = logp_T[~(np.isfinite(logp_T) & (logp_T <= _HIGHEST_LOGP))]
    return f"{impossible_T[0]:g} cannot be {what}"


def _number_problem(scored: ScoredRollout) -> str:
    """Counts beyond the log's int32, and times that are not finite."""
    rollout, score, episode = scored.rollout, scored.score, scored.rollout.episode
    count = max(rollout.num_turns, episode.num_tool_calls, episode.num_malformed, episode.num_cut_turns)
    if count >= _END_OF_INT32:
        return f"a count of {count}, and the log holds none above {_END_OF_INT32 - 1}"
    times = (rollout.issued_unix_s, rollout.started_unix_s, rollout.finished_unix_s, score.scored_unix_s)
    others = (score.taken_unix_s, rollout.temperature, *score.seconds.values())
    if not all(map(math.isfinite, (*times, *others))):
        return "a time or a temperature that is not a finite number"
    if rollout.token_ids and not rollout.temperature > 0:
        return f"temperature {rollout.temperature:g}, and log-probs need one above 0"
    return ""


def rollout_limits(config: Config) -> RolloutLimits:
    """The limits of a run, from its configuration and its model's files."""
    algorithm = config.algorithm
    facts = read_json_file(model_folder(config.model) / "config.json")
    vocabulary = facts.get("text_config", facts).get("vocab_size")
    return RolloutLimits(
        num_rollouts=algorithm.num_return_sequences_in_group,
        prompt_length=algorithm.prompt_length,
        response_length=algorithm.response_length,
        rollout_length=algorithm.longest_rollout,
        vocabulary=vocabulary if isinstance(vocabulary, int) else _END_OF_INT32,
        is_taught=config.teacher.address is not None,
        keeps_sets=config.sampling.cuts,
    )
