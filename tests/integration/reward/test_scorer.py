"""Real processes that misbehave: only the guilty answer fails, with its reason, and the next call works."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from gspo.common.config.reward import RewardFunction
from gspo.common.config.schema import ModelConfig
from gspo.common.errors import InputError
from gspo.reward.functions.configured import read_code
from gspo.reward.functions.run_record import source_of
from gspo.reward.sandbox.calls import CallError
from gspo.reward.scoring.scorer import NUM_PROBES, open_scorer
from gspo.reward.submissions.trials import try_rows
from gspo_proto.rollout_pb2 import RewardUse, Rollout
from tests.support.reward_rollouts import make_rollout, reward_config, reward_or_failure
from tests.support.tiny_model import make_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="function")

BATCH = [make_rollout(text, group=number // 2, number=number % 2) for number, text in enumerate(("1", "2", "bad", "4"))]
HEAD = "import ctypes, math, os, subprocess, sys, time\n"
ROWS = "def reward(completions):\n    return [score(text) for text in completions]\n"


async def scores_of(folder: Path, source: str, rollouts: list[Rollout] = BATCH, **reward: object) -> list[float | str]:
    """Score once, and then once more good answers alone, which must always work."""
    async with open_scorer(reward_config(folder, HEAD + source, **reward), name="reward-0") as scorer:
        scores = [reward_or_failure(score) for score in await scorer.score(rollouts)]
        again = [reward_or_failure(score) for score in await scorer.score([make_rollout("7"), make_rollout("8")])]
    assert again == [7.0, 8.0]
    return scores


@pytest.mark.parametrize(
    ("what_bad_does", "reason"),
    [
        ("raise ValueError('cannot read\\nthe answer')", "r: raised ValueError: cannot read the answer (r.py line 3)"),
        ("raise ValueError('half of a pair: \\ud800')", "r: raised ValueError: half of a pair: ? (r.py line 3)"),
        ("return {'\\udc00': 'x'}", "r: part '?': returned str where a number belongs"),
        ("return float('nan')", "r: returned NaN"),
        ("return None", "r: returned None, and no function scored the answer"),
        ("return 'good'", "r: returned str where a number belongs"),
        ("time.sleep(60)", "r: took longer than 0.5 s and was killed"),
        ("os._exit(3)", "r: its process died (exit code 3)"),
        ("sys.exit('enough')", "r: raised SystemExit: enough (r.py line 3)"),
        ("os.kill(os.getpid(), 9)", "r: its process died (killed by SIGKILL)"),
        ("print('last words'); os._exit(3)", "r: its process died (exit code 3); it last wrote: last words"),
        ("ctypes.string_at(0)", "r: its process died (killed by SIGSEGV)"),
        ("return len(bytearray(2**32))", "r: raised MemoryError (r.py line 3)"),
        ("os.closerange(3, 64)", "r: its process died"),
    ],
)
async def test_only_the_guilty_answer_fails(tmp_path: Path, what_bad_does: str, reason: str) -> None:
    source = f"def score(text):\n    if text == 'bad': {what_bad_does}\n    return float(text)\n" + ROWS
    # The others' time is for hangs: a new worker, or a core that the kernel writes, may take long.
    scores = await scores_of(tmp_path, source, timeout_s=0.5 if "sleep" in what_bad_does else 10.0, memory_mb=1024)
    assert scores[:2] + scores[3:] == [1.0, 2.0, 4.0]
    assert str(scores[2]).startswith(reason)


@pytest.mark.parametrize(
    "noise",
    [
        "print('{\"values\": [100.0]}' * 1000)",
        "sys.stderr.write('x' * 300_000)",
        "os.system('echo 100; echo 100 >&2')",
        "sys.stdout.close()",
    ],
)
async def test_noise_is_not_a_result(tmp_path: Path, noise: str) -> None:
    source = f"def score(text):\n    {noise}\n    return float(len(text))\n" + ROWS.replace(
        "score(text)", "float(text)"
    )
    source = source.replace("def reward(completions):", f"def reward(completions):\n    {noise}")
    good = [make_rollout("1"), make_rollout("2")]
    assert await scores_of(tmp_path, source, good) == [1.0, 2.0]


async def test_a_frame_forged_on_every_descriptor_is_not_a_result(tmp_path: Path) -> None:
    forge = (
        "def score(text):\n"
        "    if text == 'bad':\n"
        "        frame = b'{\"values\": [100.0]}'\n"
        "        for fd in range(3, 64):\n"
        "            try: os.write(fd, len(frame).to_bytes(8, 'big') + frame)\n"
        "            except OSError: pass\n"
        "        return 100.0\n"
        "    return float(text)\n"
    )
    scores = await scores_of(tmp_path, forge + ROWS)
    assert scores[:2] + scores[3:] == [1.0, 2.0, 4.0]
    assert "wrote into the channel of results" in str(scores[2])


async def test_a_wrong_length_is_a_failure_of_each(tmp_path: Path) -> None:
    source = "def reward(completions):\n    return [float(t) for t in completions if t != 'bad']\n"
    assert await scores_of(tmp_path, source) == [1.0, 2.0, "r: returned 0 values for 1 completions", 4.0]


async def test_a_function_that_hangs_on_everything_is_not_tried_on_every_answer(tmp_path: Path) -> None:
    source = "def reward(completions):\n    if len(completions[0]) > 1: time.sleep(60)\n    return [7.0, 8.0]\n"
    batch = [make_rollout("hang", group=group) for group in range(30)]
    started = time.monotonic()
    scores = await scores_of(tmp_path, source, batch, timeout_s=0.2)
    assert scores.count("r: took longer than 0.2 s and was killed") == NUM_PROBES
    assert {score for score in scores if "not tried" in str(score)} == {
        "r: timed out on a batch of 30 and on each of 4 answers alone; not tried"
    }
    assert time.monotonic() - started < 30 * 0.2 + 4


async def test_the_answers_of_one_prompt_that_hang_leave_the_others_alone(tmp_path: Path) -> None:
    source = "def score(text):\n    if text == 'bad': time.sleep(60)\n    return float(text)\n" + ROWS
    batch = [make_rollout("bad", number=number) for number in range(5)] + [make_rollout("1", group=1)]
    scores = await scores_of(tmp_path, source, batch, timeout_s=0.2)
    assert scores == ["r: took longer than 0.2 s and was killed"] * 5 + [1.0]


async def test_batches_are_as_large_as_asked_for(tmp_path: Path) -> None:
    source = "def reward(completions):\n    return [float(len(completions))] * len(completions)\n"
    config = reward_config(tmp_path, source, batch_size=3)
    async with open_scorer(config, name="reward-0") as scorer:
        scores = await scorer.score([make_rollout("x") for _ in range(7)])
    assert [score.reward for score in scores] == [3.0] * 6 + [1.0]


async def test_async_functions_and_verl_rows_score(tmp_path: Path) -> None:
    source = (
        "import asyncio\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    await asyncio.sleep(0.01)\n"
        "    if solution_str == 'bad': raise ValueError('bad')\n"
        "    return {'score': float(solution_str == ground_truth), 'length': len(solution_str)}\n"
    )
    config = reward_config(tmp_path, source, functions=[{"path": tmp_path / "r.py", "weight": 2.0}])
    batch = [make_rollout(text, answer="4") for text in ("4", "bad", "12")]
    async with open_scorer(config, name="reward-0") as scorer:
        callee = scorer.library.configured["r"].callee
        with patch.object(callee, "call", wraps=callee.call) as call:
            scores = await scorer.score(batch)
    assert [reward_or_failure(score) for score in scores] == [2.0, "r: raised ValueError: bad (r.py line 4)", 0.0]
    assert [(part.name, part.value, part.weight) for part in scores[2].parts] == [
        ("r", 0.0, 2.0),
        ("r/length", 2.0, 0.0),
    ]
    assert call.await_count == 1, "a row that raises needs no second call"


async def test_weighted_functions_are_summed_and_one_failure_is_enough(tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text("def reward(completions): return [{'a': len(t), 'b': 1} for t in completions]")
    functions = [{"path": tmp_path / "r.py", "weight": 0.5}, {"path": tmp_path / "length.py", "weight": -1.0}]
    config = reward_config(tmp_path, "def reward(completions): return map(float, completions)", functions=functions)
    async with open_scorer(config, name="reward-0") as scorer:
        scores = await scorer.score([make_rollout("10"), make_rollout("bad")])
        versions = [function.code.version for function in scorer.library.configured.values()]
    assert reward_or_failure(scores[0]) == 0.5 * 10 - 1.0 * (2 + 1)
    assert [(part.name, part.value, part.weight) for part in scores[0].parts] == [
        ("r", 10.0, 0.5),
        ("length/a", 2.0, -1.0),
        ("length/b", 1.0, -1.0),
    ]
    assert (scores[0].version, scores[0].scorer) == (",".join(versions), "reward-0")
    assert str(reward_or_failure(scores[1])).startswith(
        "r: raised ValueError: could not convert string to float: 'bad'"
    )
    assert [part.name for part in scores[1].parts] == ["length/a", "length/b"]


NONE_CASE = """def {kind}_reward(completions, kind, **columns):
    return [float(len(text)) if k == "{kind}" else None for text, k in zip(completions, kind)]
