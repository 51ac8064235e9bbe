"""Hooks of MkDocs: pages of the repository that lie outside of docs/ become pages of the site, with their links.

On GitHub all pages are plain Markdown whose links are paths of the repository. Here such a path leads to its page: README.md is
the first page, and a file of code that a page links to gets a page that shows it. A path that does not exist is left as it is,
so MkDocs reports it, and `strict` makes that an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md"}
"""Paths of the repository, and of the pages made from them."""
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#]|\s+\")")
"""A link's path: no address of the web, and no anchor of the same page."""
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".def": "singularity"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List all decisions in the navigation, and give headings the anchors that GitHub gives them."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    pages = sorted(Path(config.docs_dir, "adr").glob("*.md"))
    _replace(config.nav, "adr", [f"adr/{page.name}" for page in pages])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages of what lies outside of docs/."""
    root = _root(config)
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(root / path).read_text(encoding="utf-8")))
    texts = {_origin(file.src_uri): file.content_string for file in files.documentation_pages()}
    while texts:
        document, text = texts.popitem()
        for link in LINK.findall(FENCE.sub("", text)):
            path = _repository_path(document, link)
            page = _page_of(path, root)
            if page.startswith("source/") and files.get_file_from_path(page) is None:
                texts[_origin(page)] = _shown(root / path, path)
                files.append(File.generated(config, page, content=texts[_origin(page)]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001  MkDocs passes it by name
    """Make links of the repository links of the site."""
    here = page.file.src_uri
    origin, root = _origin(here), _root(config)

    def rewritten(match: re.Match[str]) -> str:
        target = _page_of(_repository_path(origin, match[1]), root)
        return posixpath.relpath(target, posixpath.dirname(here) or ".") if target else match[1]

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(rewritten, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(rewritten, markdown[end:])])


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent


def _origin(page: str) -> str:
    """Return the path of the repository that a page of the site is made from."""
    made = {page: path for path, page in PAGES.items()}
    if page in made or not page.startswith("source/"):
        return made.get(page, f"docs/{page}")
    return page.removeprefix("source/").removesuffix(".md")  # of a directory: what would be a file in it, `index`


def _repository_path(document: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def _page_of(path: str, root: Path) -> str:
    """Return where the site has a path of the repository, or nothing where that does not exist."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("..") or not (root / path).exists():
        return ""
    if (root / path).is_dir():
        return f"source/{path}/index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def _shown(path: Path, name: str) -> str:
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.is_file())
        return "\n".join([f"# {name}\n", *(f"- [{each}]({each})" for each in names)])
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def _replace(nav: Any, name: str, pages: list[str]) -> None:
    """Put a list of pages into the navigation in the place of a word."""
    for item in nav if isinstance(nav, list) else []:
        for title, below in item.items() if isinstance(item, dict) else []:
            if below == name:
                item[title] = pages
            _replace(below, name, pages)
