"""The parts of the site that are no files of docs/: pages and linked files of the repository, docstrings, helps.

A link of a page is one of the repository, as GitHub shows it. Here it becomes one of the site.
"""

import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from deploy import reference  # noqa: E402 - found where the path says

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "clusters.md",
    "docs/site/site.css": "site.css",
}
"""By path in the repository, the paths in the site of files from outside the site's own."""
CODE = {
    ".py": "python",
    ".sbatch": "bash",
    ".sh": "bash",
    ".yaml": "yaml",
    ".toml": "toml",
    ".json": "json",
    ".ipynb": "python",
    ".tf": "hcl",
    "": "text",
}
"""By suffix, the language of files that are shown as a page of code."""
ASIDE = ("log/", "results/")  # pages of how figures were made, which a search for help should not find first
LATER = ("architecture.md", "changelog.md", "clusters.md", "ec2-report.md")  # a search finds the guide before these
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
WHOLE_FLAGS = "\n<style>td:first-child code { white-space: nowrap }</style>\n"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are no files of docs/."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    linked = {path for file in files.documentation_pages() for path in links_of(path_of(file.src_uri), file)}
    for path in sorted(linked):
        if is_code(path):
            files.append(File.generated(config, uri_of(path), content=page_of(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Adds what the site alone has, and turns links to files of the repository into links to pages of the site."""
    here = path_of(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        path = target_of(here, found[0])
        if not (ROOT / path).exists():
            return found[0]  # mkdocs names it
        return posixpath.relpath(uri_of(path), posixpath.dirname(page.file.src_uri) or ".")

    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]  # it has one entry
    if page.file.src_uri.startswith(ASIDE):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri in LATER:
        page.meta["search"] = {"boost": 0.3}
    markdown = LINK.sub(replaced, markdown)
    if page.file.src_uri == "api.md":  # the docstrings say what the lists say
        markdown = reference.DOCSTRINGS.sub(r"\1", reference.LIST.sub("", markdown))
    return markdown + (reference.helps() + WHOLE_FLAGS if page.file.src_uri == "flags.md" else "")


def page_of(path: str) -> str:
    """Returns a file of code as a page, which a search leaves out; a notebook as its cells with their outputs."""
    text = (ROOT / path).read_text()
    if not path.endswith(".ipynb"):
        return f"{UNSEARCHED}# {path}\n{block_of(text, CODE[Path(path).suffix])}"
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else block_of(f"{source}\n", CODE[".ipynb"]))
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", ())})
            if picture := data.get("image/png"):
                parts.append(f"![what the cell draws](data:image/png;base64,{''.join(picture.split())})")
            else:
                parts.append(block_of("".join(data["text/plain"]).rstrip() + "\n", "text"))
    return "\n\n".join(parts)


def block_of(text: str, language: str) -> str:
    """Returns text as a block of code."""
    return f"```` {{.{language}}}\n{text}````\n"


def links_of(path: str, file: File) -> Iterator[str]:
    """Yields the paths that a page links to."""
    for link in LINK.findall(file.content_string):
        yield target_of(path, link)


def target_of(path: str, link: str) -> str:
    """Returns the path of a link's target in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def is_code(path: str) -> bool:
    """Returns whether a file is shown as a page of code: programs, and others that are no files of the site."""
    suffix, is_page = Path(path).suffix, path in PAGES
    return (
        not is_page
        and (ROOT / path).is_file()
        and (suffix == ".py" or (not path.startswith("docs/") and suffix in CODE))
    )


def uri_of(path: str) -> str:
    """Returns the place of a file of the repository in the site."""
    if path in PAGES:
        return PAGES[path]
    return f"source/{path}.md" if is_code(path) else path.removeprefix("docs/")


def path_of(uri: str) -> str:
    """Returns the path in the repository of a page of the site."""
    if uri.endswith(".ipynb.md"):  # with links of its own
        return uri.removeprefix("source/").removesuffix(".md")
    return next((path for path, other in PAGES.items() if other == uri), f"docs/{uri}")
