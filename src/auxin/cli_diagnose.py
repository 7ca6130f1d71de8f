"""`auxin diagnose TARGET`: the bottleneck table of a model on its data."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from torch import nn

from auxin import diagnose
from auxin.cli_values import positive_int, split_names
from auxin.errors import InputError, unknown

T = TypeVar("T")
FUNCTION = "target"
EPILOG = """\
TARGET is train.py, train.py:function, package.module or package.module:function. The function (by default
`target`, called without arguments) returns what is to be diagnosed, as a tuple (model, batches, loss) or as a
dict with these keys; in a file without such a function, module-level names do. `batches` is an iterable of
(input, target), and loss(output, target) a mean over the samples."""


@dataclass(frozen=True)
class Target:
    """What a TARGET gives: a model, its data and its loss."""

    model: nn.Module
    batches: Iterable[Any]
    loss: Callable[..., Any]


def add_command(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "diagnose",
        parents=[shared],
        help="show which layers hold a model back, on its own data",
        description="Measure, for every hidden width that can grow, how much of the desired update it cannot follow.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="what gives model, data and loss; see below")
    parser.add_argument("--batches", type=positive_int, metavar="N", help="use the first N batches only")
    parser.add_argument("--sites", metavar="A,B", type=split_names, help="names of the sites to measure (default: all)")
    parser.add_argument("--damping", type=float, metavar="RHO", help="damping of the input moments (default: none)")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> Mapping[str, Any]:
    """Print the table and return it as plain data."""
    target = load_target(options.target)
    batches = with_progress(target.batches, options.batches)
    diagnosis = diagnose(target.model, batches, target.loss, sites=options.sites, damping=options.damping)
    console.print(diagnosis)
    for refusal in diagnosis.refused:
        console.print(f"not offered: {refusal}", style="dim", markup=False, highlight=False, soft_wrap=True)
    return diagnosis.to_dict()


def with_progress(batches: Iterable[Any], limit: int | None) -> Iterator[Any]:
    """The first `limit` batches, with a bar on a terminal's standard error that goes away at the end."""
    length = getattr(batches, "__len__", lambda: None)()
    total = length if limit is None or length is None else min(limit, length)
    console = Console(stderr=True)
    shown = track(
        islice(batches, limit), "measuring", total, console=console, transient=True, disable=not console.is_terminal
    )
    return iter(shown)


def load_target(text: str) -> Target:
    """The model, batches and loss that the TARGET of the command line gives."""
    place, name = split_target(text)
    module = import_target(place)
    if not name and not hasattr(module, FUNCTION):
        return as_target(vars(module), f"{place} has no function `{FUNCTION}`, and its module-level names")
    function = getattr(module, name or FUNCTION, None)
    if function is None:
        raise unknown(f"function in {place}", name, [key for key, value in vars(module).items() if callable(value)])
    if not callable(function):
        raise InputError(f"`{name or FUNCTION}` in {place} is {type(function).__name__}, not a function")
    return as_target(call(function, text), f"what {text} returned")


def split_target(text: str) -> tuple[str, str]:
    """The file or module of a TARGET, and the function behind its last colon ("" where it names none)."""
    place, _, name = text.rpartition(":")
    return (place, name) if place and name.isidentifier() else (text, "")


def import_target(place: str) -> ModuleType:
    """The module of a file or of a dotted name, found as `python` would find it."""
    path = Path(place)
    if path.suffix != ".py":
        sys.path.insert(0, "")
        return call(partial(importlib.import_module, place), place)
    if not path.is_file():
        raise InputError(f"there is no file {place}; TARGET is a Python file, file.py:function or module:function")
    sys.path.insert(0, str(path.resolve().parent))
    name = f"{path.stem}_target" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{place} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    # Classes that are pickled (by the workers of a data loader) are looked up here by their module's name.
    sys.modules[name] = module
    call(partial(spec.loader.exec_module, module), place)
    return module


def call(function: Callable[[], T], place: str) -> T:
    """What `function`, which is the user's code, returns; its errors are told as the target's."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise InputError(f"{place} raised {type(error).__name__}: {error}; --traceback shows where") from error


def as_target(given: Any, what: str) -> Target:
    """A Target from a tuple or a mapping; `what` describes it in errors."""
    if isinstance(given, tuple | list):
        if len(given) != 3:
            raise InputError(f"{what} has {len(given)} entries; accepted are three, (model, batches, loss)")
        given = dict(zip(("model", "batches", "loss"), given, strict=True))
    if not isinstance(given, Mapping):
        raise InputError(f"{what} is {type(given).__name__}; accepted are (model, batches, loss) or a dict of these")
    named = {"batches": given.get("data"), **given}
    missing = [name for name in ("model", "batches", "loss") if named.get(name) is None]
    if missing:
        raise InputError(f"{what} lack {', '.join(missing)}; needed are model, batches (or data) and loss")
    target = Target(named["model"], named["batches"], named["loss"])
    if not isinstance(target.model, nn.Module):
        raise InputError(f"the model of {what} is {type(target.model).__name__}; accepted is a torch.nn.Module")
    if not isinstance(target.batches, Iterable):
        raise InputError(f"the batches of {what} are {type(target.batches).__name__}; accepted is an iterable")
    return target
