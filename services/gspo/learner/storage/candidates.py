"""`candidates/` in the run directory: versions whose evaluations are not over.

`step-N` is a whole model, which may become best/. `unmeasured-N` has the weights alone, of a version whose evaluations
a stop ended.
"""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

import structlog
from safetensors import SafetensorError
from safetensors.torch import load_file

from gspo.common.errors import InputError
from gspo.common.model.files import weight_files
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.shares.rank_share import write_tensors
from gspo.learner.storage.durable_files import temporary
from gspo.learner.training.trainer_api import NotFiniteError

CANDIDATES = "candidates"
_MODEL, _WEIGHTS = "step", "unmeasured"
WriteShare: TypeAlias = Callable[[int, Path], None]
log = structlog.get_logger()


def candidate_folder(run_dir: Path, version: int) -> Path:
    """The whole model of a version. Step s makes version s."""
    return run_dir / CANDIDATES / f"{_MODEL}-{version:06d}"


def save_unmeasured(run_dir: Path, weights: PolicyWeights, write_share: WriteShare) -> None:
    """Keep the weights of a version, whole or not at all, unless its whole model is kept.

    Args:
        write_share: Writes the tensors of a version that other ranks own.
    """
    folder = _unmeasured_folder(run_dir, weights.version)
    if folder.exists() or candidate_folder(run_dir, weights.version).exists():
        return
    unfinished = temporary(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_tensors(weights, unfinished, 0)
    write_share(weights.version, unfinished)
    unfinished.rename(folder)


def read_unmeasured(run_dir: Path, version: int, digest: str) -> PolicyWeights | None:
    """The weights of a version that `candidates/` has; None without them, or with others than the digest's."""
    for folder in (candidate_folder(run_dir, version), _unmeasured_folder(run_dir, version)):
        if not folder.exists():
            continue
        try:
            tensors = {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}
            weights = weights_from(version, tensors, digest)
        except (OSError, SafetensorError, InputError, NotFiniteError, ValueError) as error:
            log.warning("unmeasured_version_lost", version=version, folder=str(folder), reason=str(error))
            continue
        if weights.digest_on_record == digest:
            return weights
        log.warning("unmeasured_version_lost", version=version, folder=str(folder), reason="it has another digest")
    return None


def keep_only(run_dir: Path, versions: Collection[int]) -> None:
    """Remove the folders of all other versions, and unfinished ones."""
    kept = {folder(run_dir, version) for folder in (candidate_folder, _unmeasured_folder) for version in versions}
    for path in list((run_dir / CANDIDATES).glob("*")):
        if path not in kept:
            shutil.rmtree(path)


def forget_unmeasured(run_dir: Path, version: int) -> None:
    """The evaluations of a version are over."""
    shutil.rmtree(_unmeasured_folder(run_dir, version), ignore_errors=True)


def _unmeasured_folder(run_dir: Path, version: int) -> Path:
    return run_dir / CANDIDATES / f"{_WEIGHTS}-{version:06d}"
