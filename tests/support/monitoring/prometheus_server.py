"""A Prometheus of a test's own: Debian's program with the project's configuration, and a file for DNS."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

ROOT = Path(__file__).parents[3]
_DEPLOYED = ROOT / "deploy/prometheus"


def _with_quick_rules(file: Path, folder: Path) -> Path:
    """A copy of a file of rules that are evaluated once a second: a short run is over before their own interval is."""
    rules = yaml.safe_load(file.read_text())
    copy = folder / file.name
    copy.write_text(yaml.safe_dump({"groups": [group | {"interval": "1s"} for group in rules["groups"]]}))
    return copy


class Prometheus:
    """One server; it looks at its targets once a second."""

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir()
        self._targets = folder / "targets.json"
        self._targets.write_text("[]")
        config = yaml.safe_load((_DEPLOYED / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(_with_quick_rules(file, folder)) for file in _DEPLOYED.glob("rules/*.yml")]
        files = [{"files": [str(self._targets)], "refresh_interval": "1s"}]
        config["scrape_configs"] = [{"job_name": "gspo", "file_sd_configs": files}]
        (folder / "alertmanagers.yml").write_text("[]")
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{port}"
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
        self._process = subprocess.Popen(command)
        self._until_ready()

    @retry(
        retry=retry_if_exception_type(httpx.HTTPError), stop=stop_after_delay(20), wait=wait_fixed(0.1), reraise=True
    )
    def _until_ready(self) -> None:
        httpx.get(f"{self.url}/-/ready", trust_env=False).raise_for_status()

    def scrape(self, targets: Mapping[str, str]) -> None:
        """Look at these addresses from now on, each of a service."""
        written = [{"targets": [address], "labels": {"job": job}} for address, job in sorted(targets.items())]
        unfinished = self._targets.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(written))
        unfinished.rename(self._targets)

    def query_range(self, query: str, began_unix_s: float, ended_unix_s: float) -> list[dict[str, Any]]:
        """Series with their values, one a second, as a panel of Grafana asks for them.

        Raises:
            AssertionError: Prometheus refuses the query.
        """
        asked: dict[str, str | float] = {"query": query, "start": began_unix_s, "end": ended_unix_s, "step": 1}
        reply = httpx.get(f"{self.url}/api/v1/query_range", params=asked, trust_env=False).json()
        assert reply["status"] == "success", (query, reply)
        found: list[dict[str, Any]] = reply["data"]["result"]
        return found

    def alertmanagers(self) -> list[str]:
        """Where it sends alerts to: URLs."""
        reply = httpx.get(f"{self.url}/api/v1/alertmanagers", trust_env=False).raise_for_status().json()
        return [found["url"] for found in reply["data"]["activeAlertmanagers"]]

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(10)
