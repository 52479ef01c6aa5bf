"""What a user has to know about is on a page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import nvme_ops
from tests.conftest import REPOSITORY
from tests.project.test_surface import PACKAGES

OURS = re.compile(r"\b(NVME_OPS_(?!HAVE_)[A-Z_]+|NVME_BUILD_[A-Z]+)\b")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def sources() -> list[Path]:
    folders = [REPOSITORY / name for name in ("nvme_ops", "op_builder", "report", "csrc")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    return [REPOSITORY / "setup.py", *paths]


def test_every_environment_variable_is_on_its_page() -> None:
    read = {name for path in sources() for name in OURS.findall(path.read_text())}
    page = (REPOSITORY / "docs" / "environment.md").read_text()
    assert {name for name in read if f"`{name}`" not in page} == set()
    assert set(OURS.findall(page)) <= read | {"NVME_BUILD_OPS"}


def test_the_changelog_begins_with_this_version() -> None:
    begin = (REPOSITORY / "CHANGELOG.md").read_text().partition("\n\n")[2]
    assert begin.startswith(f"## {nvme_ops.__version__}\n")


def test_every_link_leads_somewhere() -> None:
    for page in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]:
        for target in LINK.findall(page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_page_on_the_architecture_names_files_that_exist() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+/[\w.]*)`", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


def test_readme_site_and_front_page_lead_to_every_page() -> None:
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")}
    readme, site, front = ((REPOSITORY / name).read_text() for name in ("README.md", "mkdocs.yml", "docs/index.md"))
    parts = set()  # pages to which benchmarks.md and api.md lead
    for whole in ("benchmarks", "api"):
        own = {name for name in pages if name.startswith(f"{whole}-")}
        assert own - set(LINK.findall((REPOSITORY / "docs" / f"{whole}.md").read_text())) == set()
        parts |= own
    missing = {name for name in pages - parts if f"docs/{name}" not in readme}
    assert missing <= {"benchmarks.md", "gpu-results.md", "index.md"}
    assert set(re.findall(r"[\w-]+\.md", site)) == pages
    assert pages - parts - set(LINK.findall(front)) == {"index.md", "environment.md"}
    assert re.search(r"^  font: false\b", site, re.MULTILINE)
    assert "://" not in site, "it takes nothing from other servers"


BESIDES = {  #: what calls return, and what few need
    *("checkpoint.background.SaveFuture", "checkpoint.background.release_memory", "data.store.Read"),
    *("memory.pool.Lease", "storage.store.StoreFuture"),
}


def test_the_reference_has_every_public_name_once_and_links_to_it() -> None:
    """A function that hides the module that it is in has to be named with it."""
    pages = (REPOSITORY / "docs").glob("api-*.md")
    listed = [(page.name, name) for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    linked = re.findall(r"\]\(([\w-]+\.md)#(\S+)\)", (REPOSITORY / "docs" / "api.md").read_text())
    assert sorted(linked) == sorted(listed)
    shown = [re.sub(r"\.(\w+)\.\1$", r".\1", name) for _, name in listed]
    assert sorted(set(shown)) == sorted(shown)
    public = set()
    for name in PACKAGES:
        package = importlib.import_module(f"nvme_ops{name}")
        hidden = {"__version__", *(other[1:] for other in PACKAGES)}
        public |= {f"{package.__name__}.{entry}" for entry in package.__all__ if entry not in hidden}
    assert public - set(shown) == set()
    others = {name for name in set(shown) - public if not name.startswith("nvme_ops.integrations.")}
    assert {name.removeprefix("nvme_ops.") for name in others} == BESIDES
