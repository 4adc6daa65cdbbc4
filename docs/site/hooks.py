"""Hooks of mkdocs: pages for the examples, links that leave `docs`, and a check of the built site."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?://|#)([^)\s#]+)(?:#[^)\s]*)?\)")
_LOADED = re.compile(r"""<(?:script|link|img)\b[^>]*\s(?:src|href)=["']?(?:https?:)?//[^>]*""")


def on_files(files: Files, config: Any) -> Files:
    """Add a page with the source of each example, and the notebook as a page."""
    for example in sorted((ROOT / "examples").glob("*.py")):
        page = f"# {example.name}\n\n```python\n{example.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"code/{example.stem}.md", content=page))
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        files.append(File.generated(config, f"code/{notebook.stem}.md", content="\n\n".join(map(_cell, cells))))
    return files


def _cell(cell: dict[str, Any]) -> str:
    """A cell of a notebook: text, or code and the output that it holds."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return _LINK.sub(lambda found: found[0].replace("(../docs/", "(../"), source)
    printed = "".join("".join(output["text"]) for output in cell["outputs"])
    return f"```python\n{source}\n```" + (f"\n\n```text\n{printed}```" if printed else "")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to examples to their pages, take links to other files out, and keep raw results out of the search."""
    source = page.file.src_uri
    if source.startswith(("results/", "code/")):
        page.meta["search"] = {"exclude": True}
    return _LINK.sub(lambda found: _inside(found, posixpath.join("docs", posixpath.dirname(source)), source), markdown)


def _inside(link: re.Match[str], folder: str, source: str) -> str:
    target = posixpath.normpath(posixpath.join(folder, link[2]))
    if target.startswith("docs/"):
        return link[0]
    if target == "examples":
        return f"{link[1]}({_relative('examples.md', source)})"
    if target.startswith("examples/"):
        return f"{link[1]}({_relative(f'code/{Path(target).stem}.md', source)})"
    return link[1].strip("[]")  # else the site has a link to nowhere


def _relative(page: str, source: str) -> str:
    return posixpath.relpath(page, posixpath.dirname(source) or ".")


def on_post_build(config: Any) -> None:
    """Hold that the site can be searched, and that its pages load nothing from elsewhere."""
    site = Path(config["site_dir"])
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    if missing := {"tutorial.html", "limitations.html", "reference/api.html"} - found:
        raise PluginError(f"the search index lacks {sorted(missing)}")
    for page in site.rglob("*.html"):
        if loads := _LOADED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(site)} loads from elsewhere: {loads[0]}")
