"""Every example in README and docs runs, every link leads somewhere, and the API page is up to date."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page run in order, in one namespace and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "example"}
    for block in BLOCK.finditer(text):
        # Empty lines in front, so that a traceback names the line of the page.
        before = "\n" * text[: block.start(1)].count("\n")
        exec(compile(before + block.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    local = [link for link in LINK.findall(text) if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_fences_are_closed(page: Path) -> None:
    """An open fence would hide an example from the tests."""
    assert page.read_text(encoding="utf-8").count("\n```") % 2 == 0


def test_api_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_api.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_examples_are_found() -> None:
    """The pattern that finds examples does find them: README has at least one."""
    assert BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
