"""The repository keeps its own rules: what imports what, what is documented, what is promised."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "auxin"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A module imports from its own level or from those below it, and never in a circle.
LEVELS = [
    {"errors", "linalg", "whitening", "statistics", "history", "structure", "isolation", "objectives", "tables"},
    {"layers", "edits", "optimizers", "plots", "report", "report_figures", "select", "costs", "policy"},
    {"collect", "surgery"},
    {"moments"},
    {"features", "checkpoint", "tracing", "proving", "sites", "slack"},
    {"methods", "limits"},
    {"scale"},
    {"growth", "grower", "diagnosis"},
    {"__init__"},
    {"__main__", "cli", "cli_demo", "cli_diagnose", "cli_values", "demo"},
]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def trees() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def imported(tree: ast.AST) -> Iterator[str]:
    """Every auxin module that a source imports, in functions as well, without `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "auxin":
            yield from names_of(node)
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] or "__init__" for alias in node.names if is_ours(alias.name))
        yield from imported(node)


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "auxin"


def names_of(node: ast.ImportFrom) -> Iterator[str]:
    """`from auxin.a import b` is the module a.b where there is one, else a."""
    base = (node.module or "").partition(".")[2]
    for alias in node.names:
        inside = f"{base}.{alias.name}".lstrip(".")
        if source_of(inside):
            yield inside
        elif base:
            yield base if source_of(base) else f"{base}.__init__"
        elif alias.name != "__version__":
            yield "__init__"


def source_of(name: str) -> bool:
    path = PACKAGE / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def level(name: str) -> int:
    top = name.split(".")[0]
    return next((index for index, names in enumerate(LEVELS) if top in names), len(LEVELS))


def functions(tree: ast.AST, public: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every function and class with whether it is reachable by public names alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            seen = public and not node.name.startswith("_")
            yield node, seen
            if isinstance(node, ast.ClassDef):
                yield from functions(node, seen)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from functions(node, public)


def is_overload(node: ast.AST) -> bool:
    return any("overload" in ast.unparse(mark) for mark in node.decorator_list)


def test_every_module_has_a_level() -> None:
    assert {name.split(".")[0] for name in trees()} - set().union(*LEVELS) == set()


def test_imports_point_downward() -> None:
    upward = [
        f"{name} imports {other}"
        for name, tree in trees().items()
        for other in imported(tree)
        if level(other) > level(name)
    ]
    assert upward == []


def test_imports_make_no_circle() -> None:
    graph = {name: {other for other in imported(tree) if other != name} for name, tree in trees().items()}
    graph = {name: {o if o in graph else f"{o}.__init__" for o in others} for name, others in graph.items()}
    while leaves := [name for name, others in graph.items() if not others & set(graph)]:
        graph = {name: others for name, others in graph.items() if name not in leaves}
    assert sorted(graph) == []


def test_no_asserts_in_the_package() -> None:
    found = [name for name, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert found == []


def test_everything_public_has_a_docstring() -> None:
    bare = [
        f"{name}.{node.name}"
        for name, tree in trees().items()
        for node, public in functions(tree)
        if public and not is_overload(node) and ast.get_docstring(node) is None
    ]
    assert bare == []
    assert [name for name, tree in trees().items() if ast.get_docstring(tree) is None] == []


def test_importing_auxin_imports_no_extra() -> None:
    code = "import auxin, sys; print([m for m in ('sklearn', 'matplotlib', 'scipy', 'timm') if m in sys.modules])"
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_promised_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    promised = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / page).read_text(encoding="utf-8")))
    assert promised
    assert promised <= targets


def test_no_absolute_paths_in_what_is_published() -> None:
    texts = [*SOURCES, *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    own = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|Users|opt)/")
    assert [str(path.relative_to(ROOT)) for path in texts if own.search(path.read_text(encoding="utf-8"))] == []


def test_version_is_in_the_changelog() -> None:
    version = re.search(r'__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert version is not None
    assert f"## {version.group(1)}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
