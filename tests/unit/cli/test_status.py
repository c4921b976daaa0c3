"""What `gspo status` says of generators that pushes do not reach."""

from __future__ import annotations

import io
import time
from dataclasses import replace

from rich.console import Console

from services.cli.generators import GeneratorNews, in_trouble
from services.cli.status import members_parts
from services.common.members import Member


def learner(**generator: object) -> Member:
    current = {"name": "generation-0 (a:1)", "state": "current", "version": 7, "num_failures": 0, "problem": ""}
    current |= {"since_unix_s": None}
    activity = {"kind": "busy", "what": "training", "detail": "step 8", "since_unix_s": time.time()}
    facts = {"generators": [current, current | generator]}
    return Member("learner", "learner-0", beat_unix_s=time.time(), activity=activity, facts=facts)


def out() -> dict[str, object]:
    return {
        "name": "generation-0 (b:1)",
        "state": "out",
        "version": 4,
        "num_failures": 5,
        "problem": "DATA_LOSS: version 7 has digest aa and bb came",
        "since_unix_s": time.time() - 90,
    }


def test_a_generator_that_is_out_is_named_with_reason_and_time() -> None:
    expected = (
        "generation-0 (b:1) is out for 1 min 30 s, serving version 4: 5 pushes failed, the last: "
        "DATA_LOSS: version 7 has digest aa and bb came"
    )
    assert in_trouble([Member("reward", "reward-0"), learner(**out())]) == [expected]
    console = Console(file=io.StringIO(), width=400)
    console.print(*members_parts([learner(**out())], None))
    assert expected in console.file.getvalue()


def test_addresses_are_whole_in_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(*members_parts([replace(learner(), http="127.0.0.1:34567", grpc="127.0.0.1:45678")], None))
    shown = console.file.getvalue()
    assert "127" in shown and "…" not in shown


def test_one_that_is_only_being_pushed_to_is_not_worth_a_line() -> None:
    behind = {"name": "generation-0 (b:1)", "state": "behind", "problem": "", "since_unix_s": time.time()}
    assert in_trouble([learner(**behind)]) == []


def test_a_push_that_takes_long_is_worth_one() -> None:
    behind = {"name": "generation-0 (b:1)", "state": "behind", "problem": "", "since_unix_s": time.time() - 7}
    expected = "generation-0 (b:1) is behind for 7 s, serving version 7: the push to it is under way"
    assert in_trouble([learner(**behind)]) == [expected]


def test_departure_and_return_are_told_once_each_while_a_run_is_watched() -> None:
    news = GeneratorNews()
    back = {"name": "generation-0 (b:1)"}
    told = [news.lines([learner(**generator)]) for generator in (back, out(), out(), back, back)]
    assert [[line.kind for line in lines] for lines in told] == [[], ["warning"], [], ["note"], []]
    assert told[1][0].text.startswith("generation-0 (b:1) is out for 1 min 30 s")
    assert told[3][0].text == "generation-0 (b:1) has caught up"
    # What a recovery had to pass over is said once in the terminal, and at each look by `gspo status`.
    damaged = replace(learner(), facts={"notices": ["The checkpoint of step 4 is damaged (model.pt)."]})
    assert [line.text for line in news.lines([damaged])] == in_trouble([damaged]) == damaged.facts["notices"]
    assert news.lines([damaged]) == []
    # One that has left the run is not back.
    news.lines([learner(**out())])
    assert news.lines([]) == []
