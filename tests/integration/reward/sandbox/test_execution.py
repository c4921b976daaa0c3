"""A sandbox separates calls and lets their results through, at both levels; test_attacks.py has hostile code."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs

from gspo.common.errors import InputError
from gspo.reward.functions.environment_steps import EnvironmentSteps, Turn
from gspo.reward.functions.library import Function
from gspo.reward.sandbox import launch, syscalls
from gspo.reward.sandbox.calls import Answer, CallError, CallLimits, Code
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.levels import find_level, try_level
from tests.support.sandbox_attacks import NO_NAMESPACE

pytestmark = pytest.mark.asyncio(loop_scope="function")
LEVELS = ("bubblewrap", "landlock")
_LEVELS_TRIED: dict[str, ConfinementLevel] = {}


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Any:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: deploy/setup.sh does that for root")
    return request.param


@asynccontextmanager
async def sandbox_of(
    text: str,
    level: Any,
    *,
    kind: Literal["reward", "environment"] = "reward",
    entry: str | None = None,
    reads: tuple[Path, ...] = (),
    num_workers: int = 1,
    **limits: Any,
) -> AsyncIterator[Sandbox]:
    code = Code("r", text, "0" * 64, "/nowhere/r.py", entry=entry, kind=kind, reads=reads)
    call_limits = CallLimits(**({"timeout_s": 5.0, "memory_mb": 1024} | limits))
    if level not in _LEVELS_TRIED:
        _LEVELS_TRIED[level] = await try_level(level)
    sandbox = Sandbox(code, call_limits, _LEVELS_TRIED[level], num_workers=num_workers)
    try:
        await sandbox.load()
        yield sandbox
    finally:
        await sandbox.close()


async def ask(sandbox: Sandbox, *completions: str, session: str | None = "run") -> Answer:
    return await sandbox.call({"arguments": {"completions": list(completions)}}, session=session)


STATEFUL = """
import builtins, os, sys
seen = []
def reward(completions):
    before = [len(seen), getattr(builtins, "mark", 0), os.path.exists("mark"), int(os.environ.get("MARK", 0))]
    seen.append(1)
    builtins.mark = 1
    os.environ["MARK"] = "1"
    open("mark", "w").close()
    return [float(sum(before))]
"""


async def test_no_session_sees_the_leftovers_of_another(level: Any) -> None:
    async with sandbox_of(STATEFUL, level) as sandbox:
        sessions = ("a", "a", "b", "a", None, None, "b")
        values = [(await ask(sandbox, "x", session=session)).values[0] for session in sessions]
    assert values == [0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]


async def test_sessions_with_workers_enough_keep_theirs(level: Any) -> None:
    async with sandbox_of(STATEFUL, level, num_workers=2) as sandbox:
        values = [(await ask(sandbox, "x", session=session)).values[0] for session in ("a", "b", "a", "b")]
    assert values == [0.0, 0.0, 4.0, 4.0]


async def test_a_thread_that_outlives_its_call_is_gone_before_the_next(level: Any) -> None:
    text = (
        "import threading, time\nlives = []\n"
        "def reward(completions):\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n    lives.append(1)\n"
        "    return [float(threading.active_count() + len(lives))]\n"
    )
    async with sandbox_of(text, level) as sandbox:
        assert [(await ask(sandbox, "x")).values for _ in range(2)] == [[3.0], [3.0]]


DENIED = """
import multiprocessing, os, pathlib, socket, subprocess, urllib.request
from concurrent.futures import ProcessPoolExecutor
def hidden(): pathlib.Path(__file__).with_name("facts.json").read_text()
def beside(): open("facts.json")
def address(): urllib.request.urlopen("http://example.com", timeout=5)
def connection(): socket.create_connection(("192.0.2.1", 80), timeout=5)
def client():
    import httpx
    httpx.get("http://192.0.2.1", timeout=5)
def pool(): multiprocessing.Pool(2)
def executor():
    with ProcessPoolExecutor(2) as pool: list(pool.map(len, ["x"]))
def program(): subprocess.run(["true"])
def copy(): os.fork()
def mistake(): {}["key"]
def reward(completions):
    globals()[completions[0]]()