"""


async def test_none_leaves_an_answer_to_the_other_functions(tmp_path: Path) -> None:
    functions = []
    for kind in ("math", "code"):  # the names of modules of the standard library
        (tmp_path / f"{kind}.py").write_text(NONE_CASE.format(kind=kind))
        functions.append({"path": tmp_path / f"{kind}.py"})
    batch = [make_rollout("x" * (number + 1), kind=kind) for number, kind in enumerate(("code", "math", "prose"))]
    async with open_scorer(reward_config(tmp_path, "", functions=functions), name="reward-0") as scorer:
        scores = await scorer.score(batch)
    nobody = "returned None, and no function scored the answer"
    assert [reward_or_failure(score) for score in scores] == [1.0, 2.0, f"math: {nobody}; code: {nobody}"]
    assert [[part.name for part in score.parts] for score in scores] == [["code"], ["math"], []]
    assert scores[2].failure_kind == "invalid_return"


async def test_verls_batch_form_scores_answers_alone_where_a_batch_fails(tmp_path: Path) -> None:
    source = (
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    assert len(data_sources) == len(extra_infos)\n"
        "    pairs = zip(solution_strs, ground_truths)\n"
        "    return [{'score': float(float(text) == float(truth)), 'acc': 1} for text, truth in pairs]\n"
    )
    batch = [make_rollout("4", answer="4"), make_rollout("bad", answer="4"), make_rollout("5", answer="4")]
    async with open_scorer(reward_config(tmp_path, source), name="reward-0") as scorer:
        first, bad, third = await scorer.score(batch)
    assert [(part.name, part.value) for part in first.parts] == [("r", 1.0), ("r/acc", 1.0)]
    assert "raised ValueError: could not convert string to float: 'bad'" in bad.failure
    assert third.reward == 0.0


async def test_a_rollout_says_which_functions_score_it(tmp_path: Path) -> None:
    config = reward_config(tmp_path, "def reward(completions): return [1.0] * len(completions)")
    plain, weighted, unknown, other = (make_rollout("x") for _ in range(4))
    weighted.rewards.append(RewardUse(name="r", weight=3.0))
    unknown.rewards.append(RewardUse(name="q", weight=1.0))
    other.rewards.append(RewardUse(name="r", version="0" * 64, weight=1.0))
    async with open_scorer(config, name="reward-0") as scorer:
        scores = [reward_or_failure(score) for score in await scorer.score([plain, weighted, unknown, other])]
    assert scores[:3] == [1.0, 3.0, "q: there is no reward function of this name; known are r"]
    assert str(scores[3]).startswith("r: version 000000000000 is asked for and ")


async def test_user_code_sees_none_of_the_services_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_SECRET", "token")
    source = (
        "import os\n"
        "def reward(completions):\n"
        "    known = ('PATH', 'LANG', 'LC_CTYPE', 'PWD', 'HOME', 'TMPDIR')\n"
        "    seen = [k for k in os.environ if k not in known and not k.endswith('_NUM_THREADS')]\n"
        "    assert not seen, seen\n"
        "    return [float(len([fd for fd in os.listdir('/proc/self/fd')]))] * len(completions)\n"
    )
    async with open_scorer(reward_config(tmp_path, source), name="reward-0") as scorer:
        (score,) = await scorer.score([make_rollout("x")])
    # stdin, stdout, stderr, the channel, and the listing itself
    assert reward_or_failure(score) == 5.0


async def test_files_are_imported_and_opened_where_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "services.py").write_text("FACTOR = 3.0\n")
    (tmp_path / "note.txt").write_text("2")
    source = (
        "import pathlib, services\nnote = pathlib.Path(__file__).parent / 'note.txt'\n"
        "def reward(completions): return [services.FACTOR * float(note.read_text())]"
    )
    functions = [{"path": tmp_path / "r.py", "reads": [tmp_path]}]
    async with open_scorer(reward_config(tmp_path, source, functions=functions), name="reward-0") as scorer:
        (score,) = await scorer.score([make_rollout("x")])
    assert reward_or_failure(score) == 6.0
    with pytest.raises(InputError, match=r"reward.functions.0.reads.0: .*nothing does not exist"):
        functions = [{"path": tmp_path / "r.py", "reads": [tmp_path / "nothing"]}]
        async with open_scorer(reward_config(tmp_path, source, functions=functions), name="reward-0"):
            pass


SUPPLIED = """def reward(completions, raw_completions, tokenizer, trainer_state, log_metric, log_extra, stops):
    assert [tokenizer.decode(tokenizer(raw)["input_ids"]) for raw in raw_completions] == raw_completions
    log_metric("step", trainer_state.global_step)
    log_extra("raw", raw_completions)
    return [float(len(raw)) for raw in raw_completions]
