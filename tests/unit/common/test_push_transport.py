"""What is refused of `learner.push_transport`, and what is warned of, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.common import push_transport
from services.common.errors import InputError
from services.common.push_transport import check_push_transport, warn_of_open_road
from services.generation.check import check as generation_check
from services.learner.check import check as learner_check
from tests.service_process import make_run
from tests.tiny_model import make_tiny_model


@pytest.mark.parametrize(("check", "service"), [(learner_check, "learner"), (generation_check, "generation")])
def test_nccl_without_a_gpu_is_refused_by_each_service(tmp_path: Path, check: object, service: str) -> None:
    config = make_run(tmp_path, make_tiny_model(tmp_path / "model"), learner={"push_transport": "nccl"})
    with pytest.raises(InputError) as refused:
        check(config)
    assert refused.value.where == "learner.push_transport"
    assert f"nccl needs a GPU of its own for the {service} service" in refused.value.rule
    assert refused.value.fix == "Set it to grpc or gloo, or give the service a GPU"


def test_what_can_be_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for transport in ("grpc", "gloo"):
        check_push_transport(make_run(tmp_path, tmp_path, learner={"push_transport": transport}), "learner")
    monkeypatch.setattr(push_transport, "visible_gpus", lambda: [80 << 30])
    check_push_transport(make_run(tmp_path, tmp_path, learner={"push_transport": "nccl"}), "learner")


@pytest.mark.parametrize(("transport", "tls", "warned"), [("gloo", True, 1), ("gloo", False, 0), ("grpc", True, 0)])
def test_weights_in_the_open_beside_encrypted_calls_are_warned_of(
    tmp_path: Path, transport: str, tls: bool, warned: int
) -> None:
    given = {"tls": {"cert": "cert.pem", "key": "key.pem"}} if tls else {}
    config = make_run(tmp_path, tmp_path, learner={"push_transport": transport}, services=given)
    with capture_logs() as logs:
        warn_of_open_road(config)
    assert [entry["event"] for entry in logs] == ["weights_in_plain_text"] * warned
