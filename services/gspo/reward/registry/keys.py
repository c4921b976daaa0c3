"""The registry's names in Redis."""

from __future__ import annotations

from dataclasses import dataclass

# Changes in Redis; each replica also appends them to a file, which is never cut.
AUDIT_KEPT = 10_000


@dataclass(frozen=True)
class RegistryKeys:
    """The keys of the registered reward functions, which all runs in one Redis share.

    No run may be called `@rewards`, so no key of a run is one of these.
    """

    prefix: str = "gspo:{@rewards}:"

    @property
    def names(self) -> str:
        """Hash name -> JSON document: kind, active version, revision, versions; retired names too."""
        return f"{self.prefix}registered"

    @property
    def content(self) -> str:
        """Hash version -> JSON document: source, entry, limits, test cases, signature; written once."""
        return f"{self.prefix}content"

    @property
    def token(self) -> str:
        """Random text that each change of the registry replaces; absent once Redis has lost it."""
        return f"{self.prefix}token"

    @property
    def audit(self) -> str:
        """List of all changes, each with its caller, the newest last."""
        return f"{self.prefix}audit"

    def usage(self, name: str, version: str) -> str:
        """Hash of one version's calls: counts by result, times by bucket, the last failure."""
        return f"{self.prefix}usage:{name}:{version}"
