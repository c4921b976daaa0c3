"""Questions about the rollouts of a step log, by DuckDB over its Parquet files.

DuckDB may read the log's folder only, and each value of a reader is a bound parameter. The page in
http_api.py shows the answers. Columns are those of docs/log.md.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import duckdb

from gspo.runlog.step_files import step_file, step_files, token_file
from gspo.view.step_table import READ, Column, StepTable

Answer = TypeVar("Answer")

PAGE_ROWS = 50
NUMBERS = ("step", "group", "number")
WORDS = ("outcome", "generator", "skipped")
BOUNDS = ("reward", "advantage")
# Heads of the table that it sorts by: its columns.
SORTS = ("step", "group", "reward", "advantage", "length", "outcome", "generator")
# Of the table of rollouts, in memory. The arrays run over the same tokens, and versions are the smallest.
_COLUMNS = {
    **{name: Column("INTEGER", name) for name in ("step", "number", "mini_batch")},
    "group": Column("BIGINT", '"group"'),
    "prompt": Column("VARCHAR", "left(prompt, 160)"),
    **{name: Column("DOUBLE", name) for name in ("reward", "advantage")},
    **{name: Column("VARCHAR", name) for name in ("outcome", "generator", "skipped", "parts_json")},
    "length": Column("INTEGER", "len(version)"),
    "versions": Column("INTEGER[]", "list_filter(list_sort(list_distinct(version)), lambda v: v >= 0)"),
    "failure": Column("VARCHAR", "left(failure, 200)"),
}
_SHOWN = ", ".join(f'{column.sql} AS "{name}"' for name, column in _COLUMNS.items())
_TEXTS = {
    "step": _COLUMNS["step"], "group": _COLUMNS["group"], "number": _COLUMNS["number"],
    **{name: Column("VARCHAR", name) for name in ("prompt", "text", "turns_json")},
}  # fmt: skip
# Of the rollouts of a page alone: the ends of their answers, where a result stands, and the data's columns if short.
_TEXT_ENDS = """right(text, 160) AS answer,
    CASE WHEN length(columns_json) <= 10000 THEN columns_json ELSE '' END AS columns_json"""
# In memory, over all runs of the page: rollouts, and characters of texts. Both are compressed to about a third.
_MOST_ROLLOUTS, _MOST_BYTES = 4_000_000, 400_000_000
_OF_ONE = 'step = ? AND "group" = ?'
_SEARCH = """SEMI JOIN (SELECT step, "group", number FROM {texts} AS texts
    WHERE contains(text, ?) OR contains(prompt, ?) OR contains(turns_json, ?)) USING (step, "group", number)"""
_MAX_INT, _MEMORY = 2**63 - 1, "1GB"
# A question waits for others to the same log; and begins anew where the run removed files meanwhile.
_LOCK_S, _VANISHED = 60.0, 2


@dataclass(frozen=True)
class Filter:
    """Conditions, sequence and page of a list of rollouts.

    Attributes:
        conditions: SQL with one `?` for each of `values`.
        text: In prompt, answer or conversation; empty for all.
        sort: One of SORTS.
        page: From 1.
    """

    conditions: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    text: str = ""
    sort: str = "step"
    descending: bool = True
    page: int = 1


def _number(name: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        value = kind(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text[:100]!r}, not a number; correct it or leave it empty") from error
    if not math.isfinite(value) or abs(value) > _MAX_INT:
        raise ValueError(f"{name} is {text[:100]!r}; give a number below 2**63")
    return value


def filter_of(query: Mapping[str, str]) -> Filter:
    """Read the part of a URL after `?`; an empty value is none.

    Raises:
        ValueError: A value is not a number, or does not name a column.
    """
    conditions, values = [], []
    for name in NUMBERS:
        if query.get(name):
            conditions.append(f'"{name}" = ?')
            values.append(_number(name, query[name], int))
    for name in WORDS:
        if query.get(name):
            conditions.append(f"{name} = ?")
            values.append(query[name])
    for name in BOUNDS:
        for suffix, sign in (("min", ">="), ("max", "<=")):
            if text := query.get(f"{name}_{suffix}"):
                conditions.append(f"{name} {sign} ?")
                values.append(_number(f"{name}_{suffix}", text, float))
    sort, page = query.get("sort") or "step", _number("page", query.get("page") or "1", int)
    if sort not in SORTS:
        raise ValueError(f"sort is {sort[:100]!r}; it must be one of {', '.join(SORTS)}")
    if not 1 <= page <= 10**9:
        raise ValueError(f"page is {page}; it must be from 1 to 10**9")
    return Filter(tuple(conditions), tuple(values), query.get("q") or "", sort, query.get("dir") != "asc", page)


class LogQuery:
    """Answers from the step files of one folder, which may grow or lose files between two questions.

    Every method raises `duckdb.Error` where a file vanishes or cannot be read, and `TimeoutError` where other
    questions take too long. Any thread may ask.

    Args:
        share: The part of the memory that the page takes for columns.
    """

    def __init__(self, folder: Path, share: float = 1.0) -> None:
        self._folder, self._lock = folder.resolve(), Lock()
        self._connection = duckdb.connect(":memory:")
        allowed = str(self._folder).replace("'", "''")
        for setting in (
            f"memory_limit = '{_MEMORY}'",
            f"allowed_directories = ['{allowed}']",
            "temp_directory = ''",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")
        self._rollouts = StepTable(self._connection, "rollouts", _COLUMNS, "1", int(share * _MOST_ROLLOUTS))
        size = "strlen(prompt) + strlen(text) + strlen(turns_json)"
        self._texts = StepTable(self._connection, "texts", _TEXTS, size, int(share * _MOST_BYTES))

    def rollouts(self, chosen: Filter) -> tuple[int, list[dict[str, Any]]]:
        """The number of rollouts that pass, and those of the page, with ends of answers and columns of the data."""
        with self._alone():
            total, rows = self._of_present_files(lambda: self._page(chosen))
            return total, self._of_present_files(lambda: self._with_texts(rows))

    def _with_texts(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of a page with `answer` and `columns_json`, which the table in memory lacks."""
        texts: dict[tuple[int, int, int], dict[str, Any]] = {}
        for step in {row["step"] for row in rows}:
            groups = list({row["group"] for row in rows if row["step"] == step})
            sql = f'SELECT step, "group", number, {_TEXT_ENDS} FROM {READ} WHERE list_contains(?, "group")'
            for row in self._ask_file(step_file(self._folder, step), sql, [groups]):
                texts[row["step"], row["group"], row["number"]] = row
        lost = {"answer": "", "columns_json": ""}
        return [row | texts.get((row["step"], row["group"], row["number"]), lost) for row in rows]

    def unreadable(self) -> list[str]:
        """The step files that the last question could not read, each with the reason."""
        with self._alone():
            return [f"{name}: {reason}" for name, reason in sorted(self._rollouts.unreadable.items())]

    def _page(self, chosen: Filter) -> tuple[int, list[dict[str, Any]]]:
        self._rollouts.refresh(self._folder)
        source, files = self._rollouts.source()
        search = ""
        values: list[Any] = [*files]
        if chosen.text:
            self._texts.refresh(self._folder)
            texts, text_files = self._texts.source()
            search = _SEARCH.format(texts=texts)
            values += [*text_files, *[chosen.text] * 3]
        direction = "DESC" if chosen.descending else "ASC"
        order = f'ORDER BY "{chosen.sort}" {direction} NULLS LAST, step DESC, "group", number'
        names = ", ".join(f'"{name}"' for name in dict.fromkeys(("step", "group", "number", chosen.sort)))
        where = " AND ".join(chosen.conditions) or "true"
        # The keys first: sorting then moves no text.
        sql = f"""WITH passing AS MATERIALIZED (SELECT {names} FROM {source} AS log {search} WHERE {where}),
            keys AS (FROM passing {order} LIMIT ? OFFSET ?)
            SELECT log.*, (SELECT count(*) FROM passing) AS total
            FROM {source} AS log SEMI JOIN keys USING (step, "group", number) {order}"""
        rows = self._ask(sql, [*values, *chosen.values, PAGE_ROWS, (chosen.page - 1) * PAGE_ROWS, *files])
        if rows or chosen.page == 1:
            return (rows[0]["total"] if rows else 0), rows
        return self._page(replace(chosen, page=1))[0], []

    def group(self, step: int, group: int) -> list[dict[str, Any]]:
        """The rollouts of a group with prompt, answer and the data's columns, by number; empty where there is none."""
        sql = f"SELECT {_SHOWN}, prompt AS whole_prompt, text, columns_json FROM {READ} WHERE {_OF_ONE} ORDER BY number"
        return self._ask_file(step_file(self._folder, step), sql, (step, group))

    def clip_rows(self, step: int, group: int) -> dict[int, dict[str, Any]]:
        """By number, the columns of a group's rollouts that clip_parts.py reads, token records where there are any."""
        sql = f"SELECT number, step, skipped, advantage, mini_batch, mask, logp, version FROM {READ} WHERE {_OF_ONE}"
        rows = self._ask_file(step_file(self._folder, step), sql, (step, group))
        by_number = {row["number"]: row for row in rows}
        sql = f'SELECT number, learner_logp FROM {READ} WHERE "group" = ?'
        for record in self._ask_file(token_file(self._folder, step), sql, (group,)):
            by_number[record["number"]] |= record
        return by_number

    def rollout(self, step: int, group: int, number: int) -> dict[str, Any] | None:
        """Every column of a rollout, also of its token record if there is one; None where there is no rollout."""
        sql = f"FROM {READ} WHERE {_OF_ONE} AND number = ?"
        rows = self._ask_file(step_file(self._folder, step), sql, (step, group, number))
        if rows:
            sql = f'SELECT learner_logp, entropy FROM {READ} WHERE "group" = ? AND number = ?'
            rows[0] |= next(iter(self._ask_file(token_file(self._folder, step), sql, (group, number))), {})
        return rows[0] if rows else None

    def last_steps(self, text: str) -> dict[str, int]:
        """The last step of each prompt that contains the text."""
        with self._alone():
            return {row["prompt"]: row["step"] for row in self._of_present_files(lambda: self._prompts(text))}

    def _prompts(self, text: str) -> list[dict[str, Any]]:
        self._texts.refresh(self._folder)
        source, files = self._texts.source()
        sql = f"SELECT prompt, max(step) AS step FROM {source} AS log WHERE contains(prompt, ?) GROUP BY prompt"
        return self._ask(sql, [*files, text])

    def answers(self, prompt: str, step: int, num: int) -> list[dict[str, Any]]:
        """The first answers to a prompt in a step, without their long columns."""
        sql = f'SELECT {_SHOWN}, text FROM {READ} AS log WHERE log.prompt = ? ORDER BY "group", number LIMIT ?'
        return self._ask_file(step_file(self._folder, step), sql, (prompt, num))

    def steps(self) -> list[int]:
        """The logged steps, in order."""
        return list(step_files(self._folder))

    def of_steps(self, steps: Collection[int], sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of a statement about `log`, the rollouts of some steps, from their files.

        Args:
            steps: Those that are not in the log have no rows.
            sql: Not a reader's text; with one `?` for each of `values`.
        """
        files = [str(path) for step, path in step_files(self._folder).items() if step in steps]
        return self._ask(f"WITH log AS (FROM {READ}) {sql}", [files, *values]) if files else []

    def _ask_file(self, path: Path, sql: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Rows of one file; none where it does not exist."""
        return self._ask(sql, [[str(path)], *values]) if path.is_file() else []

    def _ask(self, sql: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, list(values))
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def _of_present_files(self, question: Callable[[], Answer]) -> Answer:
        """The answer, asked again where a file vanished between its listing and its reading."""
        for _ in range(_VANISHED):
            with suppress(duckdb.IOException):
                return question()
        return question()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_LOCK_S):
            raise TimeoutError(f"other questions to this log have taken {_LOCK_S:.0f} s; load the page again")
        try:
            yield
        finally:
            self._lock.release()
