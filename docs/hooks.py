"""Lets pages link to files of the repository: those become part of the site, so that the same links work in both.

A link to a folder becomes plain text, and one to the README leads to the first page. A file that is not there is left
to mkdocs, which calls it an error.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for match in OUTSIDE.finditer(page.content_string):
            source = root / match[2]
            if source.is_file() and source.name != "README.md" and files.get_file_from_path(_place(match[2])) is None:
                files.append(File.generated(config, _place(match[2]), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    root = Path(config.config_file_path).parent

    def inside(match: re.Match[str]) -> str:
        if (root / match[2]).is_dir():
            return match[1]
        return f"[{match[1]}]({'index.md' if match[2] == 'README.md' else _place(match[2])})"

    return OUTSIDE.sub(inside, markdown)


def _place(path: str) -> str:
    """Where a file of the repository is in the site: read in the browser, and not built as a page."""
    return f"{path}.txt"
