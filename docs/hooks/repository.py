"""Makes links of the pages that lead out of docs/ valid on the site, too.

In a checkout ``../CONTRIBUTING.md`` and ``../benchmarks/results/x.json`` are files. The site gets a
page of the one and a copy of the other. Laboratory notes stay out of the search, where their many
words would hide the pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
UPWARDS = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
LINK = re.compile(r"!?\[([^\]]*)\]\((?!#)[^)\s]+\)")
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
ELSEWHERE = re.compile(r"\]\((?!docs/)(?=\w+/)")  # into other folders of the checkout
NOTES = "benchmarks/results/"
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the files to which pages link, and the pages that lie beside docs/."""
    for name in PAGES:
        # Their links are relative to the root of the checkout.
        text = ELSEWHERE.sub("](../", (ROOT / name).read_text("utf-8"))
        text = text.replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    for page in list(files.documentation_pages()):
        for link, _anchor in UPWARDS.findall(page.content_string):
            path = _outside(page.src_uri, link)
            if path is None or path in PAGES or files.get_file_from_path(_on_site(path)):
                continue
            if not (ROOT / path).is_file():
                raise FileNotFoundError(f"{page.src_uri} links to {link}, which is no file")
            source: dict[str, Any] = {"abs_src_path": str(ROOT / path)}
            if path.endswith(".md"):  # its links would lead to files that the site does not have
                text = LINK.sub(r"\1", (ROOT / path).read_text("utf-8"))
                if path.startswith(NOTES):
                    text = UNSEARCHED + text
                source = {"content": text}
            place = _on_site(path)
            files.append(
                File.generated(config, place, **source, inclusion=InclusionLevel.NOT_IN_NAV)
            )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to these copies."""
    here = page.file.src_uri

    def lead(link: re.Match[str]) -> str:
        path = _outside(here, link[1])
        if path is None:
            return link[0]
        target = posixpath.relpath(_on_site(path), posixpath.dirname(here) or ".")
        return f"]({target}{link[2] or ''})"

    return UPWARDS.sub(lead, markdown)


def _outside(page: str, link: str) -> str | None:
    """Return the path in the checkout to which a page's link leads; None if it is in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def _on_site(path: str) -> str:
    return path if path in PAGES else f"repository/{path}"
