"""A rollout under way: the account of its tokens, pieces, segments, and what is saved of it."""

from __future__ import annotations

from gspo.generation.engine.api import Completion, Tokens
from gspo.generation.leased_task import num_failed_attempts
from gspo.generation.rollout.in_flight import InFlightRollout, rollout_key
from gspo.generation.rollout.stop_strings import cut_at_stop
from gspo_proto.rollout_pb2 import GroupTask, Prompt, RolloutState, Sampling

TASK = GroupTask(group=7, prompt=Prompt(token_ids=[1, 2]), sampling=Sampling(max_tokens=10))


def in_flight(saved: bytes | None = None) -> InFlightRollout:
    return InFlightRollout(TASK, 3, "generation-0", saved)


def tokens(ids: list[int], version: int) -> Tokens:
    return Tokens(ids, [-0.5 * token for token in ids], [version] * len(ids))


def test_what_was_saved_goes_on_with_its_log_probs_and_versions() -> None:
    rollout = in_flight()
    rollout.append(tokens([10, 11], 4))
    saved = rollout.snapshot(tokens([12], 5), delivery=2)
    # The piece is still the engine's: it comes once, when it ends.
    assert list(rollout.state.token_ids) == [10, 11]

    taken_up = in_flight(saved.SerializeToString())
    assert taken_up.context == [1, 2, 10, 11, 12]
    taken_up.append(tokens([13], 6))
    state = taken_up.state
    assert list(state.logp) == [-5.0, -5.5, -6.0, -6.5]
    assert list(state.version) == [4, 4, 5, 6]
    assert (state.mask, state.delivery) == (b"\x01" * 4, 2)
    assert state.started_unix_s == rollout.state.started_unix_s
    assert (taken_up.oldest_version, taken_up.tokens_left) == (4, 6)


def test_a_segment_counts_the_tokens_of_one_version_from_its_beginning() -> None:
    rollout = in_flight()
    rollout.begin_segment()
    assert rollout.may_sample(1, None) == 10
    assert rollout.may_sample(1, 4) == 4
    rollout.append(tokens([10, 11, 12], 1))
    assert rollout.may_sample(1, 4) == 1
    # A new version is a new step.
    assert rollout.may_sample(2, 4) == 4
    rollout.append(tokens([13], 1))
    assert rollout.may_sample(1, 4) == 0
    rollout.begin_segment()
    assert rollout.may_sample(1, 4) == 4
    assert rollout.may_sample(1, 8) == rollout.tokens_left == 6


def test_a_restart_keeps_the_id_and_the_start_and_nothing_else() -> None:
    rollout = in_flight()
    started = rollout.state.started_unix_s
    rollout.append(tokens([10, 11], 1))
    assert rollout.restart() == 2
    assert rollout.state == RolloutState(schema=1, started_unix_s=started, num_turns=1, generator="generation-0")
    assert (rollout.rollout_key, rollout.oldest_version) == ("7-3", None)


def test_a_holder_that_saved_something_does_not_count_as_one_that_failed() -> None:
    fresh, second = in_flight(), in_flight(in_flight().snapshot(tokens([10], 1), delivery=2).SerializeToString())
    assert num_failed_attempts(4, [fresh]) == 4
    assert num_failed_attempts(4, [fresh, second]) == 2
    paused = in_flight(second.snapshot(tokens([], 1), delivery=0).SerializeToString())
    assert num_failed_attempts(1, [paused]) == 1


def test_rollout_keys_of_evaluations_are_apart() -> None:
    assert rollout_key(TASK, 0) == "7-0"
    assert rollout_key(GroupTask(group=7, evaluation="v20"), 0) == "v20:7-0"


class LetterTokenizer:
    """A tokenizer of one letter a token."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def piece_of(text: str) -> Completion:
    ids = [ord(letter) for letter in text]
    return Completion(ids, [float(-i) for i in range(len(ids))], [1] * len(ids), "length")


def test_a_stop_string_over_two_pieces_ends_the_answer_at_its_last_token() -> None:
    cut = cut_at_stop(
        LetterTokenizer(), [ord(letter) for letter in "so </an"], piece_of("swer> and more"), ["</answer>", "!"]
    )
    assert bytes(cut.token_ids).decode() == "swer>"
    assert (cut.finish, cut.stop_string, cut.logp, cut.version) == (
        "stop_string",
        "</answer>",
        [0, -1, -2, -3, -4],
        [1] * 5,
    )


def test_a_piece_without_one_stays_as_it_is() -> None:
    piece = piece_of("swer and more")
    assert cut_at_stop(LetterTokenizer(), [ord(letter) for letter in "so </an"], piece, ["</answer>"]) is piece
    assert cut_at_stop(LetterTokenizer(), [], piece, ["</answer>"]) is piece