"""


async def test_a_denial_names_the_way_out(level: Any) -> None:
    ways = {
        "hidden": ("forbidden", "hidden: name what it reads under `reads`"),
        "beside": ("exception", "name the file under `reads`, and open it by its whole path"),
        **dict.fromkeys(("address", "connection", "client"), ("forbidden", "use `url` for a server of yours, or")),
        **dict.fromkeys(("pool", "executor", "program", "copy"), ("forbidden", "a function is one process: use")),
    }
    async with sandbox_of(DENIED, level) as sandbox:
        for action, (kind, way) in ways.items():
            with pytest.raises(CallError, match=way) as denied:
                await ask(sandbox, action)
            assert denied.value.kind == kind, action
        with pytest.raises(CallError, match=r"^raised KeyError: 'key' \(r.py line \d+\)$"):
            await ask(sandbox, "mistake")


GOES_ON = """
import os, signal, sys, threading
def spin(*_):
    while True: pass
def reward(completions):
    if completions == ["timer"]:
        signal.signal(signal.SIGALRM, spin)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    if completions == ["thread"]:
        sys.modules["inside.worker"]._num_threads = lambda: 1
        threading.Thread(target=spin, daemon=True).start()
    return [float(os.getpid())]
"""


async def test_a_worker_between_calls_does_nothing_and_keeps_nothing_that_goes_on(level: Any) -> None:
    async with sandbox_of(GOES_ON, level, num_workers=2) as sandbox:
        await ask(sandbox, "timer", session="timer")
        (thread,) = (await ask(sandbox, "thread", session="thread")).values
        async with asyncio.timeout(10):
            while not all(worker.stopped for worker in sandbox._idle):
                await asyncio.sleep(0.01)
            while len(sandbox._idle) > 1:  # the one with a thread is ended
                await asyncio.sleep(0.01)
        (worker,) = sandbox._idle
        looks = [await worker.supervisor.measure(worker.number)]
        await asyncio.sleep(0.3)  # the timer would have fired, and its handler never ends
        looks.append(await worker.supervisor.measure(worker.number))
        assert looks[0] is not None and looks[0] == looks[1]
        assert (await ask(sandbox, "x", session="thread")).values != [thread]


SLOW = "import time\ndef reward(completions):\n    time.sleep(float(completions[0]))\n    return [1.0]\n"


class DelayedInspection:
    """Delays the reply to the next inspection of a stopped worker until `go` is set."""

    def __init__(self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        supervisor = sandbox._supervisor
        assert supervisor is not None
        self.asked, self.go, measure = asyncio.Event(), asyncio.Event(), supervisor.measure

        async def delayed(number: int, *, stop: bool = False) -> Any:
            usage = await measure(number, stop=stop)
            if stop and not self.asked.is_set():
                self.asked.set()
                await self.go.wait()
            return usage

        monkeypatch.setattr(supervisor, "measure", delayed)


async def test_a_worker_that_a_call_takes_while_another_is_stopped_is_not(
    level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sandbox_of(SLOW, level, num_workers=2, timeout_s=3.0) as sandbox, asyncio.timeout(20):
        for _ in range(2):  # those of the second round, already loaded, are idle at once
            await asyncio.gather(ask(sandbox, "0.05"), ask(sandbox, "0.05"))
        for worker in sandbox._idle:
            worker.idle_since = 0.0
        inspection = DelayedInspection(sandbox, monkeypatch)
        await inspection.asked.wait()  # one of the two is being stopped, and the other comes next
        calls = [asyncio.create_task(ask(sandbox, "0.3")) for _ in range(2)]
        while sandbox._idle:
            await asyncio.sleep(0)
        inspection.go.set()
        assert [(await call).values for call in calls] == [[1.0], [1.0]]


async def test_a_useless_worker_is_passed_over_while_another_call_takes_the_next(level: Any) -> None:
    async with sandbox_of(SLOW, level, num_workers=2) as sandbox:
        await asyncio.gather(ask(sandbox, "0.05"), ask(sandbox, "0.05"))
        sandbox._idle[0].tainted = True
        answers = await asyncio.gather(ask(sandbox, "0.05"), ask(sandbox, "0.05"))
        assert [answer.values for answer in answers] == [[1.0], [1.0]]


async def test_a_call_that_is_cancelled_while_its_worker_is_looked_at_leaves_no_process(
    level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sandbox_of(SLOW, level) as sandbox, asyncio.timeout(20):
        inspection = DelayedInspection(sandbox, monkeypatch)
        (worker,) = sandbox._idle
        worker.stopped, worker.inspected = False, 0.0
        call = asyncio.create_task(ask(sandbox, "0"))
        await inspection.asked.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (sandbox._num_alive, worker.alive) == (0, False)
        assert (await ask(sandbox, "0")).values == [1.0]


async def test_one_full_scratch_leaves_the_others_theirs(level: Any) -> None:
    text = (
        "def reward(completions):\n"
        "    with open('x', 'wb') as file:\n"
        "        try:\n"
        "            for _ in range(80 if completions == ['fill'] else 20): file.write(bytes(2**20))\n"
        "        except OSError:\n"
        "            if completions != ['fill']: raise\n"
        "    return [1.0]\n"
    )
    async with sandbox_of(text, level, num_workers=4) as sandbox:
        for number in range(3):
            with suppress(CallError):  # at the level landlock, if it is looked at while it fills
                await ask(sandbox, "fill", session=f"full{number}")
        assert (await ask(sandbox, "x", session="other")).values == [1.0]


async def test_files_of_many_quick_calls_are_measured_between_them(level: Any) -> None:
    text = (
        "import os\n"
        "def reward(completions):\n"
        "    left = len(os.listdir())\n    open(str(left), 'wb').write(bytes(2**20))\n    return [float(left)]\n"
    )
    async with sandbox_of(text, level) as sandbox:
        for number in range(3000):
            try:
                num_files = (await ask(sandbox, "x")).values
            except CallError as error:  # a scratch with its own file system is full
                assert error.kind == "output_too_large"
                num_files = (await ask(sandbox, "x")).values
                assert num_files == [0.0]
            if number and num_files == [0.0]:
                break
        else:
            raise AssertionError("3 GB were written, and the worker is still the same")


async def test_a_forged_answer_spoils_no_later_call(level: Any) -> None:
    """The harness's own question is found in memory and answered by the function: its own result, and no other's."""
    text = (
        "import os, sys\n"
        "def reward(completions):\n"
        "    frame = sys._getframe()\n"
        "    while completions == ['forge'] and frame:\n"
        "        if 'question' in frame.f_locals:\n"
        "            forged = {'id': frame.f_locals['question']['id'], 'values': [100.0]}\n"
        "            os.write(3, sys.modules['inside.frames'].frame(forged))\n"
        "            break\n"
        "        frame = frame.f_back\n"
        "    return [1.0]\n"
    )
    async with sandbox_of(text, level) as sandbox:
        forged = (await ask(sandbox, "forge")).values
        after = [(await ask(sandbox, "x")).values for _ in range(3)]
    assert forged == [100.0]
    assert after == [[1.0]] * 3


async def test_files_named_in_reads_are_read_and_imported(level: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("FACTOR = 3.0\n")
    (tmp_path / "note.txt").write_text("2")
    note = f"open({str(tmp_path / 'note.txt')!r}).read()"
    text = f"import neighbour\ndef reward(completions): return [neighbour.FACTOR * float({note})]"
    async with sandbox_of(text, level, reads=(tmp_path,)) as sandbox:
        assert (await ask(sandbox, "x")).values == [6.0]
    with pytest.raises(CallError, match="No module named 'neighbour'") as failed:
        async with sandbox_of(text, level):
            pass
    assert (failed.value.loading, failed.value.kind, failed.value.line) == (True, "exception", 1)


async def test_single_files_and_packages_named_in_reads_are_imported(level: Any, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("A = 1.0\n")
    (tmp_path / "hidden.py").write_text("B = 1.0\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from pack.part import C\n")
    (tmp_path / "pack" / "part.py").write_text("C = 2.0\n")
    text = (
        "import one, pack\n"
        "def reward(completions):\n    if completions == ['x']: import hidden\n    return [one.A + pack.C]"
    )
    async with sandbox_of(text, level, reads=(tmp_path / "one.py", tmp_path / "pack")) as sandbox:
        assert (await ask(sandbox, "y")).values == [3.0]
        with pytest.raises(CallError, match="No module named 'hidden'"):
            await ask(sandbox, "x")


async def test_packages_are_shared_with_the_workers(level: Any) -> None:
    text = (
        "def reward(completions):\n    import numpy, sympy\n"
        "    return [float(sympy.Integer(2) + int(numpy.ones(3).sum()))] * len(completions)\n"
    )
    async with sandbox_of(text, level) as sandbox:
        started = time.perf_counter()
        assert (await ask(sandbox, "x", session=None)).values == [5.0]
        assert (await ask(sandbox, "x", "y", session=None)).values == [5.0, 5.0]
        assert time.perf_counter() - started < 5


async def test_torch_and_other_packages_are_imported_by_the_first_lines_of_a_file(level: Any) -> None:
    text = (
        "import torch\nimport numpy, sympy\nimport torch.nn.functional as F\n"
        "def reward(completions):\n    assert 'inside.supervisor' in __import__('sys').modules\n"
        "    return [float(F.relu(torch.tensor(2.0))) + float(numpy.ones(1)[0]) + float(sympy.Integer(3))]\n"
    )
    async with sandbox_of(text, level, memory_mb=4096, timeout_s=30.0) as sandbox:
        assert sandbox.supervisor_report["failed_imports"] == {}
        assert (await ask(sandbox, "x")).values == [6.0]


WANTS_A_FOLDER = """
import pathlib, tempfile
FILE = pathlib.Path(tempfile.mkdtemp()) / "made_at_import"
FILE.write_text("here")
def new_file():
    return tempfile.NamedTemporaryFile()
