"""The command line: arguments in, tables and pages out."""

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from auxin import __version__, cli_demo, cli_diagnose
from auxin.errors import AuxinError

USER_ERROR = 2
INTERRUPTED = 130
DESCRIPTION = """\
auxin grows PyTorch networks: it measures where a model is too narrow to follow its own gradient,
adds the neurons that help most there, and goes on training."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for input that auxin refuses, or 130 after Ctrl-C."""
    options = make_parser().parse_args(arguments)
    try:
        run(options.command, options)
    except AuxinError as error:
        return report_error(error, options.traceback)
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`auxin ... | head`): nothing is left to be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command's module adds its own part."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON document, and all else on standard error")
    shared.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")
    parser = argparse.ArgumentParser(prog="auxin", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"auxin {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    cli_demo.add_command(commands, shared)
    cli_diagnose.add_command(commands, shared)
    return parser


def run(command: Callable[[argparse.Namespace, Console], Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Call `command`, which prints what people read and returns what `--json` prints."""
    if not options.json:
        command(options, Console())
        return
    with standard_output_to_error():
        result = command(options, Console(stderr=True))
    print_json(result)


@contextmanager
def standard_output_to_error() -> Iterator[None]:
    """Send to standard error what anyone writes to standard output: a user's module, a library, a subprocess."""
    sys.stdout.flush()
    kept, kept_descriptor = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = kept
        os.dup2(kept_descriptor, 1)
        os.close(kept_descriptor)


def print_json(result: Mapping[str, Any]) -> None:
    """Write one JSON document to standard output."""
    sys.stdout.write(json.dumps(finite(result), allow_nan=False, indent=2) + "\n")
    sys.stdout.flush()


def finite(value: Any) -> Any:
    """`value` with NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_error(error: AuxinError, with_traceback: bool) -> int:
    """Print an error that the user can mend, and give its exit code."""
    if with_traceback:
        traceback.print_exception(error)
    else:
        print_error(str(error))
    return USER_ERROR


def print_error(text: str) -> None:
    """One message on standard error, as it is: no markup, no wrapping."""
    sys.stderr.write(f"auxin: {text}\n")
