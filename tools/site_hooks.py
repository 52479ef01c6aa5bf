"""What mkdocs calls while it makes the site: the programs in examples/ are pages, and each mention of one leads there.

Links of the navigation to a part of a page are checked, which mkdocs does not do.
"""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File  # type: ignore[import-not-found,unused-ignore]

_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_MENTION = re.compile(r"(?<!\[)`examples/(\w+)\.py`")
_LIST = """# Examples

Programs that run as they stand, in a checkout: `python examples/NAME.py`.

| program | what it shows |
| --- | --- |
"""


def on_files(files: Any, config: Any) -> None:
    """Adds a page for each program, and one that lists them."""
    listed = _LIST
    for path in sorted(_EXAMPLES.glob("*.py")):
        code = path.read_text(encoding="utf-8")
        words = (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0].replace("|", "\\|")
        listed += f"| [`{path.name}`]({path.stem}.md) | {words} |\n"
        text = f"# {path.name}\n\n```python\n{code}```\n"
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
    files.append(File.generated(config, "examples/index.md", content=listed))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Makes each mention of a program a link to its page."""
    return _MENTION.sub(r"[\g<0>](examples/\1.md)", markdown)


def on_page_context(_: Any, page: Any, nav: Any, **_more: Any) -> None:
    """Warns of links of the navigation to parts that their pages lack; all pages are rendered by now."""
    if page.is_homepage:
        pages = {entry.url: entry.content for entry in nav.pages}
        for link in (child for item in nav.items for child in item.children or () if child.is_link):
            url, _, part = link.url.partition("#")
            if f'id="{part}"' not in (pages.get(url) or ""):
                logging.getLogger("mkdocs.site_hooks").warning("mkdocs.yml: %s leads nowhere", link.url)
