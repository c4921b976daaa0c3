"""What a copy of the registry on disk holds, without a Redis: what a run that has not started will find."""

from __future__ import annotations

from pathlib import Path

from gspo.common.errors import nearest
from gspo.reward.registry.disk import DiskCopy
from gspo.reward.registry.records import RETIRED, Content, NotRegisteredError, parse_name, read_content


class OfflineRegistry:
    """The copy in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._disk = folder, DiskCopy(folder)

    async def resolve(self, name: str, version: str = "") -> Content:
        """As `Registry.resolve`.

        Raises:
            NotRegisteredError: There is no such name or version here, or it cannot be read.
        """
        texts = self._disk.read_names()
        if name not in texts:
            hint = nearest(name, texts) if texts else "Nothing is registered there."
            raise NotRegisteredError(f"there is no reward function '{name}' in {self._folder}. {hint}")
        found = parse_name(name, texts[name])
        whole = found.find(version) if version else found.active
        text = self._disk.read_content(whole) if whole else None
        if text is None:
            raise NotRegisteredError(RETIRED.format(name=name) if not whole else f"there is no version {whole[:12]}")
        return read_content(whole, text)
