"""The arguments of a call: the value of each parameter of a reward function, for a batch of rollouts.

A function by TRL's convention takes any of these by name, each a list with one item a completion:

- `prompts`: text, or chat messages if the prompt is chat messages
- `completions`: text, or `[{"role": "assistant", "content": text}]` if the prompt is chat messages. Of a conversation
  the text of its last turn, or all turns and observations as chat messages
- `completion_ids`: token ids after the prompt, special tokens included; of a rollout of several branches also the
  contexts of the further ones
- `outcomes`: eos, stop_string or truncated; of a conversation also environment_done, turn_limit, turn_token_limit,
  time_limit or step_time_limit
- `stops`: the stop string that ended the answer, or ""
- `truncated`: whether the answer was cut off at response_length
- `prompt_ids`: token ids of the prompt
- `raw_completions`: the text of `completion_ids` with special tokens, and with all that was cut off at a stop string
- `tokenizer`: the policy's, of transformers
- `log_metric(name, number)`, `log_extra(column, values)`: a figure of the answers in this call, a value of each answer
- `trainer_state`: its `global_step` is the number of steps behind the newest policy that sampled the answers
- any other name: the data set's column of that name; `**columns` takes all columns

A function by verl's convention is called for each answer with

- `data_source`: the column, or ""
- `solution_str`: the answer's text
- `ground_truth`: the column ground_truth, else ground_truth within the column reward_model, else the column answer
- `extra_info`: the column, or {}
- any other name: the data set's column of that name

or by its batch form with `data_sources`, `solution_strs`, `ground_truths`, `extra_infos` and columns, each a list.

A function by OpenRLHF's remote form takes, each a list with one item an answer

- `queries`: the prompt's text followed by the answer's
- `prompts`: the prompt's text
- `labels`: the right answer, by verl's rule; None if there is none

The `args` of a configuration take precedence over columns of the same names.
"""

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gspo.common.chat_messages import final_answer
from gspo.common.errors import InputError, nearest
from gspo.common.streams.entries import word_of
from gspo.reward.sandbox.calls import CallError, Signature
from gspo_proto.rollout_pb2 import OUTCOME_TRUNCATED, Outcome, Rollout

GROUND_TRUTH_RULE = "column ground_truth, else reward_model.ground_truth, else column answer"


class NotAskableError(CallError):
    """A function cannot be asked about a rollout."""

    def __init__(self, text: str) -> None:
        super().__init__("exception", text, error_type="NotAskableError")


class MissingColumnError(NotAskableError):
    """The data set lacks a column that the function needs."""

    def __init__(self, column: str, columns: Collection[str]) -> None:
        super().__init__(f"needs the column '{column}', and the data set has {', '.join(sorted(columns)) or 'none'}")


def _completion(rollout: Rollout) -> Any:
    """The answer; as chat messages the policy's last one is at the end: a limit may have been hit behind it."""
    if not rollout.prompt.messages_json:
        return rollout.text
    turns = json.loads(rollout.episode.turns_json or "[]")
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if turns:
        return turns
    begun = final_answer(json.loads(rollout.prompt.messages_json))  # as in TRL
    return [{"role": "assistant", "content": begun + rollout.text}]


def _prompt(rollout: Rollout) -> Any:
    """The prompt; without a message of the assistant that the answer continues."""
    if not rollout.prompt.messages_json:
        return rollout.prompt.text
    messages = json.loads(rollout.prompt.messages_json)
    return messages[:-1] if final_answer(messages) else messages


