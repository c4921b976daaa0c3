"""The memory of generators that `gspo scale` adds to a run without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.cli.run import scaling
from gspo.cli.run.scaling import check_memory
from gspo.common.errors import InputError
from tests.support.service_process import make_run


def test_more_generators_than_memory_for_their_caches_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "free_memory", lambda: 5.5 * 2**30)
    config = make_run(tmp_path, tmp_path, generation={"replicas": 6, "kv_cache_gb": 2.0})
    check_memory(config, 2)
    words = r"generation=6: 3 more take 6\.0 GiB .*kv_cache_gb: 2\), and 5\.5 GiB are free\. Set at most generation=5"
    with pytest.raises(InputError, match=words):
        check_memory(config, 3)
