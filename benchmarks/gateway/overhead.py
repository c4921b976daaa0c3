"""The section `gateway`: what gspo's gateway and generator cost beside vLLM's own server, for streamed chats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from statistics import median
from typing import Any

import pandas as pd

from benchmarks.gateway.two_servers import Load, both_servers, measured_round
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table
from benchmarks.harness.workload import make_model, num_parameters, write_config
from gspo.common.config.loading import read_config

# Widths and layers of the models: the one of this page, and one with longer steps, beside which a server costs less.
MODELS = {"small": (256, 4), "large": (512, 8)}
LOADS = (Load(clients=1, requests=3, tokens=128), Load(clients=16, requests=1, tokens=128))
PAIRS = 9
_TEXT = """
Streamed chats at temperature 1, of {tokens} tokens each, from `vllm serve` and from the gateway with one generator. \
Both servers have the same model, engine arguments and threads, and stay up; rounds alternate between them. The first \
round of each warms up. A row has the median over {pairs} pairs of rounds of the ratio and of the difference within a \
pair, with the smallest and largest ratio.

`vllm serve` sends each token by itself, and no log-probs. gspo samples with log-prob and version of each token, sends \
the first token at once, and the others every 50 ms.

{rows}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Each model with each number of clients; quick: the first model, and two pairs."""
    pairs = 2 if effort.quick else PAIRS
    for name in list(MODELS)[: 1 if effort.quick else None]:
        yield Measurement(name, _measure, (name, pairs))


def _measure(name: str, pairs: int) -> Record:
    width, layers = MODELS[name]
    model = make_model(f"model-gateway-{name}", hidden_size=width, layers=layers, ends=False)
    sections: dict[str, Any] = {"model": {"path": str(model)}, "gateway": {"replicas": 1}}
    config = read_config(write_config(f"gateway-{name}", "fixed", "float32", **sections))
    rounds = asyncio.run(_alternate(config, pairs))
    return {"model": name, "parameters": num_parameters(model), "rounds": rounds}


async def _alternate(config: Any, pairs: int) -> list[Record]:
    """Rounds of each load in pairs, each server first in every other pair; the warm-up is left out."""
    rounds: list[Record] = []
    async with both_servers(config) as servers:
        for load in LOADS:
            for pair in range(-1, pairs):
                for kind in sorted(servers, reverse=bool(pair % 2)):
                    measured = await measured_round(servers[kind], load, pair)
                    if pair >= 0:
                        rounds.append({"clients": load.clients, "pair": pair, "server": kind, **measured})
    return rounds


def text(results: Results) -> str:
    """Rates and times to the first text of both, and their ratios and differences."""
    frame = pd.json_normalize(results["gateway"], "rounds", ["model", "parameters"])
    frame["first_ms"] = frame.first_s.map(median) * 1e3
    by_pair = frame.pivot_table(
        index=["parameters", "clients", "pair"], columns="server", values=["tokens_per_s", "first_ms"]
    )
    rates, first_ms = by_pair["tokens_per_s"], by_pair["first_ms"]
    by_pair["ratio", ""], by_pair["late_ms", ""] = rates.gspo / rates.vllm, first_ms.gspo - first_ms.vllm
    groups = by_pair.groupby(level=["parameters", "clients"])
    medians, least, most = groups.median(), groups.ratio.min(), groups.ratio.max()
    names = [f"{parameters / 1e6:.1f} M parameters, {clients} clients" for parameters, clients in medians.index]
    return _TEXT.format(
        tokens=LOADS[0].tokens,
        pairs=frame.pair.nunique(),
        rows=table(
            ("", [name.replace(" 1 clients", " 1 client") for name in names], ""),
            ("vLLM, tokens/s", medians["tokens_per_s", "vllm"], ",.0f"),
            ("gspo, tokens/s", medians["tokens_per_s", "gspo"], ",.0f"),
            ("ratio", medians["ratio"], ".2f"),
            ("least", least, ".2f"),
            ("most", most, ".2f"),
            ("first text of vLLM, ms", medians["first_ms", "vllm"], ".1f"),
            ("later with gspo, ms", medians["late_ms"], "+.1f"),
        ),
    )


GATEWAY = PageSection("gateway", "The gateway beside vLLM's server", measurements, text)
