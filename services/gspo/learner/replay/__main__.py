"""Make the logged steps of a replay's folder again: `python -m gspo.learner.replay FOLDER CONFIG --last 20`.

`gspo replay` fills the folder and starts this. It needs no Redis and no other service. The end of its standard input
asks it to stop after the present step; so it also stops when the command that started it is gone.
"""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

import structlog

from gspo.common.config.loading import read_config
from gspo.common.errors import EXIT_FAILED, EXIT_START_AGAIN, InputError, StartAgainError, exit_bad_input
from gspo.common.host.process_tuning import importing, keep_freed_memory, wait_shortly
from gspo.common.model.files import model_folder
from gspo.common.service.logs import set_up_logs
from gspo.learner.check import check_training
from gspo.learner.ranks.launcher import end_with_launcher, is_launched, launch, own_rank

_MODULE = "gspo.learner.replay"
_READ_BYTES = 4096


def main() -> None:
    """Make the steps, on as many ranks as the configuration has."""
    wait_shortly()
    keep_freed_memory()
    arguments = _parser().parse_args()
    try:
        config = read_config(arguments.folder / arguments.config)
        set_up_logs(config.services.log_level, service="learner", name="replay", run=config.name)
        if is_launched():
            end_with_launcher()
            structlog.contextvars.bind_contextvars(rank=own_rank())
        check_training(config)
    except InputError as error:
        exit_bad_input(error)
    if not is_launched() and config.learner.ranks > 1:
        sys.exit(launch(config, sys.argv[1:], _MODULE))
    with importing():
        from gspo.learner.ranks.process_group import left_at_end
        from gspo.learner.replay.replayer import make_steps
        from gspo.learner.training.rank_control import RankZero, follow_rank_zero
        from gspo.learner.training.trainer_api import NotFiniteError

    try:
        model = model_folder(config.model)
        with left_at_end():
            if own_rank():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with rank zero
                follow_rank_zero(config, model, arguments.folder)
                return
            make_steps(
                config,
                model,
                arguments.folder,
                arguments.last,
                RankZero,
                _asked_to_stop().is_set,
                configured=arguments.configured,
                reassembled=arguments.reassembled,
            )
    except InputError as error:
        exit_bad_input(error)
    except StartAgainError:
        sys.exit(EXIT_START_AGAIN)
    except NotFiniteError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_FAILED)


def _asked_to_stop() -> threading.Event:
    """Set once the standard input ends or SIGTERM comes."""
    event = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: event.set())

    def wait_for_end() -> None:
        while os.read(0, _READ_BYTES):
            pass
        event.set()

    threading.Thread(target=wait_for_end, daemon=True, name="standard-input").start()
    return event


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description="Makes logged steps again.")
    parser.add_argument("folder", type=Path, help="the replay's folder, with the step files in log/")
    parser.add_argument("config", help="name of the configuration in that folder")
    parser.add_argument("--last", type=int, required=True, help="the last step to make")
    parser.add_argument("--configured", nargs="*", default=(), help="hyperparameters that the configuration decides")
    parser.add_argument("--reassembled", action="store_true", help="make mini-batches and advantages anew")
    return parser


if __name__ == "__main__":
    main()
