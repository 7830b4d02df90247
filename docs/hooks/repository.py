"""Makes links of the pages that lead out of docs/ valid on the site, too.

In a checkout ``../CONTRIBUTING.md`` and ``../benchmarks/results/x.json`` are files. The site gets a
page of the one and a copy of the other.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
LINK = re.compile(r"!?\[([^\]]*)\]\((?!#)[^)\s]+\)")
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the files to which pages link, and the pages that lie beside docs/."""
    for name in PAGES:
        # Their links are relative to the root of the checkout.
        text = (ROOT / name).read_text("utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    for page in list(files.documentation_pages()):
        for path, _anchor in OUTSIDE.findall(page.content_string):
            path = posixpath.normpath(path)
            if path in PAGES or files.get_file_from_path(_on_site(path)) is not None:
                continue
            if not (ROOT / path).is_file():
                raise FileNotFoundError(f"{page.src_uri} links to ../{path}, which is no file")
            source: dict[str, Any] = {"abs_src_path": str(ROOT / path)}
            if path.endswith(".md"):  # its links would lead to files that the site does not have
                source = {"content": LINK.sub(r"\1", (ROOT / path).read_text("utf-8"))}
            place = _on_site(path)
            files.append(
                File.generated(config, place, **source, inclusion=InclusionLevel.NOT_IN_NAV)
            )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links lead to these copies."""
    return OUTSIDE.sub(lambda link: f"]({_on_site(link[1])}{link[2] or ''})", markdown)


def _on_site(path: str) -> str:
    path = posixpath.normpath(path)
    return path if path in PAGES else f"repository/{path}"
