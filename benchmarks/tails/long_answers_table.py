"""The table of long tails, from the results of its part."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.harness.tables import Record, number, percent, table


def tail(cases: Iterable[Record]) -> str:
    """One row a way, beside the ideal."""
    header = (
        "",
        "trained tokens/s",
        "of the ideal",
        "training",
        "waiting",
        "of it for old groups",
        "log and publish",
        "masked for age",
        "age: mean, max",
        "tokens an answer: mean, max",
        "versions an answer",
    )
    rows = []
    for case in cases:
        shares, lengths = case["shares"], case["answer_tokens"]
        rows.append(
            [
                case["label"],
                number(case["tokens_per_s"], 0),
                percent(case["tokens_per_s"] / ideal if (ideal := case["ideal_tokens_per_s"]) else None),
                percent(shares["train"]),
                percent(shares["wait"]),
                percent(shares["wait_old"]),
                percent(shares["log"] + shares["publish"]),
                percent(case["masked_share"]),
                f"{number(case['age_mean'])}, {number(case['age_max'], 0)}",
                f"{number(lengths['mean'], 0)}, {number(lengths['max'], 0)}",
                number(case["versions_mean"]),
            ]
        )
    return table(header, rows)


def facts(cases: Iterable[Record]) -> dict[str, str]:
    """What the words of the section name: tokens/s alone, and the ideal."""
    first = next(iter(cases))
    return {
        "generation": number(first["alone"]["generation"], 0),
        "training": number(first["alone"]["training"], 0),
        "ideal": number(first["ideal_tokens_per_s"], 0),
    }
