"""Sends the figures of a run to a tracker: `python -m gspo.tracking RUN_DIR tensorboard|wandb`.

Each tracker has its own process, so a slow, hanging or crashed one delays neither the training nor the other tracker.
The learner starts the process and closes its standard input at the end of the run; all records until then are sent.
The process may be killed at any time, because everything it sends is in the run directory.
"""

import argparse
import sys
import threading
from pathlib import Path

import structlog

from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import EXIT_FAILED, InputError, exit_bad_input
from gspo.common.service.logs import set_up_logs
from gspo.tracking.follower import Follower, Tracker, TrackerPosition

POLL_S = 1.0
log = structlog.get_logger()


def main() -> None:
    """Follow the run until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m gspo.tracking", description="Send a run's figures to a tracker.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("tracker", choices=("tensorboard", "wandb"))
    options = parser.parse_args()
    try:
        config = read_config(options.run_dir / CONFIG_NAME)
    except InputError as error:
        exit_bad_input(error)
    set_up_logs(config.services.log_level, service="tracking", name=options.tracker, run=config.name)
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    try:
        follow(options.run_dir, options.tracker, config, ended)
    except Exception as error:
        log.exception("tracker_failed", reason=f"{type(error).__name__}: {error}")
        sys.exit(EXIT_FAILED)


def follow(run_dir: Path, name: str, config: Config, ended: threading.Event) -> None:
    """Send all records, and new ones as they come, until `ended`; then the rest."""
    position = TrackerPosition.read(run_dir, name)
    tracker = open_tracker(run_dir, name, config, position)
    try:
        follower = Follower(run_dir, config, tracker, position)
        log.info("tracking", sent=position.num_sent)
        while not ended.is_set():
            follower.send_new()
            ended.wait(POLL_S)
        follower.send_new()
    finally:
        tracker.close()


def open_tracker(run_dir: Path, name: str, config: Config, position: TrackerPosition) -> Tracker:
    """The tracker of that name; its library is imported here and nowhere else."""
    if name == "tensorboard":
        from gspo.tracking.tensorboard import TensorBoard

        return TensorBoard(run_dir, config, position)
    from gspo.tracking.weights_and_biases import WeightsAndBiases

    return WeightsAndBiases(run_dir, config, position)


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main()
