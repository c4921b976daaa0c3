"""`python -m tests.gpu`: run the parts, each as a process of its own, and keep what they gave.

Parts that judge results run beside each other, and then those that judge speed, one after another.

Exit code 0 where every part passed, 1 where one failed, 3 where something was not run: no GPU, or no time left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gspo.common.host.machine import GIB, torch_is_for_cpus, visible_gpus
from tests.gpu.catalogue import PARTS, Part
from tests.gpu.machine_facts import ROOT, child_environment, missing, run_facts
from tests.gpu.records import PAGE, RECORDS, PartRecord, merge, read_records, write_page
from tests.support.repository.process_session import run_session

NOT_RUN = 3
_TAIL_LINES = 12
_CUT_OFF = "it was ended when no time was left (--minutes)"


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
    parser.add_argument("--beside", type=int, help="parts at a time that judge results; 1 by default without a GPU")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/gpu", help="models, runs and logs")
    parser.add_argument("--engine", default="{}", help='further engine arguments of vLLM: {"enforce_eager": false}')
    parser.add_argument(
        "--merge", type=Path, metavar="FILE", help="take over results from another machine, run nothing"
    )
    given = parser.parse_args()
    given.results = (given.results or (RECORDS if given.device == "cuda" else given.folder / "cpu.json")).resolve()
    given.folder = given.folder.resolve()
    given.beside = given.beside or (_most_beside() if given.device == "cuda" else 1)
    return given


def _why_no_gpu() -> str:
    if visible_gpus():
        return ""
    if torch_is_for_cpus():
        return "no GPU is used here, for torch is made for CPUs; see docs/gpu.md, or --device cpu to try the code"
    return "no GPU (nvidia-smi shows none); --device cpu tries the code"


def _most_beside() -> int:
    """As many parts as the memory of the first GPU and the cores carry: at most 30 GiB and four cores each."""
    total = next((gpu.total_bytes or 0 for gpu in visible_gpus()), 0)
    return max(1, min(total // (30 * GIB), (os.cpu_count() or 1) // 4))


def _run_all(given: argparse.Namespace) -> int:
    given.folder.mkdir(parents=True, exist_ok=True)
    run = GpuTest(given, run_facts(given.device), time.monotonic() + 60 * given.minutes)
    parts = _chosen(given)
    together = [part for part in parts if part.beside] if given.beside > 1 else []
    alone = [part for part in parts if part not in together]
    with ThreadPoolExecutor(given.beside) as pool:
        outcomes = list(pool.map(partial(run.outcome_of, beside=min(given.beside, len(together)) - 1), together))
    outcomes += [run.outcome_of(part) for part in alone]
    return 1 if 1 in outcomes else NOT_RUN if NOT_RUN in outcomes else 0


def _chosen(given: argparse.Namespace) -> list[Part]:
    names = given.only or [name for name, part in PARTS.items() if given.device == "cuda" or part.on_cpu]
    return [PARTS[name] for name in names]


@dataclass
class GpuTest:
    """A call of this command.

    Attributes:
        facts: Date, GPU, driver and versions, as a record has them.
        deadline: On the monotonic clock.
    """

    given: argparse.Namespace
    facts: dict[str, str]
    deadline: float

    def __post_init__(self) -> None:
        """Read the records of earlier calls; one part at a time writes its own."""
        self._known = {(it.part, it.card): it for it in read_records(self.given.results)}
        self._writing = threading.Lock()

    def outcome_of(self, part: Part, *, beside: int = 0) -> int:
        """Run a part unless it has passed, and keep its record: 0 passed, 1 failed, 3 not run."""
        record = self._known.get((part.name, self.facts["card"]))
        if record is not None and record.passed and not self.given.again:
            print(f"{part.name}: passed before, on {record.date}; --again runs it anew")
            return 0
        left_s = self.deadline - time.monotonic()
        if reason := missing(part.packages) or ("too little time is left (--minutes)" if left_s < part.least_s else ""):
            print(f"{part.name}: not run: {reason}")
            return NOT_RUN
        record = _run_part(part, self.given, self.facts, min(part.limit_s, left_s), beside)
        if record is None:
            return NOT_RUN
        with self._writing:
            merge(self.given.results, [record])
            if self.given.results == RECORDS:
                write_page(PAGE, read_records(RECORDS))
        print(f"{part.name}: {record.outcome}; {record.further}", flush=True)
        return 0 if record.passed else NOT_RUN if record.reason == _CUT_OFF else 1


def _run_part(
    part: Part, given: argparse.Namespace, facts: dict[str, str], limit_s: float, beside: int
) -> PartRecord | None:
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
        "beside": beside,
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
        failure = _CUT_OFF
        not_here = "" if findings.get("numbers") else _CUT_OFF
    if not_here:
        print(f"{part.name}: not run: {not_here}", flush=True)
        return None
    values = {"numbers": {}, **findings, **facts, "reason": failure}
    if beside:
        values["numbers"] |= {"parts_beside": beside}
    return PartRecord(part=part.name, passed=not failure, seconds=round(time.monotonic() - began, 1), **values)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL_LINES:])[-1000:] or "it ended without a word"


if __name__ == "__main__":
    sys.exit(main())
