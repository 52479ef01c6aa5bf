"""The site that ``make docs`` makes, as a reader clicks through it."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from nvme_ops.__main__ import COMMANDS
from tests.conftest import REPOSITORY

REPOSITORY_URL = "https://example.org/nvme_ops"


class Page:
    """The addresses, identifiers and texts of a page."""

    def __init__(self, file: Path) -> None:
        self.text = file.read_text(encoding="utf-8")
        self.links = [  # addresses and texts
            (html.unescape(link), re.sub("<[^>]*>", "", words).strip())
            for link, words in re.findall(r'<a\b[^>]*?\bhref="([^"]*)"[^>]*>(.*?)</a>', self.text, re.DOTALL)
        ]
        others = [tag for tag in re.findall(r"<(?!a\b)\w[^>]*>", self.text) if 'rel="canonical"' not in tag]
        self.loaded = [url for tag in others for url in re.findall(r'\b(?:src|href)="([^"]*)"', tag)]
        self.names = {"", *map(html.unescape, re.findall(r'\bid="([^"]*)"', self.text))}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Its pages by file."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings[python] is not installed")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        env={**os.environ, "NVME_OPS_HOME": REPOSITORY_URL, "NO_MKDOCS_2_WARNING": "1"}, cwd=REPOSITORY, check=True,
    )  # fmt: skip
    return {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}


def target(page: Path, link: str) -> tuple[Path, str]:
    """The file that a link leads to, and the part of it."""
    parts = urlsplit(link)
    file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    return (file / "index.html" if file.is_dir() else file), unquote(parts.fragment)


def test_every_link_leads_to_a_part_and_nothing_comes_from_elsewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        assert page.loaded
        assert [url for url in page.loaded if urlsplit(url).netloc] == []
        for link, _ in page.links:
            if not urlsplit(link).netloc:
                file, part = target(path, link)
                assert file.exists(), f"{path}: {link}"
                assert file not in site or part in site[file].names, f"{path}: {link}"


def test_the_navigation_has_every_command_and_the_repository(site: dict[Path, Page]) -> None:
    front = site[min(site, key=lambda file: len(file.parts))]
    assert {f"nvme-{name}" for name in COMMANDS} - {words for _, words in front.links} == set()
    assert REPOSITORY_URL in {link for link, _ in front.links}


def test_every_mention_of_a_program_leads_to_it(site: dict[Path, Page]) -> None:
    mentions = 0
    for path, page in site.items():
        for link, words in page.links:
            if name := re.fullmatch(r"examples/(\w+)\.py", words):
                mentions += 1
                (program,) = re.findall(r'"""(.*?)[."]', (REPOSITORY / words).read_text())[:1]
                assert program in site[target(path, link)[0]].text, name[1]
        assert "<code>examples/" not in re.sub(r"<a [^>]*><code>examples/", "", page.text)
    assert mentions > 8


CODE = re.compile(r"^```\w*\n(.*?)^```$|^((?: {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)


def test_code_fits_the_width_of_a_page() -> None:
    """At 1280 pixels, a page has room for 121 columns, a scroll bar beside it: ``docs/site.css``."""
    texts = {page.name: page.read_text() for page in (REPOSITORY / "docs").glob("*.md")}
    blocks = [(name, fenced or indented) for name, text in texts.items() for fenced, indented in CODE.findall(text)]
    assert len(blocks) > 50
    assert [block for block in blocks if max(map(len, textwrap.dedent(block[1]).splitlines())) > 120] == []
