"""`python -m tests.gpu`: run the parts one after another, each as a process of its own, and keep what they gave.

Exit code 0 where every part passed, 1 where one failed, 3 where something was not run: no GPU, or no time left.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from gspo.common.host.machine import torch_is_for_cpus, visible_gpus
from tests.gpu.catalogue import PARTS, Part
from tests.gpu.machine_facts import ROOT, child_environment, missing, run_facts
from tests.gpu.records import PAGE, RECORDS, PartRecord, merge, read_records, write_page
from tests.support.repository.process_session import run_session

NOT_RUN = 3
_TAIL_LINES = 12


def main() -> int:
    """Run what the command line asks for; the exit code."""
    given = _arguments()
    if given.merge is not None:
        merge(RECORDS, read_records(given.merge))
        write_page(PAGE, read_records(RECORDS))
        return 0
    if given.device == "cuda" and (reason := _why_no_gpu()):
        print(f"not yet run: {reason}", file=sys.stderr)
        return NOT_RUN
    return _run_all(given)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--only", action="append", choices=[*PARTS], help="this part alone; may be given again")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the code on tiny sizes")
    parser.add_argument("--minutes", type=float, default=75.0, help="begin no part, and end one, after so long")
    parser.add_argument("--results", type=Path, help="file of results; with cuda docs/gpu.json by default")
    parser.add_argument("--again", action="store_true", help="run also what these results say has passed on this card")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/gpu", help="models, runs and logs")
    parser.add_argument("--engine", default="{}", help='further engine arguments of vLLM: {"enforce_eager": false}')
    parser.add_argument(
        "--merge", type=Path, metavar="FILE", help="take over results from another machine, run nothing"
    )
    given = parser.parse_args()
    given.results = (given.results or (RECORDS if given.device == "cuda" else given.folder / "cpu.json")).resolve()
    given.folder = given.folder.resolve()
    return given


def _why_no_gpu() -> str:
    if visible_gpus():
        return ""
    if torch_is_for_cpus():
        return "no GPU is used here, for torch is made for CPUs; see docs/gpu.md, or --device cpu to try the code"
    return "no GPU (nvidia-smi shows none); --device cpu tries the code"


def _run_all(given: argparse.Namespace) -> int:
    given.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * given.minutes
    facts, outcomes = run_facts(given.device), []
    known = {(record.part, record.card): record for record in read_records(given.results)}
    for part in _chosen(given):
        record = known.get((part.name, facts["card"]))
        if record is not None and record.passed and not given.again:
            print(f"{part.name}: passed before, on {record.date}; --again runs it anew")
            continue
        left_s = deadline - time.monotonic()
        if reason := missing(part.packages) or ("too little time is left (--minutes)" if left_s < part.least_s else ""):
            print(f"{part.name}: not run: {reason}")
            outcomes.append(NOT_RUN)
            continue
        record = _run_part(part, given, facts, min(part.limit_s, left_s))
        if record is None:
            outcomes.append(NOT_RUN)
            continue
        merge(given.results, [record])
        if given.results == RECORDS:
            write_page(PAGE, read_records(RECORDS))
        print(f"{part.name}: {record.outcome}; {record.further}", flush=True)
        outcomes.append(0 if record.passed else 1)
    return 1 if 1 in outcomes else NOT_RUN if NOT_RUN in outcomes else 0


def _chosen(given: argparse.Namespace) -> list[Part]:
    names = given.only or [name for name, part in PARTS.items() if given.device == "cuda" or part.on_cpu]
    return [PARTS[name] for name in names]


def _run_part(part: Part, given: argparse.Namespace, facts: dict[str, str], limit_s: float) -> PartRecord | None:
    """One part as a process that leads a session of its own, so that nothing of it stays behind.

    None if this GPU is none for it, or --minutes ended it.
    """
    print(f"{part.name}: {part.what} (at most {limit_s:.0f} s)", flush=True)
    answer, log = given.folder / f"{part.name}.json", given.folder / f"{part.name}.log"
    answer.unlink(missing_ok=True)
    options = {
        "part": part.name,
        "device": given.device,
        "folder": str(given.folder),
        "engine": json.loads(given.engine),
    }
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.gpu.catalogue", json.dumps(options), str(answer)]
    code = run_session(command, log, limit_s, cwd=ROOT, env=child_environment(given.folder))
    reason = "" if code is not None else f"did not end within {limit_s:.0f} s"
    findings = json.loads(answer.read_text()) if answer.exists() else {}
    ended = findings.pop("reason", None)
    failure = reason or (_last_words(log) if ended is None else ended)
    not_here = findings.pop("not_here", "")
    if reason and limit_s < part.limit_s:
        not_here = "it was ended when no time was left (--minutes)"
    if not_here:
        print(f"{part.name}: not run: {not_here}", flush=True)
        return None
    values = {"numbers": {}, **findings, **facts, "reason": failure}
    return PartRecord(part=part.name, passed=not failure, seconds=round(time.monotonic() - began, 1), **values)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL_LINES:])[-1000:] or "it ended without a word"


if __name__ == "__main__":
    sys.exit(main())