"""


async def test_a_function_gets_the_tokenizer_and_logs(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3"}')
    model = ModelConfig(path=str(tmp_path / "model"))
    # The stop string and what follows it are cut off the text, and their tokens are the policy's.
    raw = "12;3" + tokenizer.eos_token
    rollout, older = make_rollout("12"), make_rollout("12")
    for answer, version in ((rollout, 7), (older, 6)):
        answer.token_ids[:] = tokenizer(raw)["input_ids"]
        answer.version[:], answer.stop = [version], ";"
    async with open_scorer(reward_config(tmp_path, SUPPLIED), name="reward-0", model=model) as scorer:
        scores = await scorer.score([rollout, older])
        (trial,) = (await try_rows(scorer.library.configured["r"], [{"completion": "12"}])).results
    assert [score.reward for score in scores] == [len(raw)] * 2, scores
    assert [[(part.name, part.value, part.weight) for part in score.parts] for score in scores] == [
        [("r", len(raw), 1.0), ("r/step", 7.0, 0.0)]
    ] * 2
    assert json.loads(scores[0].logged_json) == {"r/raw": raw}
    assert (trial.reward, trial.extras, trial.columns) == (2.0, {"step": 0.0}, {"raw": "12"})


async def test_a_parameter_for_the_tokenizer_needs_a_model_or_a_default(tmp_path: Path) -> None:
    source = "def reward(completions, tokenizer{}): return [float(tokenizer is None)] * len(completions)"
    with pytest.raises(InputError, match=r"the tokenizer cannot be filled: there is no model here. Install transform"):
        async with open_scorer(reward_config(tmp_path, source.format("")), name="reward-0"):
            pass
    assert await scores_of_any(tmp_path, source.format("=None")) == [1.0]


async def scores_of_any(folder: Path, source: str) -> list[float | str]:
    async with open_scorer(reward_config(folder, source), name="reward-0") as scorer:
        return [reward_or_failure(score) for score in await scorer.score([make_rollout("x")])]


BESIDE = {
    "helpers.py": "from kit.words import count\n\n\ndef score(text):\n    return count(text) / int(text)\n",
    "kit/words.py": "import os\nassert not os.path.exists(__file__)\ncount = len\n",
    "math.py": "raise ImportError('the standard library has it')\n",
}
IMPORTS = "import math\nfrom helpers import score\ndef reward(completions): return [score(c) for c in completions]\n"


async def test_modules_beside_the_file_come_along_and_belong_to_its_version(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    for name, text in BESIDE.items():
        (tmp_path / name).write_text(text)
    config = reward_config(tmp_path, IMPORTS)
    async with open_scorer(config, name="reward-0") as scorer:
        (tmp_path / "helpers.py").write_text("")
        first, failed = await scorer.score([make_rollout("11"), make_rollout("0")])
        code = scorer.library.configured["r"].code
        source = source_of(scorer.library.configured["r"])
    assert reward_or_failure(first) == 2 / 11
    assert failed.failure == "r: raised ZeroDivisionError: division by zero (r.py line 3)"
    assert {*code.modules} == {*source.modules} == {"helpers.py", "kit/words.py"}
    with pytest.raises(InputError, match="cannot import name 'score' from 'helpers'"):
        async with open_scorer(config, name="reward-0"):
            pass
    (tmp_path / "helpers.py").write_text(BESIDE["helpers.py"] + "# another text")
    assert read_code(config.functions[0], "reward.functions.0").version != code.version


async def test_the_file_that_was_read_at_the_start_scores_to_the_end(tmp_path: Path) -> None:
    source = "def reward(completions):\n    if completions == ['die']: os._exit(1)\n    return [1.0]\n"
    async with open_scorer(reward_config(tmp_path, "import os\n" + source), name="reward-0") as scorer:
        (tmp_path / "r.py").write_text("def reward(completions): return [2.0]")
        first, died, after = [(await scorer.score([make_rollout(text)]))[0] for text in ("a", "die", "b")]
    assert (reward_or_failure(first), reward_or_failure(after)) == (1.0, 1.0)
    assert died.failure


async def test_a_cancelled_call_leaves_no_half_answer(tmp_path: Path) -> None:
    source = "import time\ndef reward(completions):\n    time.sleep(float(completions[0]))\n    return [5.0]"
    async with open_scorer(reward_config(tmp_path, source), name="reward-0") as scorer:
        slow = asyncio.create_task(scorer.score([make_rollout("60")]))
        await asyncio.sleep(0.3)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        (score,) = await scorer.score([make_rollout("0")])
    assert reward_or_failure(score) == 5.0


async def test_the_function_dies_with_its_service(tmp_path: Path) -> None:
    reward_config(tmp_path, "def reward(completions):\n    while True: pass")
    program = (
        "import asyncio\n"
        "from tests.support.reward_rollouts import make_rollout\n"
        "from gspo.common.config.reward import RewardConfig\n"
        "from gspo.reward.scoring.scorer import open_scorer\n"
        "async def main():\n"
        f"    config = RewardConfig(functions=[{{'path': {str(tmp_path / 'r.py')!r}}}], timeout_s=60)\n"
        "    async with open_scorer(config, name='x') as scorer:\n"
        "        print('calling', flush=True)\n"
        "        await scorer.score([make_rollout('x')])\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'proto'}:{root / 'services'}"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as service:
        assert service.stdout is not None
        assert await asyncio.to_thread(service.stdout.readline) == b"calling\n"
        await asyncio.sleep(0.3)
        started = psutil.Process(service.pid).children(recursive=True)
        service.send_signal(signal.SIGKILL)
    assert len(started) >= 2, "the supervisor and a worker"
    assert psutil.wait_procs(started, timeout=5)[1] == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def score(text): ...", "holds no reward function; it defines score. Define reward"),
        ("def a(completions): ...\ndef b(completions): ...", "several reward functions: a, b. Name one with `entry:`"),
        (
            "import no_such_module",
            r"ModuleNotFoundError: No module named 'no_such_module' .r.py line 1.\. .* under `reads`, or install its",
        ),
        ("import os\nos._exit(4)", r"cannot be loaded: its process died \(exit code 4\)"),
        ("x = bytearray(2**40)\ndef reward(completions): ...", "raised MemoryError.*Raise reward.memory_mb"),
    ],
)
async def test_a_file_that_cannot_be_loaded_is_an_input_error(tmp_path: Path, source: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        async with open_scorer(reward_config(tmp_path, source), name="reward-0"):
            pass


async def test_columns_that_are_not_json_fail_that_rollout_alone(tmp_path: Path) -> None:
    broken = make_rollout("1")
    broken.prompt.columns_json = "{"
    scores = await scores_of(
        tmp_path, "def reward(completions): return map(float, completions)", [broken, make_rollout("2")]
    )
    assert (str(scores[0]).startswith("r: cannot be asked: "), scores[1]) == (True, 2.0)


async def test_a_missing_column_is_a_failure(tmp_path: Path) -> None:
    config = reward_config(tmp_path, "def reward(completions, answer): return [float(a == '4') for a in answer]")
    async with open_scorer(config, name="reward-0") as scorer:
        scores = await scorer.score([make_rollout("x", level=1)])
        with pytest.raises(CallError):
            await scorer.library.configured["r"].callee.call({"arguments": {}})
    assert reward_or_failure(scores[0]) == "r: needs the column 'answer', and the data set has level"
    assert RewardFunction(path=tmp_path / "r.py").label == "r"
