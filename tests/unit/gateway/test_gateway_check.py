"""The gateway's check of its model, also where a container starts it and `gateway.replicas` is 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.common.errors import InputError
from gspo.gateway.check import check
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model, make_tokenizer


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    model, tokenizer = make_tiny_model(tmp_path / "model"), make_tokenizer()
    config = make_run(tmp_path, model)
    check(config)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(model)
    with pytest.raises(InputError, match=r"^model\.path: .* has no chat template"):
        check(config)