_TRL_VALUES: dict[str, Callable[[Rollout], Any]] = {
    "prompts": _prompt,
    "completions": _completion,
    "prompt_ids": lambda rollout: list(rollout.prompt.token_ids),
    "completion_ids": lambda rollout: list(rollout.token_ids),
    "outcomes": lambda rollout: word_of(Outcome, rollout.outcome),
    "stops": lambda rollout: rollout.stop,
    "truncated": lambda rollout: rollout.outcome == OUTCOME_TRUNCATED,
}
# The function's process makes these from the values here.
_SUPPLIED: dict[str, Callable[[Sequence[Rollout]], Any]] = {
    "log_metric": lambda _: None,
    "log_extra": lambda _: None,
    "tokenizer": lambda _: None,
    "trainer_state": lambda rollouts: max((max(rollout.version, default=0) for rollout in rollouts), default=0),
    # A trial has an answer without tokens.
    "raw_completions": lambda rollouts: [list(rollout.token_ids) or rollout.text for rollout in rollouts],
}
# Of one answer; the batch form has lists of them, under these names with an s.
_VERL_VALUES: dict[str, Callable[[Rollout, dict[str, Any]], Any]] = {
    "data_source": lambda _, columns: columns.get("data_source", ""),
    "solution_str": lambda rollout, _: rollout.text,
    "ground_truth": lambda _, columns: ground_truth(columns),
    "extra_info": lambda _, columns: columns.get("extra_info") or {},
}
OPENRLHF_ARGUMENTS = ("queries", "prompts", "labels")
_CONVENTION_ARGUMENTS = {
    "trl": (*_TRL_VALUES, *_SUPPLIED),
    "verl": tuple(_VERL_VALUES),
    "verl_batch": tuple(f"{name}s" for name in _VERL_VALUES),
    "openrlhf": OPENRLHF_ARGUMENTS,
    "environment": (),
}


# Those that no constant can stand for.
_OF_ANSWERS = {
    "trl": tuple(_TRL_VALUES),
    "verl": ("solution_str",),
    "verl_batch": ("solution_strs",),
    "openrlhf": ("queries", "prompts"),
}


def check_args(args: Collection[str], signature: Signature, key: str, name: str) -> None:
    """Refuse keyword arguments of a configuration that a function does not have, or that are of the answers.

    Args:
        key, name: Of the function, for messages.

    Raises:
        InputError: Names the argument.
    """
    for arg in args:
        if arg in _OF_ANSWERS.get(signature.convention, ()):
            rule = f"{name} gets this parameter from the answers that it scores"
            raise InputError(f"{key}.args.{arg}", rule, "Leave it out, or give the parameter another name")
        if arg not in signature.takes and not signature.takes_any:
            rule = f"{name} has no such parameter"
            raise InputError(f"{key}.args.{arg}", rule, nearest(arg, signature.takes))


def supplied(signature: Signature) -> frozenset[str]:
    """The named parameters that a function gets beside columns."""
    return signature.takes & set(_CONVENTION_ARGUMENTS[signature.convention])


def _missing_columns(signature: Signature, columns: Collection[str]) -> list[str]:
    """Columns that the function cannot do without and that `columns` lacks."""
    known = {*columns, *_CONVENTION_ARGUMENTS[signature.convention]}
    return [name for name in signature.required if name not in known]


