"""Whether the registry has room for one more version: of its name, and in all."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.common.config.reward import RegistryQuotas
from gspo.reward.registry.records import ConflictError, Name

_MIB = 2**20


class QuotaError(ConflictError):
    """There is no room; the message says what is used, and how to make room."""


def check_quotas(quotas: RegistryQuotas, names: Sequence[Name], name: str, num_bytes: int) -> None:
    """Refuse a new version of `name` that would be beyond a quota.

    Args:
        names: Everything that is registered.
        num_bytes: Of the version's content, test cases included.

    Raises:
        QuotaError: It would be.
    """
    own = [one for one in names if one.name == name]
    _check(f"'{name}'", own, num_bytes, "versions_per_name", quotas.versions_per_name, "name_mb", quotas.name_mb)
    _check("the registry", names, num_bytes, "versions", quotas.versions, "total_mb", quotas.total_mb)


def _check(
    which: str, names: Sequence[Name], num_bytes: int, versions_key: str, max_versions: int, mb_key: str, max_mb: int
) -> None:
    origins = [origin for name in names for origin in name.versions.values()]
    used = sum(origin.num_bytes for origin in origins)
    if len(origins) >= max_versions:
        raise _full(
            f"{which} has {len(origins)} versions, and reward.quotas.{versions_key} is {max_versions}", versions_key
        )
    if used + num_bytes > max_mb * _MIB:
        held = f"{which} has {used / _MIB:.1f} MiB, this version has {num_bytes / _MIB:.1f}"
        raise _full(f"{held}, and reward.quotas.{mb_key} is {max_mb}", mb_key)


def _full(text: str, key: str) -> QuotaError:
    return QuotaError(
        f"{text}. Remove versions that are not needed (`gspo reward remove NAME VERSION`, or "
        f"DELETE /v1/rewards/NAME/versions/VERSION), or raise reward.quotas.{key}"
    )