"""
FAILS_AT_FIRST = """
import fails_at_first.half
if fails_at_first.half.BEFORE_THE_FORK:
    raise RuntimeError("not in here")
WHOLE = True
"""
HALF = "import os\nBEFORE_THE_FORK = os.environ['TMPDIR'].endswith('preload')\n"


async def test_a_package_that_cannot_be_preloaded_is_imported_whole_by_the_function(
    level: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    (site / "fails_at_first").mkdir(parents=True)
    (site / "fails_at_first" / "__init__.py").write_text(FAILS_AT_FIRST)
    (site / "fails_at_first" / "half.py").write_text(HALF)
    (site / "wants_a_folder.py").write_text(WANTS_A_FOLDER)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(launch, "KNOWN", frozenset({"fails_at_first", "wants_a_folder"}))
    text = (
        "import fails_at_first\nimport wants_a_folder\n"
        "def reward(completions):\n"
        "    assert wants_a_folder.FILE.read_text() == 'here'\n"
        "    with wants_a_folder.new_file() as file: file.write(b'x')\n"
        "    return [float(fails_at_first.WHOLE and not fails_at_first.half.BEFORE_THE_FORK)]\n"
    )
    with capture_logs() as logs:
        async with sandbox_of(text, level) as sandbox:
            assert (await ask(sandbox, "x")).values == [1.0]
    (entry,) = [line for line in logs if line["event"] == "preload_failed"]
    assert entry["reasons"] == {"fails_at_first": "RuntimeError: not in here"}


async def test_processor_time_is_limited_over_all_threads(level: Any) -> None:
    text = "def reward(completions):\n    while completions == ['spin']: pass\n    return [1.0]\n"
    async with sandbox_of(text, level, cpu_s=0.3, timeout_s=20.0) as sandbox:
        with pytest.raises(CallError, match=r"more than 0.3 s of processor time") as failed:
            await ask(sandbox, "spin")
        assert failed.value.kind == "timeout"
        assert (await ask(sandbox, "x")).values == [1.0]


async def test_printed_output_comes_with_the_answer_and_with_the_failure(level: Any) -> None:
    text = (
        "import sys\ndef reward(completions):\n    print('seen', completions[0])\n    print('err', file=sys.stderr)\n"
        "    return [1 / float(completions[0])]\n"
    )
    async with sandbox_of(text, level) as sandbox:
        assert (await ask(sandbox, "1")).output == "seen 1\nerr\n"
        with pytest.raises(CallError) as failed:
            await ask(sandbox, "0")
    error = failed.value
    assert (error.kind, error.error_type, error.line, error.output) == (
        "exception",
        "ZeroDivisionError",
        5,
        "seen 0\nerr\n",
    )
    assert error.traceback.splitlines()[1:3] == [
        '  File "/nowhere/r.py", line 5, in reward',
        "    return [1 / float(completions[0])]",
    ]


ENVIRONMENT = """
def reset(task):
    return {"left": task["steps"]}, "go"
