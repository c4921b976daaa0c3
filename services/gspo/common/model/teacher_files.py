"""The teacher's folder, the facts of its files, and whether it reads the policy's tokens.

Errors name the keys of the section `teacher`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.files import ModelFiles, model_folder, read_model_files, read_tokens

_KEY = re.compile(r"\bmodel\.(path|trust_remote_code|allow_pickle)\b")


@contextmanager
def naming_teacher() -> Iterator[None]:
    """A block that reads the teacher as a model: its errors name the keys of `teacher`, not those of `model`."""
    try:
        yield
    except InputError as error:
        raise InputError(*(_KEY.sub(r"teacher.\1", text) for text in (error.where, error.rule, error.fix))) from error


def teacher_folder(config: Config) -> Path:
    """The folder of the teacher's files; fetches a hub model once.

    Raises:
        InputError: As `model_folder`.
    """
    with naming_teacher():
        return model_folder(config.with_teacher_as_model().model)


def read_teacher_files(config: Config) -> ModelFiles:
    """As `read_model_files`, of the teacher."""
    folder = teacher_folder(config)
    with naming_teacher():
        return read_model_files(folder, allow_pickle=config.teacher.allow_pickle)


def check_same_tokens(policy: Path, teacher: Path) -> None:
    """Refuse a teacher that reads a token of the policy as another one; it may have more tokens.

    Args:
        policy, teacher: Their folders.

    Raises:
        InputError: Names the first token that differs, by its id.
    """
    theirs = read_tokens(policy)
    with naming_teacher():
        known = read_tokens(teacher)
    differing = {token: number for token, number in theirs.items() if known.get(token) != number}
    if not differing:
        return
    token, number = min(differing.items(), key=lambda item: item[1])
    there = next((other for other, its in known.items() if its == number), None)
    raise InputError(
        "teacher.path",
        f"{teacher} has another tokenizer than the policy ({policy}): {len(differing)} tokens differ, the first is id "
        f"{number}, {token!r} for the policy and {'nothing' if there is None else repr(there)} for the teacher",
        "Take a teacher of the policy's family, with the same token ids",
    )
