"""The tests of requests on this device: pauses, spans of versions, stops, the salt of the prefix cache, draft tokens.

Those of `make test` run vLLM's Model Runner V1, since a CPU has no other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from gspo.common.config.engines import GenerationConfig
from gspo.generation.engine.process import WHOLE_FLOAT32
from gspo.generation.engine.vllm_engine import engine_arguments
from tests.gpu.machine_facts import ROOT
from tests.gpu.part_run import PartRun

_FOLDER = ROOT / "tests/integration/generation"
_FILES = ("test_engine.py", "test_drafts.py")
# Those of pyproject.toml that need no further packages.
_SETTINGS = ("asyncio_mode=auto", "asyncio_default_fixture_loop_scope=module", "asyncio_default_test_loop_scope=module")


@dataclass
class _Outcomes:
    """A plugin of pytest: the number of tests that passed, and the names of the others."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one stage of a test."""
        self.passed += report.passed and report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2])


def run(case: PartRun) -> None:
    """Run the tests in this process; their engines have processes of their own."""
    for name, draft_tokens in (("runner", 0), ("runner_of_drafts", 4)):
        config = GenerationConfig(max_rollouts=1, draft_tokens=draft_tokens, engine=case.engine_arguments)
        vllm_config = engine_arguments(case.model, config, max_model_len=64).create_engine_config()
        case.note(**{name: "V2" if vllm_config.use_v2_model_runner else "V1"})
    os.environ.update(WHOLE_FLOAT32)
    options = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str(_FOLDER)]
    options += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not long"]
    options += [word for setting in _SETTINGS for word in ("-o", setting)]
    outcomes = _Outcomes()
    code = pytest.main([*options, *(str(_FOLDER / name) for name in _FILES)], plugins=[outcomes])
    case.note(tests_passed=outcomes.passed)
    case.require(not outcomes.failed, f"{len(outcomes.failed)} tests fail: {', '.join(outcomes.failed)}")
    case.require(code == pytest.ExitCode.OK and outcomes.passed > 0, f"pytest ended with {code!r}")