async def step(state, action):
    state["left"] -= 1
    return state, {"said": action}, 0.5, state["left"] == 0
class Maze:
    def reset(self, task): return [], task
    def step(self, state, action): return state, object(), 0.0, False
"""


async def test_an_environment_is_two_functions_of_json(level: Any) -> None:
    async with sandbox_of(ENVIRONMENT, level, kind="environment") as sandbox:
        first = await sandbox.call({"function": "reset", "arguments": {"task": {"steps": 1}}}, session="run")
        assert first.values == [{"left": 1}, "go"]
        second = await sandbox.call({"function": "step", "arguments": {"state": first.values[0], "action": "a"}})
        assert second.values == [{"left": 0}, {"said": "a"}, 0.5, True]
    async with sandbox_of(ENVIRONMENT, level, kind="environment", entry="Maze") as sandbox:
        with pytest.raises(CallError, match="JSON cannot carry") as failed:
            await sandbox.call({"function": "step", "arguments": {"state": [], "action": "a"}})
        assert failed.value.kind == "invalid_return"
    with pytest.raises(CallError, match=r"is not an environment: the module has no step\(state, action\)"):
        async with sandbox_of("def reset(task): ...", level, kind="environment"):
            pass


async def test_values_of_an_environment_are_checked(level: Any) -> None:
    text = (
        "turns = {'ok': ({'n': 1}, [{'role': 'user', 'content': 'go'}], 1, False), 'three': (1, 2, 3),\n"
        "         'reward': (0, 'x', True, False), 'done': (0, 'x', 1.0, 1), 'observation': (0, 5, 1.0, True)}\n"
        "def reset(task): return task, 'start'\n"
        "def step(state, action): return turns[action]\n"
    )
    async with sandbox_of(text, level, kind="environment") as sandbox:
        steps, function = EnvironmentSteps(None, session="run"), Function(sandbox.code, sandbox)
        assert await steps.reset(function, "[1]") == Turn("[1]", '"start"', 0.0, done=False)
        turn = await steps.step(function, "{}", "ok")
        assert turn == Turn('{"n": 1}', '[{"role": "user", "content": "go"}]', 1.0, done=False)
        for action in ("three", "reward", "done", "observation"):
            with pytest.raises(CallError) as failed:
                await steps.step(function, "{}", action)
            assert failed.value.kind == "invalid_return"
            assert action in str(failed.value).replace("3 values", "three")


async def test_a_cancelled_call_leaves_nothing_running(level: Any) -> None:
    text = "import time\ndef reward(completions):\n    time.sleep(float(completions[0]))\n    return [5.0]"
    async with sandbox_of(text, level, timeout_s=60.0) as sandbox:
        slow = asyncio.create_task(ask(sandbox, "60"))
        await asyncio.sleep(0.3)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        assert (await ask(sandbox, "0")).values == [5.0]


async def test_concurrent_calls_get_their_own_answers(level: Any) -> None:
    text = (
        "import os, threading, time\ndef reward(completions):\n    (c,) = completions\n"
        "    if c == 'crash': os._exit(1)\n    if c == 'timeout': time.sleep(60)\n    if c == 'exception': 1 / 0\n"
        "    if c == 'forbidden': os.write(3, b'x' * 100)\n"
        "    if c == '7': threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    print(c)\n    return [float(c)]\n"
    )
    bad = {10: "crash", 20: "exception", 21: "timeout", 30: "forbidden", 31: "crash", 45: "exception"}
    asked = [bad.get(number, str(number)) for number in range(60)]
    async with sandbox_of(text, level, num_workers=2, timeout_s=0.5) as sandbox:
        outcomes = await asyncio.gather(*(ask(sandbox, text) for text in asked), return_exceptions=True)
        assert (await ask(sandbox, "1")).output == "1\n"
    kinds = {number: error.kind for number, error in enumerate(outcomes) if isinstance(error, CallError)}
    assert kinds == bad
    values = {number: answer.values for number, answer in enumerate(outcomes) if isinstance(answer, Answer)}
    assert values == {number: [float(number)] for number in range(60) if number not in bad}


async def test_slow_calls_do_not_hold_up_another_function(level: Any) -> None:
    slow_text = "import time\ndef reward(completions):\n    time.sleep(0.2)\n    return [1.0]"
    fast_text = "def reward(completions): return [2.0]"
    async with sandbox_of(slow_text, level, num_workers=2) as slow, sandbox_of(fast_text, level) as fast:
        waiting = [asyncio.create_task(ask(slow, "x")) for _ in range(8)]
        await asyncio.sleep(0.05)
        values = [(await ask(fast, "x")).values for _ in range(50)]
        assert values == [[2.0]] * 50
        assert not waiting[-1].done()
        assert {tuple((await call).values) for call in waiting} == {(1.0,)}


async def test_no_supervisor_is_left_when_a_sandbox_is_closed(level: Any) -> None:
    async with sandbox_of("def reward(completions): return [1.0]", level) as sandbox:
        assert sandbox._supervisor is not None
        process, scratch = sandbox._supervisor._process, sandbox._supervisor._scratch
        await ask(sandbox, "x")
    assert process.returncode is not None
    assert scratch is None or not scratch.exists()


async def test_a_level_below_the_minimum_is_refused_with_the_missing_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"is bubblewrap, and .* reaches landlock: .*apt-get install bubblewrap"):
        await find_level("bubblewrap")
    assert (await find_level("landlock")).name == "landlock"

    def missing(**_: object) -> bytes:
        raise syscalls.FilterUnavailableError("libseccomp cannot be loaded (not found)")

    monkeypatch.setattr(syscalls, "filter_bytes", missing)
    with pytest.raises(InputError, match=r"is landlock, and .* reaches rlimits: .*apt-get install libseccomp2"):
        await find_level("landlock")


# The effect of Docker's default filter on a user without privilege; before Docker 23 it refused Landlock too.
IN_A_CONTAINER = """
import asyncio, errno, sys
import pyseccomp
from gspo.common.errors import InputError
from gspo.reward.sandbox.levels import find_level
from tests.support.sandbox_attacks import become_plain
become_plain()
container = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
for name in sys.argv[1].split():
    container.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
