"""Parameters of a model folder that the optimizer updates: all, or those of adapters (LoRA). Those of a teacher too."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gspo.common.config.engines import LoraConfig
from gspo.common.config.schema import Config
from gspo.common.model.files import ALL_LINEAR, ModelFiles, is_fused, is_stacked
from gspo.common.model.teacher_files import read_teacher_files


@dataclass(frozen=True)
class TrainedSize:
    """The size of a model that is trained: of all its parameters, and of those that the optimizer updates.

    Attributes:
        num_rounded: Those of linear layers and experts, which a frozen copy stores in the dtype of the products.
        num_bfloat16: Those of linear layers that bfloat16 has exactly, since the model's files do.
        num_teacher: Parameters of a teacher that the learner loads beside it; 0 without one.
        num_teacher_rounded: Those of its linear layers and experts, which are stored in the dtype of the products.
    """

    num_parameters: int
    num_trained: int
    num_rounded: int = 0
    num_bfloat16: int = 0
    num_teacher: int = 0
    num_teacher_rounded: int = 0


def trained_size(config: Config, files: ModelFiles) -> TrainedSize:
    """All parameters of a model folder, those that the optimizer updates, and those of the run's teacher.

    Raises:
        InputError: The teacher's folder is missing or broken.
    """
    own = num_trained(config.learner.lora, files)
    size = TrainedSize(files.num_parameters, own, _num_linear(files), files.num_bfloat16)
    if config.teacher.path is None:
        return size
    teacher = read_teacher_files(config)
    return replace(size, num_teacher=teacher.num_parameters, num_teacher_rounded=_num_linear(teacher))


def _num_linear(files: ModelFiles) -> int:
    return sum(math.prod(shape) for shape in files.linear.values())


def num_trained(lora: LoraConfig, files: ModelFiles) -> int:
    """Parameters that the optimizer updates; all of a pickle's, which is not looked into."""
    if not lora.rank or not files.linear:
        return files.num_parameters
    layers = files.linear if lora.target_modules == (ALL_LINEAR,) else layers_of(lora.target_modules, files)
    return sum(_num_of_adapter(layer, files.linear[layer], lora.rank) for layer in layers)


def _num_of_adapter(layer: str, shape: Sequence[int], rank: int) -> int:
    num_out, num_in = shape
    # Two matrices of an expert that a loaded model holds as one: an adapter of twice the rank is over both.
    return rank * (num_in + (2 if is_stacked(layer) and is_fused(layer) else 1) * num_out)


def layers_of(names: Sequence[str], files: ModelFiles) -> list[str]:
    """The layers that these names choose, by whole parts from the end as peft does."""
    return [layer for layer in files.linear if any(f".{layer}".endswith(f".{name}") for name in names)]
