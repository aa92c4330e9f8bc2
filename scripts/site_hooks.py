"""Hooks with which mkdocs makes a site of files that are also read in a checkout: further pages, links, and the API.

A link to a file that has no page, such as a test, is left as its text.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from site_diagrams import drawn

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "clients/go/README.md": "clients/go.md",
    "examples/java/README.md": "examples/java.md",
    "examples/node/README.md": "examples/node.md",
}
"""Files of the repository that become pages."""
_SOURCES = {page: source for source, page in PAGES.items()}
_API = {
    "api.md": "# API\n\nServices use these names; what is not here may change ([stability](stability.md)).\n\n::: tmc_client\n\n"
    "::: tmc_client.outbox.Outbox\n\n::: tmc_client.consuming.inbox.SqlInbox\n\n::: tmc_client.checks.answers.Checks\n\n"
    "::: tmc_client.producing.transaction.Transaction\n\n::: tmc_common.consul.Registration\n",
    "api-asyncio.md": "# API for asyncio\n\n::: tmc_client.aio\n",
    "api-testing.md": "# API for tests\n\n::: tmc_client.testing\n",
}
_PROGRAMS = ("examples/quickstart", "examples/shops", "examples/testing")
"""Folders whose programs have a page each."""
_FILES = ("deploy/**/*", "docker-compose.yml", "Dockerfile", "examples/java/**/*", "examples/node/*")
_KINDS = ("", ".conf", ".java", ".js", ".json", ".service", ".timer", ".toml", ".txt", ".yaml", ".yml")
"""Files to download: not those that hold passwords once they are used."""
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_DIAGRAM = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page, text in {**_API, **dict(_programs()), "decisions/index.md": _decisions()}.items():
        files.append(File.generated(config, page, content=text))
    for path in sorted(path for pattern in _FILES for path in ROOT.glob(pattern)):
        if path.is_file() and path.suffix in _KINDS:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_bytes()))
    return files


def _programs() -> Iterator[tuple[str, str]]:
    """Yield pages that show a program each."""
    for folder in _PROGRAMS:
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.name != "__init__.py":
                name = path.relative_to(ROOT)
                yield name.with_suffix(".md").as_posix(), f"# {name}\n\n```python\n{path.read_text()}```\n"


def _decisions() -> str:
    lines = [f"- [{_title(path)}]({path.name})" for path in sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))]
    return (
        "# Decisions\n\nWhy it is built this way, in the order in which it was decided.\n\n" + "\n".join(lines) + "\n"
    )


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pages, draw diagrams, and show tables of programs as tables."""
    here = page.file.src_uri
    source = _SOURCES.get(here, f"docs/{here}")
    parts = _FENCE.split(markdown)
    parts[1::2] = [_DIAGRAM.sub(lambda found: drawn(found[1]), fence) for fence in parts[1::2]]
    parts[::2] = [_LINK.sub(lambda link: _lead(link, source, here, files), text) for text in parts[::2]]
    return re.sub(r"<(table|tr|td)>", r'<\1 markdown="1">', "".join(parts))


def _lead(link: re.Match[str], source: str, here: str, files: Files) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    for wanted in _targets(posixpath.normpath(posixpath.join(posixpath.dirname(source), target))):
        if files.get_file_from_path(wanted) is not None:
            return f"[{text}]({posixpath.relpath(wanted, posixpath.dirname(here) or '.')}{anchor})"
    if not (ROOT / posixpath.dirname(source) / target).exists():
        raise ValueError(f"{source} links to {target}, which does not exist")
    return text


def _targets(path: str) -> Iterator[str]:
    """Yield the pages that may stand for a file or folder of the repository."""
    yield PAGES.get(path, path.removeprefix("docs/"))
    yield f"{path.removesuffix('.py')}.md"
    yield path
    yield f"{path.removeprefix('docs/')}/index.md"