container.add_rule(
    pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0x10000000, 0x10000000)
)
container.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
container.load()
try:
    print(asyncio.run(find_level("landlock")))
except InputError as error:
    print(error)
"""


LANDLOCK = r"landlock \(Landlock \d+, seccomp, rlimits\)"
REFUSED = (
    r"reward.sandbox_minimum: is landlock, and this machine reaches rlimits: bubblewrap: a trial failed .*Give "
    r"a container the security option.*; landlock: the kernel .* has no Landlock, or it is refused.*"
)
NO_NAMESPACES = "unshare mount setns pivot_root"


@pytest.mark.parametrize(
    ("refused", "printed"), [(NO_NAMESPACES, LANDLOCK), (f"{NO_NAMESPACES} landlock_create_ruleset", REFUSED)]
)
async def test_in_a_container_without_privileges(refused: str, printed: str) -> None:
    root = Path(__file__).parents[4]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", IN_A_CONTAINER, refused),
        cwd=root,
        env=os.environ | {"PYTHONPATH": f"{root}:{root / 'proto'}:{root / 'services'}"},
        stdout=asyncio.subprocess.PIPE,
    )
    stdout, _ = await asyncio.wait_for(process.communicate(), 60)
    if process.returncode == NO_NAMESPACE:
        pytest.skip("this machine makes no user namespace, so root cannot become a plain user here")
    assert re.fullmatch(printed, stdout.decode().strip()), stdout.decode()


async def test_at_the_weakest_level_time_memory_and_state_still_hold() -> None:
    level = await find_level("rlimits")
    assert level.name in LEVELS, "the strongest there is, whatever the minimum"
    weak = type(level)("rlimits")
    text = STATEFUL + "    if completions == ['spin']:\n        while True: pass\n"
    text = text.replace("    return [float(sum(before))]\n", "") + "    return [float(sum(before))]\n"
    sandbox = Sandbox(Code("r", text, "0" * 64, "r.py"), CallLimits(timeout_s=0.5, memory_mb=1024), weak)
    await sandbox.load()
    try:
        values = [(await ask(sandbox, "x", session=session)).values for session in ("a", "b")]
        with pytest.raises(CallError, match=r"took longer than 0.5 s"):
            await ask(sandbox, "spin")
    finally:
        await sandbox.close()
    assert values == [[0.0], [0.0]]