def arguments_for(
    signature: Signature, rollouts: Sequence[Rollout], args: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The question to the function's process: `arguments` of one call, or `rows` for one call each.

    Args:
        args: Further keyword arguments, the same in every call.

    Raises:
        NotAskableError: A column that it needs is not in the data set, or a rollout's columns are not JSON.
    """
    args = args or {}
    try:
        columns = [_columns(rollout) for rollout in rollouts]
        match signature.convention:
            case "verl":
                return {"rows": [_verl_row(signature, *pair, args) for pair in zip(rollouts, columns, strict=True)]}
            case "verl_batch":
                return {"arguments": _verl_batch(signature, rollouts, columns, args) | args}
            case "openrlhf":
                prompts = [rollout.prompt.text for rollout in rollouts]
                queries = [prompt + rollout.text for prompt, rollout in zip(prompts, rollouts, strict=True)]
                labels = [right_answer(row) for row in columns]
                return {"arguments": {"queries": queries, "prompts": prompts, "labels": labels} | args}
            case "environment":
                raise NotAskableError("is an environment, which answers steps and scores no answers")
        arguments = _trl_arguments(signature, rollouts, columns, args) | args
        asked = [name for name in _SUPPLIED if name in signature.takes and name not in arguments]
        supplied = {name: _SUPPLIED[name](rollouts) for name in asked}
        return {"arguments": arguments, "supplied": supplied} if supplied else {"arguments": arguments}
    except ValueError as error:
        raise NotAskableError(f"cannot be asked: {error}") from error


def _columns(rollout: Rollout) -> dict[str, Any]:
    """The data set's columns.

    Raises:
        ValueError: They are not a JSON object.
    """
    try:
        columns = json.loads(rollout.prompt.columns_json or "{}")
    except RecursionError as error:
        raise ValueError("its columns are nested too deeply") from error
    if not isinstance(columns, dict):
        raise ValueError(f"its columns are {type(columns).__name__}, not a JSON object")
    return columns


def _trl_arguments(
    signature: Signature, rollouts: Sequence[Rollout], columns: list[dict[str, Any]], args: dict[str, Any]
) -> dict[str, Any]:
    names = {name for row in columns for name in row}
    _refuse_missing(signature, names, args)
    taken = names if signature.takes_any else names & signature.takes
    arguments: dict[str, Any] = {name: [row.get(name) for row in columns] for name in taken}
    for name, value_of in _TRL_VALUES.items():
        if name in signature.takes or (signature.takes_any and name in ("prompts", "completions")):
            arguments[name] = [value_of(rollout) for rollout in rollouts]
    return arguments


def _verl_row(signature: Signature, rollout: Rollout, columns: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    _refuse_missing(signature, columns, args)
    values = columns | {name: value_of(rollout, columns) for name, value_of in _VERL_VALUES.items()}
    return _taken(signature, values) | args


def _verl_batch(
    signature: Signature, rollouts: Sequence[Rollout], columns: list[dict[str, Any]], args: dict[str, Any]
) -> dict[str, Any]:
    names = {name for row in columns for name in row}
    _refuse_missing(signature, names, args)
    pairs = list(zip(rollouts, columns, strict=True))
    values = {name: [row.get(name) for row in columns] for name in names}
    values |= {f"{name}s": [value_of(*pair) for pair in pairs] for name, value_of in _VERL_VALUES.items()}
    return _taken(signature, values)


def _refuse_missing(signature: Signature, columns: Collection[str], args: Collection[str]) -> None:
    if missing := _missing_columns(signature, {*columns, *args}):
        raise MissingColumnError(missing[0], columns)


def _taken(signature: Signature, values: dict[str, Any]) -> dict[str, Any]:
    """The values that the function has a parameter for."""
    return {name: value for name, value in values.items() if signature.takes_any or name in signature.takes}


def ground_truth(columns: dict[str, Any]) -> Any:
    """The right answer of a row: GROUND_TRUTH_RULE.

    Raises:
        MissingColumnError: The row has none of them.
    """
    if (answer := right_answer(columns)) is None:
        raise MissingColumnError("ground_truth", columns)
    return answer


def right_answer(columns: dict[str, Any]) -> Any:
    """By GROUND_TRUTH_RULE; None if the row has none."""
    model = columns.get("reward_model")
    of_model = model.get("ground_truth") if isinstance(model, dict) else None
    answers = (columns.get("ground_truth"), of_model, columns.get("answer"))
    return next((answer for answer in answers if answer is not None), None)


def check_columns(
    signature: Signature, columns: Collection[str], where: str, function: str, *, has_answers: bool
) -> None:
    """Check that a data set has the columns of a function.

    Args:
        columns: Those that some row has, and the function's `args`.
        where: The data set's key in the configuration.
        function: As messages name it.
        has_answers: Whether some row has a right answer.

    Raises:
        InputError: Names the missing column and the nearest one there is.
    """
    if missing := _missing_columns(signature, columns):
        fix = nearest(missing[0], columns) if columns else "Add the column, or give the parameter a default"
        raise InputError(where, f"has no column '{missing[0]}', which {function} asks for", fix)
    if signature.convention in ("verl", "verl_batch") and not has_answers:
        fix = nearest("ground_truth", columns) if columns else "Add a column ground_truth"
        rule = f"has no right answer for {function} ({GROUND_TRUTH_RULE})"
        raise InputError(where, rule, f"Name its column in data.answer_column. {fix}")


def text_of(value: Any) -> str:
    """A prompt or answer as text, also if it is chat messages."""
    return value if isinstance(value, str) else "\n".join(str(message.get("content", "")) for message in value)
