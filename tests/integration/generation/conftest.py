"""One vLLM engine for the tests of this folder: it takes half a minute to start.

Its tests share the session's event loop, to which an engine belongs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gspo.common.config.engines import GenerationConfig
from gspo.common.host.machine import CACHE_ARGUMENT, GIB, SHARE_ARGUMENT, torch_is_for_cpus
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from tests.support.tiny_model import make_tiny_model
from tests.support.weights import store_tied_head

# A GPU has other engines too, where the part `requests` of `make gpu-test` runs these tests.
_ENGINE: dict[str, Any] = (
    {} if torch_is_for_cpus() else {SHARE_ARGUMENT: 0.05, CACHE_ARGUMENT: GIB, "enforce_eager": True}
)


@dataclass(frozen=True)
class SharedEngine:
    """An engine, the weights it stages, and the model folders of the versions it has served, the newest last."""

    engine: Engine
    copies: PolicyCopies
    folders: list[Path]

    @property
    def folder(self) -> Path:
        """The model folder of the version that serves."""
        return self.folders[-1]


@asynccontextmanager
async def running_engine(root: Path, **generation: Any) -> AsyncIterator[SharedEngine]:
    """An engine with a small peaked policy, which ends with the block.

    Its file also holds the tied output layer, as published Qwen3 models' do; the files of later versions do not.
    """
    folder = store_tied_head(make_tiny_model(root, seed=1, scale=4.0))
    copies = PolicyCopies.from_folder(folder, "float32")
    keys = GenerationConfig(max_rollouts=64, kv_cache_gb=0.25, engine=_ENGINE, **generation)
    engine = await Engine.start(engine_arguments(folder, keys, max_model_len=512))
    yield SharedEngine(engine, copies, [folder])
    await engine.stop()
    copies.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def generator(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedEngine]:
    async with running_engine(tmp_path_factory.mktemp("policy")) as shared:
        yield shared
