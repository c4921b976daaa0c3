"""Questions about the rollouts of a step log, by DuckDB over its Parquet files.

DuckDB may read the log's folder only, and each value of a reader is a bound parameter. The page in
http_api.py shows the answers. Columns are those of docs/log.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from gspo.runlog.step_files import step_files, token_file

PAGE_ROWS = 50
NUMBERS = ("step", "group", "number")
WORDS = ("outcome", "generator", "skipped")
BOUNDS = ("reward", "advantage")
_LENGTH = "len(token_ids)"
# Head of the table -> what it sorts by.
SORTS = {
    "step": "step",
    "group": '"group"',
    "reward": "reward",
    "advantage": "advantage",
    "length": _LENGTH,
    "outcome": "outcome",
    "generator": "generator",
}
_SHOWN = f"""step, "group", number, left(prompt, 160) AS prompt, reward, advantage, {_LENGTH} AS length, outcome,
    list_sort(list_distinct([v for v in version if v >= 0])) AS versions, generator, skipped, failure, mini_batch"""
_OF_ONE = 'step = ? AND "group" = ?'
_MAX_INT, _MEMORY = 2**63 - 1, "1GB"


@dataclass(frozen=True)
class Filter:
    """Conditions, sequence and page of a list of rollouts.

    Attributes:
        conditions: SQL with one `?` for each of `values`.
        sort: A key of SORTS.
        page: From 1.
    """

    conditions: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
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
    if query.get("q"):
        conditions.append("(contains(text, ?) OR contains(prompt, ?) OR contains(turns_json, ?))")
        values += [query["q"]] * 3
    sort, page = query.get("sort") or "step", _number("page", query.get("page") or "1", int)
    if sort not in SORTS:
        raise ValueError(f"sort is {sort[:100]!r}; it must be one of {', '.join(SORTS)}")
    if not 1 <= page <= 10**9:
        raise ValueError(f"page is {page}; it must be from 1 to 10**9")
    return Filter(tuple(conditions), tuple(values), sort, query.get("dir") != "asc", page)


class LogQuery:
    """Answers from the step files of one folder, which may grow or lose files between two questions.

    Every method raises `duckdb.Error` where a file vanishes or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._connection = duckdb.connect(":memory:")
        allowed = str(self._folder).replace("'", "''")
        for setting in (
            f"memory_limit = '{_MEMORY}'",
            f"allowed_directories = ['{allowed}']",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    def rollouts(self, chosen: Filter) -> tuple[int, list[dict[str, Any]]]:
        """The number of rollouts that pass, and those of the page, without their long columns."""
        files = step_files(self._folder)
        where = " AND ".join(chosen.conditions) or "true"
        total = self._ask(f"SELECT count(*) AS num FROM log WHERE {where}", chosen.values, files)
        direction = "DESC" if chosen.descending else "ASC"
        # The keys first: the long columns are then read from the files of one page alone.
        keys = self._ask(
            f'SELECT step, "group", number FROM log WHERE {where} '
            f'ORDER BY {SORTS[chosen.sort]} {direction} NULLS LAST, step DESC, "group", number LIMIT ? OFFSET ?',
            (*chosen.values, PAGE_ROWS, (chosen.page - 1) * PAGE_ROWS),
            files,
        )
        if not keys:
            return (total[0]["num"] if total else 0), []
        triples = [tuple(key.values()) for key in keys]
        places = ", ".join(["(?, ?, ?)"] * len(triples))
        rows = self._ask(
            f'SELECT {_SHOWN} FROM log WHERE (step, "group", number) IN ({places})',
            [value for triple in triples for value in triple],
            {step: files[step] for step, _, _ in triples if step in files},
        )
        rows.sort(key=lambda row: triples.index((row["step"], row["group"], row["number"])))
        return total[0]["num"], rows

    def group(self, step: int, group: int) -> list[dict[str, Any]]:
        """The rollouts of a group with prompt and answer, by number; empty where there is none."""
        return self._ask(
            f"SELECT {_SHOWN}, prompt AS whole_prompt, text FROM log WHERE {_OF_ONE} ORDER BY number",
            (step, group),
            self._file(step),
        )

    def rollout(self, step: int, group: int, number: int) -> dict[str, Any] | None:
        """Every column of a rollout, also of its token record if there is one; None where there is no rollout."""
        rows = self._ask(f"SELECT * FROM log WHERE {_OF_ONE} AND number = ?", (step, group, number), self._file(step))
        records = token_file(self._folder, step)
        if rows and records.is_file():
            sql = 'SELECT learner_logp, entropy FROM log WHERE "group" = ? AND number = ?'
            rows[0] |= next(iter(self._ask(sql, (group, number), {step: records})), {})
        return rows[0] if rows else None

    def last_steps(self, text: str) -> dict[str, int]:
        """The last step of each prompt that contains the text."""
        rows = self._ask(
            "SELECT prompt, max(step) AS step FROM log WHERE contains(prompt, ?) GROUP BY prompt",
            (text,),
            step_files(self._folder),
        )
        return {row["prompt"]: row["step"] for row in rows}

    def answers(self, prompt: str, step: int, num: int) -> list[dict[str, Any]]:
        """The first answers to a prompt in a step, without their long columns."""
        sql = f'SELECT {_SHOWN}, text FROM log WHERE prompt = ? ORDER BY "group", number LIMIT ?'
        return self._ask(sql, (prompt, num), self._file(step))

    def steps(self) -> list[int]:
        """The logged steps, in order."""
        return list(step_files(self._folder))

    def of_all_steps(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of a statement about `log`, the rollouts of all steps.

        Args:
            sql: Not a reader's text; with one `?` for each of `values`.
        """
        return self._ask(sql, values, step_files(self._folder))

    def _file(self, step: int) -> dict[int, Path]:
        files = step_files(self._folder)
        return {step: files[step]} if step in files else {}

    def _ask(self, sql: str, values: Sequence[Any], files: Mapping[int, Path]) -> list[dict[str, Any]]:
        """Rows of `log`, which stands for the given files."""
        if not files:
            return []
        source = "WITH log AS (FROM read_parquet(?, union_by_name = true, hive_partitioning = false)) "
        with self._connection.cursor() as cursor:
            cursor.execute(source + sql, [[str(path) for path in files.values()], *values])
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
