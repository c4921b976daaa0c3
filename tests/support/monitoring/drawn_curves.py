"""The curves in a page of one file."""

from __future__ import annotations

import json
import re
from typing import Any


def drawn_curves(page: str) -> dict[str, dict[str, Any]]:
    """The curves that a page draws, by name."""
    data = re.search(r'<script type="application/json" id="curves-data">(.*?)</script>', page)
    assert data is not None
    return {curve["name"]: curve for curve in json.loads(data[1])}
