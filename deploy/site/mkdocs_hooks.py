"""The documentation site: pages and files outside docs/ that its pages link to become part of it.

The pages are written for the repository, where README.md is above docs/. mkdocs knows one folder alone.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
# Pages above docs/, which the navigation has under their own names.
TOP_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md")
LINK = re.compile(r"(\]\()([^)\s#]+)([^)]*\))")


def on_config(config: Any) -> Any:
    """Anchors as the repository's own pages have them."""
    config.mdx_configs["toc"] = {"permalink": True, "slugify": slugify(case="lower")}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the top pages, and as plain text every other file that a page links to."""
    for name in TOP_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    linked = set()
    for page in [*(ROOT / name for name in TOP_PAGES), *sorted((ROOT / "docs").rglob("*.md"))]:
        folder = page.parent.relative_to(ROOT).as_posix()
        for _, target, _ in LINK.findall(page.read_text()):
            linked.add(repository_path(folder, target))
    for path in sorted(linked - set(TOP_PAGES)):
        if not path.startswith("docs/") and (ROOT / path).is_file():
            files.append(File.generated(config, f"files/{path}.txt", content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - given by mkdocs
    """Links within the repository become links within the site; folders become plain text."""
    own = page.file.src_uri
    folder = "" if own in TOP_PAGES else posixpath.join("docs", posixpath.dirname(own))

    def within_site(link: re.Match[str]) -> str:
        start, target, end = link.groups()
        if "://" in target:
            return link[0]
        path = repository_path(folder, target)
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif path in TOP_PAGES:
            place = path
        else:
            place = f"files/{path}.txt"
        return start + posixpath.relpath(place, posixpath.dirname(own) or ".") + end

    return LINK.sub(within_site, markdown)


def repository_path(folder: str, target: str) -> str:
    """The path within the repository of a link in a page of `folder`."""
    return posixpath.normpath(posixpath.join(folder, target))
