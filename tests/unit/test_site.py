"""The documentation site's sources: every page is in the navigation once, and every link's anchor is a heading.

`make docs` builds the site with the same checks; this needs no mkdocs.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.repository.source_files import ROOT, fail_with, place, text_of

TOP_PAGES = [ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "README", "SECURITY")]
PAGES = [*TOP_PAGES, *sorted(ROOT.glob("docs/**/*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages_of(navigation: list[Any] | str) -> list[str]:
    """The pages of the navigation, sections within each other."""
    if isinstance(navigation, str):
        return [navigation]
    return [page for entry in navigation for part in entry.values() for page in pages_of(part)]


@cache
def anchors(page: Path) -> set[str]:
    """The anchor of each heading, as GitHub and the site form it."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def missing_anchors(page: Path) -> list[str]:
    """The links of a page to a heading that is not there."""
    links = re.findall(r"\]\(([^)\s#]*\.md)?#([^)\s]+)\)", FENCED.sub("", text_of(page)))
    return [f"{file}#{anchor}" for file, anchor in links if anchor not in anchors(page.parent / file if file else page)]


def test_every_page_is_in_the_navigation_once() -> None:
    counts = Counter(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    within_docs = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page not in TOP_PAGES}
    assert counts == Counter({*within_docs, *(page.name for page in TOP_PAGES)})


def test_links_lead_to_headings() -> None:
    fail_with(
        f"{place(page, link)}: no heading for {link}: name one that is there"
        for page in PAGES
        for link in missing_anchors(page)
    )


def test_a_link_to_no_heading_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Here, and there\n```\n# not a heading\n```\n")
    (tmp_path / "a.md").write_text("[x](b.md#here-and-there) [y](b.md#not-a-heading) [z](#none)\n")
    assert missing_anchors(tmp_path / "a.md") == ["b.md#not-a-heading", "#none"]


def test_the_reference_has_every_module_of_gspo_core() -> None:
    named = re.findall(r"^::: gspo_core\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.stem for path in (ROOT / "gspo_core").glob("*.py") if path.stem != "__init__")
