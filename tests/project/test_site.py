"""The site that ``make docs`` makes, as a reader clicks through it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from nvme_ops.__main__ import COMMANDS
from tests.conftest import REPOSITORY

REPOSITORY_URL = "https://example.org/nvme_ops"


class Page(HTMLParser):
    """The addresses, identifiers and texts of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []  # addresses and texts
        self.loaded, self.names = list[str](), {""}
        self._link, self._words = "", ""
        self.text = file.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.names.add(attributes.get("id", ""))
        if tag == "a":
            self._link, self._words = attributes.get("href", ""), ""
        elif attributes.get("rel") != "canonical":
            self.loaded += [attributes[name] for name in ("src", "href") if name in attributes]

    def handle_data(self, data: str) -> None:
        self._words += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self.links.append((self._link, self._words.strip()))


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


def front(site: dict[Path, Page]) -> tuple[Path, Page]:
    path = min(site, key=lambda file: len(file.parts))
    return path, site[path]


def test_every_link_leads_to_a_part_and_nothing_comes_from_elsewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        assert [url for url in page.loaded if urlsplit(url).netloc] == []
        for link, _ in page.links:
            if not urlsplit(link).netloc:
                file, part = target(path, link)
                assert file.exists(), f"{path}: {link}"
                assert file not in site or part in site[file].names, f"{path}: {link}"


def test_the_navigation_has_every_command_and_the_repository(site: dict[Path, Page]) -> None:
    _, page = front(site)
    assert {f"nvme-{name}" for name in COMMANDS} - {words for _, words in page.links} == set()
    assert REPOSITORY_URL in {link for link, _ in page.links}


def test_a_page_leads_to_the_next_and_can_be_dark(site: dict[Path, Page]) -> None:
    _, page = front(site)
    assert re.search(r"md-footer__link--next", page.text)
    assert set(re.findall(r'data-md-color-scheme="(\w+)"', page.text)) == {"default", "slate"}


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
