"""What mkdocs is told beside ``mkdocs.yml``: pages that are made, and links that leave ``docs/``.

README.md is the first page; CHANGELOG.md, CONTRIBUTING.md and SECURITY.md come along; ``reference/`` is made of the
code. A link to any other file of the repository becomes its name: a site has no sources.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FROM_ABOVE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}
"""Pages of the repository's first folder, and what they are called on the site."""
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in ``docs/``."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(Path(__file__).parent))
    import reference

    for source, name in FROM_ABOVE.items():
        files.append(File.generated(config, name, content=at_home((ROOT / source).read_text())))
    for name, make in reference.PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend the links of one page."""
    return within(markdown, page.file.src_uri)


def at_home(markdown: str) -> str:
    """Return a page of the first folder as if it lay in ``docs/``."""

    def mended(link: re.Match[str]) -> str:
        label, target, anchor = link[1], link[2], link[3] or ""
        target = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        return f"[{label}]({target}{anchor})"

    return _LINK.sub(mended, markdown)


def within(markdown: str, page: str) -> str:
    """Return a page with links to pages of the site alone; ``page`` is its path below ``docs/``."""
    here = (ROOT / "docs" / page).parent

    def mended(link: re.Match[str]) -> str:
        label, target, anchor = link[1], link[2], link[3] or ""
        path = (here / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return link[0]
        name = str(path.relative_to(ROOT))
        if name in FROM_ABOVE:
            return f"[{label}]({'../' * page.count('/')}{FROM_ABOVE[name]}{anchor})"
        return label if label == name or label.strip("`") == name else f"{label} (`{name}`)"

    return _LINK.sub(mended, markdown)
