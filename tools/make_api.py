"""Write docs/api.md from the docstrings of everything that `auxin` offers.

python tools/make_api.py           write the page
python tools/make_api.py --check   fail, and say what to do, if the page is not up to date
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
HEAD = """\
# API reference

Everything below is a name in `auxin`, as in `auxin.grow`. This page is made from the docstrings by `make docs`.
"""


def main() -> int:
    """Write the page, or compare it with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is not up to date")
    check = parser.parse_args().check
    sys.path.insert(0, str(ROOT / "src"))
    page = make_page()
    if not check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        print(f"{PAGE.relative_to(ROOT)} is not what the docstrings say; run `make docs`", file=sys.stderr)
        return 1
    return 0


def make_page() -> str:
    """The whole page."""
    import auxin

    objects = {name: getattr(auxin, name) for name in auxin.__all__}
    functions = {name: thing for name, thing in objects.items() if inspect.isfunction(thing)}
    classes = {name: thing for name, thing in objects.items() if inspect.isclass(thing)}
    errors = {name: thing for name, thing in classes.items() if issubclass(thing, Exception)}
    parts = [HEAD, "## Functions\n", *(function_entry(name, thing) for name, thing in functions.items())]
    parts += ["## Classes\n", *(class_entry(name, thing) for name, thing in classes.items() if name not in errors)]
    parts += ["## Errors\n", *(error_line(name, thing) for name, thing in errors.items())]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def function_entry(name: str, function: Any) -> str:
    """A function: its signature and its docstring."""
    return f"### {name}\n\n```text\n{name}{signature(function)}\n```\n\n{docstring(function)}\n"


def class_entry(name: str, thing: type) -> str:
    """A class: its signature, its docstring, and a line for each public property and method."""
    members = "\n".join(member_line(member, value) for member, value in public_members(thing))
    listed = f"\n{members}\n" if members else ""
    return f"### {name}\n\n```text\n{name}{signature(thing)}\n```\n\n{docstring(thing)}\n{listed}"


def public_members(thing: type) -> Iterator[tuple[str, Any]]:
    """Properties and methods that the class, or a base within auxin, defines, in the order of the source."""
    seen: set[str] = set()
    for base in thing.__mro__:
        if not base.__module__.startswith("auxin"):
            continue
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if (
                name.startswith("_")
                or name in seen
                or not (inspect.isfunction(function) or isinstance(value, property))
            ):
                continue
            seen.add(name)
            yield name, function


def member_line(name: str, value: Any) -> str:
    """One property or method as an item of a list."""
    shown = name if isinstance(value, property) else name + signature(value)
    return f"- `{shown}`: {docstring(value)}".replace("\n", "\n  ")


def error_line(name: str, error: type) -> str:
    """One error as an item of a list."""
    bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
    return f"- `{name}` ({bases}): {docstring(error)}"


def docstring(thing: Any) -> str:
    """The docstring without its indentation; every public thing must have one of its own."""
    text = inspect.cleandoc(thing.__doc__ or "")
    if not text or text.startswith(f"{getattr(thing, '__name__', '')}("):
        raise SystemExit(f"{getattr(thing, '__qualname__', thing)} has no docstring")
    return "\n".join(listed(line) for line in text.splitlines())


def listed(line: str) -> str:
    """An entry of an indented block, as under `Args:`, as an item of a list; other lines as they are."""
    entry = re.fullmatch(r" {4}(\w[\w, ]*): (.*)", line)
    if entry:
        names = ", ".join(f"`{name.strip()}`" for name in entry.group(1).split(","))
        return f"- {names}: {entry.group(2)}"
    return f"\n{line}\n" if re.fullmatch(r"\w[\w ]*:", line) else line.removeprefix("      ")


class Verbatim(str):
    """An annotation that was written in quotes, shown without them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(thing: Any) -> str:
    """The signature, with types by their last name, on several lines where it is long."""
    try:
        found = inspect.signature(thing)
    except ValueError:
        return "()"
    parameters = [unquoted(p) for p in found.parameters.values() if p.name not in ("self", "cls")]
    result = inspect.Signature.empty if inspect.isclass(thing) else found.return_annotation
    text = str(inspect.Signature(parameters, return_annotation=shown(result)))
    text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)
    text = re.sub(r"<(?:function|object|class|factory)[^>]*>", "…", text)
    return text if len(text) <= 100 or not parameters else broken(text)


def shown(annotation: Any) -> Any:
    """An annotation as it is printed: without quotes around the whole of it."""
    return Verbatim(annotation) if isinstance(annotation, str) else annotation


def unquoted(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter whose annotation is printed without quotes."""
    return parameter.replace(annotation=shown(parameter.annotation))


def broken(text: str) -> str:
    """A long signature with one parameter on each line."""
    inside, _, result = text[1:].rpartition(")")
    depth, parts = 0, [""]
    for sign in inside:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return "(\n" + "".join(f"    {part.strip()},\n" for part in parts) + ")" + result


if __name__ == "__main__":
    sys.exit(main())
