"""The configuration that a user writes. Keys that it leaves to the device are filled in before a run starts.

A run's own config.yaml holds every key, so the processes of a run never ask their device for one.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.cli.rundir.gpu_defaults import CHECKPOINTING, COMPUTED, ENGINE, ENGINE_ARGUMENTS, MICRO_BATCH, gpu_defaults
from gspo.common.config.loading import check_ranks, key_value, parse_config, read_mapping
from gspo.common.config.reference import explain
from gspo.common.config.schema import Config
from gspo.common.errors import in_yaml
from gspo.common.host.machine import describe_device, visible_gpus, vllm_for_gpus
from gspo.common.streams.keys import LEARNER, SERVICES


@dataclass(frozen=True)
class UserConfig:
    """A valid configuration as its user gave it.

    Attributes:
        keys: The keys that the user gave.
        base: Folder of the relative paths in them.
        source: Where they come from, for messages.
        for_cpus: The configuration with the defaults of CPUs.
    """

    keys: Mapping[str, Any]
    base: Path
    source: str
    for_cpus: Config

    @property
    def left_out(self) -> list[str]:
        """The keys whose default follows from the device, and that the user has not set; null sets nothing."""
        return _left_out(self.keys, [key.name for key in explain() if key.on_gpus is not None])

    def for_device(self, services: Sequence[str] = SERVICES) -> Config:
        """The configuration with the defaults of this machine.

        Args:
            services: The services that are started.

        Raises:
            InputError: CUDA_VISIBLE_DEVICES names a GPU that is not there, or the learner has no rank.
        """
        gpus, left_out, values = visible_gpus(), self.left_out, {}
        if gpus or vllm_for_gpus():
            on_gpus = {key.name: key.on_gpus for key in explain()}
            values = {name: on_gpus[name] for name in left_out if name not in COMPUTED}
            if CHECKPOINTING in left_out:  # it saves memory, whose size may not be known
                values[CHECKPOINTING] = True
        config = self._completed(values)
        if MICRO_BATCH in left_out:
            values[MICRO_BATCH] = config.micro_batch_tokens
        if LEARNER in services:
            values |= gpu_defaults(config, left_out, gpus)
        return self._completed(values)

    def for_run(self, run: Config) -> Config:
        """The configuration for a run that has started: the keys left to the device keep the run's values.

        So do those that came after the run's start.
        """
        later = [key.name for key in explain() if key.is_kept]
        kept = [name for name in _left_out(self.keys, later) if key_value(run, name) != key_value(self.for_cpus, name)]
        values = {name: key_value(run, name) for name in [*self.left_out, *kept]}
        engine = self.for_cpus.generation.engine
        if of_run := {name: run.generation.engine[name] for name in ENGINE_ARGUMENTS if name in run.generation.engine}:
            values[ENGINE] = {**of_run, **engine}
        return self._completed(values)

    def note(self, config: Config) -> str:
        """The device and the values that follow from it, in one line; empty if there are none."""
        names = list(self.left_out)
        if config.generation.engine != self.for_cpus.generation.engine:
            names.append(ENGINE)
        values = ", ".join(f"{name}: {in_yaml(key_value(config, name))}" for name in names)
        return f"from the device ({describe_device()}): {values}" if values else ""

    def _completed(self, values: Mapping[str, Any]) -> Config:
        completed = deepcopy(dict(self.keys))
        for name, value in values.items():
            section, _, key = name.partition(".")
            completed.setdefault(section, {})[key] = value
        config = parse_config(completed, self.base, source=self.source)
        check_ranks(config)
        return config


def read_user_config(path: Path) -> UserConfig:
    """Read and validate a user's YAML file.

    Raises:
        InputError: As for `loading.read_config`.
    """
    return user_config(read_mapping(path), path.parent, source=str(path))


def user_config(keys: Mapping[str, Any], base: Path, *, source: str = "configuration") -> UserConfig:
    """Validate the keys of a user.

    Raises:
        InputError: As for `loading.parse_config`.
    """
    return UserConfig(keys, base, source, parse_config(dict(keys), base, source=source))


def _left_out(keys: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [
        name
        for name in names
        for section, _, key in [name.partition(".")]
        if (keys.get(section) or {}).get(key) is None
    ]
