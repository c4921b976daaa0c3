"""The keys of `gspo replay --with`: which can act on a replay, and why each of the others cannot.

A replay trains logged rollouts. Keys that decide rollouts, rewards and advantages act before the log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gspo.common.bounded_yaml import load_yaml
from gspo.common.config.loading import key_value, parse_config
from gspo.common.config.reference import explain, section_at
from gspo.common.config.schema import Config
from gspo.common.errors import ConfigError, InputError, in_yaml, nearest

OPTION = "--with"
_SAMPLING = "decides how rollouts are sampled, and a replay takes them from the log"
_BATCH = "decides which rollouts a step has, and a replay takes them from the log"
_ASSEMBLY = "acts before a step is logged: the log has its masks and penalties"
_MEASURES = "only measures along the way, and changes no step"
_AFTER = "acts after a version is made, and a replay only makes versions"
_SERVED = "is of the teacher's server, whose log-probs the log has"
# Key or section -> why it cannot act on a replay; the longest name that fits counts.
_WITHOUT_EFFECT = {
    "name": "names the run, and a replay is of that run",
    "seed": "decides prompts, samples and the order of a step, which the log has",
    "placement": "places generators beside the learner, and a replay has none",
    "generation": _SAMPLING,
    "sampling": _SAMPLING,
    "data": _SAMPLING,
    "environment": _SAMPLING,
    "gateway": _SAMPLING,
    "agent": _SAMPLING,
    "staleness": _BATCH,
    "reward": "decides rewards, and a replay takes them from the log; `gspo reward try` scores answers of the log",
    "evaluation": _AFTER,
    "rules": "judges what a step has shown, and changes none",
    "tracking": _AFTER,
    "run": _AFTER,
    "services": "is of services and their network, and a replay starts none",
    "algorithm.preset": "only sets defaults, and the run's config.yaml has every key: set the keys that it means",
    **dict.fromkeys(
        (
            *("algorithm.rollout_batch_size", "algorithm.num_return_sequences_in_group", "algorithm.prompt_length"),
            *("algorithm.response_length", "algorithm.rollout_length", "algorithm.filter_zero_spread"),
            "algorithm.max_refill",
        ),
        _BATCH,
    ),
    **dict.fromkeys(
        (
            *("algorithm.mask_truncated", "algorithm.mask_truncated_completions", "algorithm.overlong_buffer"),
            *("algorithm.overlong_penalty", "teacher.alone"),
        ),
        _ASSEMBLY,
    ),
    "teacher.address": _SERVED,
    "teacher.model": _SERVED,
    "teacher.timeout_s": _SERVED,
    "learner.mismatch_every": _MEASURES,
    "learner.clip_split_every": _MEASURES,
}
# Keys of mini-batches and advantages, which a replay can make anew from the logged rewards.
_REASSEMBLED = (
    *("algorithm.adv_estimator", "algorithm.num_mini_batches", "algorithm.reward_norm", "algorithm.reward_shift"),
    *("algorithm.reward_scale", "algorithm.reward_clip"),
)
# Keys that change the rounding of the same update, or its speed.
_ROUNDING = (
    *("learner.dtype", "learner.micro_batch_tokens", "learner.packing", "learner.gradient_checkpointing"),
    *("learner.zero_stage", "learner.offload", "learner.ranks", "learner.sequence_ranks", "learner.rank_timeout_s"),
    *("learner.torch_compile", "learner.threads", "learner.deepspeed", "learner.bfloat16_states"),
)
# Keys that say where the same files are, and how they may be read.
_PLACES = ("model", "teacher.path", "teacher.trust_remote_code", "teacher.allow_pickle")
# Adapters of another shape have no part in a checkpoint.
SHAPES = ("learner.lora.rank", "learner.lora.target_modules")
_SCHEDULE = "run.total_steps"
# Key -> what follows it in each step; the others of a step are those on record.
_HYPERPARAMETERS = {
    "learner.learning_rate": "learning_rate",
    "learner.schedule": "learning_rate",
    "learner.warmup_steps": "learning_rate",
    _SCHEDULE: "learning_rate",
    "learner.weight_decay": "weight_decay",
    "learner.max_grad_norm": "max_grad_norm",
    "learner.micro_batch_tokens": "micro_batch_tokens",
    "learner.gradient_checkpointing": "gradient_checkpointing",
}


@dataclass(frozen=True)
class ChangedKeys:
    """The keys of `--with`, which are valid and can act.

    Attributes:
        values: Name of the key -> (recorded value, value of the replay).
        config: The run's configuration with them.
    """

    values: Mapping[str, tuple[Any, Any]]
    config: Config

    @property
    def trains_otherwise(self) -> bool:
        """Whether one of them makes another update, and does not only round it or find its files."""
        return any(not _fits(name, _ROUNDING) and not _fits(name, _PLACES) for name in self.values)

    @property
    def rounding(self) -> list[str]:
        return [name for name in self.values if _fits(name, _ROUNDING)]

    @property
    def configured(self) -> list[str]:
        """The hyperparameters of each step that follow the configuration, not the record."""
        return sorted({_HYPERPARAMETERS[name] for name in self.values if name in _HYPERPARAMETERS})

    @property
    def reassembles(self) -> bool:
        """Whether mini-batches and advantages are made anew, from the logged rewards."""
        return any(name in _REASSEMBLED for name in self.values)

    def lines(self) -> list[str]:
        """A line for each: its name with both values."""
        return [f"{name}: {in_yaml(before)} -> {in_yaml(after)}" for name, (before, after) in self.values.items()]


def change_keys(recorded: Mapping[str, Any], run_dir: Path, settings: Sequence[str]) -> ChangedKeys:
    """Lay KEY=VALUE settings over the keys of a run's config.yaml.

    Raises:
        InputError: A setting is not a key, cannot act on a replay, or breaks a rule of the configuration.
    """
    before = parse_config(dict(recorded), run_dir, source=str(run_dir))
    keys = _copy(recorded)
    names = [_lay_over(keys, setting) for setting in settings]
    config = parse_config(keys, Path.cwd(), source=OPTION, is_stored=True)
    values = {name: (key_value(before, name), key_value(config, name)) for name in names}
    for name, (old, new) in values.items():
        if old == new:
            raise InputError(f"{OPTION} {name}", f"{in_yaml(new)} is its value in this run", "Give another value")
        if owner := config.missing_owner(name):
            raise InputError(f"{OPTION} {name}", owner.rule, owner.fix)
    return ChangedKeys(values, config)


def _copy(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, Mapping) else value for name, value in keys.items()}


def _lay_over(keys: dict[str, Any], setting: str) -> str:
    """Set one KEY=VALUE; returns the key."""
    name, equals, text = setting.partition("=")
    if not equals:
        raise InputError(f"{OPTION} {setting}", "is not KEY=VALUE", f"For example {OPTION} algorithm.pg_clip_high=1e-3")
    known = {key.name for key in explain()}
    if name not in known:
        raise InputError(f"{OPTION} {name}", "is not a key", nearest(name, known))
    if reason := _reason_without_effect(name, keys):
        raise InputError(f"{OPTION} {name}", f"cannot change a replay: it {reason}", "Leave it out")
    try:
        value = _number_or(load_yaml(text))
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(
            f"{OPTION} {name}", f"{text} is not YAML", "Quote it for the shell, as 'KEY=[a, b]'"
        ) from error
    section, _, last = name.rpartition(".")
    _refuse_old_name(section, last, value)
    place = keys
    for part in section.split("."):
        place = place.setdefault(part, {})
    place[last] = value
    return name


def _refuse_old_name(section: str, key: str, value: Any) -> None:
    """The keys of a stored run may have such names, and a setting of today may not."""
    if model := section_at(section):
        try:
            model.refuse_old_names({key: value})
        except ConfigError as error:
            raise error.as_input_error(f"{OPTION} {section}") from error


def _number_or(value: Any) -> Any:
    """A number that YAML 1.1 takes for a text, such as 1e-3, as a number."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _reason_without_effect(name: str, keys: Mapping[str, Any]) -> str:
    if name == _SCHEDULE:
        is_used = keys.get("learner", {}).get("schedule", "constant") != "constant"
        return "" if is_used else "ends the run, and learner.schedule constant does not depend on it"
    fitting = [prefix for prefix in _WITHOUT_EFFECT if _fits(name, (prefix,))]
    return _WITHOUT_EFFECT[max(fitting, key=len)] if fitting else ""


def _fits(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
