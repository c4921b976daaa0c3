"""Start the gateway: `python -m gspo.gateway --run-dir DIR`."""

import os

from gspo.common.host.packages import checked_packages

with checked_packages():
    from gspo.common.host.process_tuning import importing
    from gspo.common.service.options import await_start, parse_options
    from gspo.gateway.check import check

MEANING = "Lets programs of others talk to the policy while it trains, by the APIs of OpenAI and Anthropic."


def main() -> None:
    """Check, or serve until the run ends."""
    options = parse_options("gateway", check, meaning=MEANING)
    # It renders and reads text; without this vLLM would plan a KV cache of its own.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "0")
    with importing():
        # After the options: importing vLLM takes seconds.
        from gspo.common.service.app import run_process
        from gspo.gateway.app import run_gateway

    run_process(await_start(options), run_gateway)


if __name__ == "__main__":
    main()
