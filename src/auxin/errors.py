"""Every error that auxin raises on purpose.

A message says what was given, what is accepted and what to do.
"""

import math
from collections.abc import Iterable
from difflib import get_close_matches


class AuxinError(Exception):
    """Base of every error that auxin raises on purpose."""


class InputError(AuxinError, ValueError):
    """An argument, a batch or a loss is not what is accepted."""


class UnknownNameError(AuxinError, KeyError):
    """A site, method or option that does not exist."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoSiteError(AuxinError):
    """The model has no place where it can grow; the message lists why."""


class NumericalError(AuxinError, ArithmeticError):
    """NaN or infinity in an input, a loss or a gradient."""


class OptimizerError(AuxinError):
    """The optimizer cannot be carried through a change of shapes."""


class ModelChangedError(AuxinError):
    """The model is no longer the one that was analysed."""


class WrapperError(AuxinError):
    """The model is wrapped in a way that does not survive growth."""


class CheckpointError(AuxinError):
    """A file or a seed model that does not fit."""


class StaleGraphError(AuxinError, RuntimeError):
    """A backward pass through a graph that was built before the model grew."""


class MissingExtraError(AuxinError, ImportError):
    """An optional dependency is not installed."""


def check_number(name: str, value: object, least: float = 0, whole: bool = False) -> None:
    """Raise InputError unless `value` is a finite (whole) number of at least `least`."""
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not math.isfinite(value) or value < least:  # type: ignore[arg-type, operator]
        raise InputError(f"{name}={value!r}; accepted: a {'whole' if whole else 'finite'} number of at least {least}")


def check_option(name: str, value: object, accepted: Iterable[str | None]) -> None:
    """Raise InputError with the near matches unless `value` is one of those accepted."""
    options = list(accepted)
    if value not in options:
        near = get_close_matches(str(value), [option for option in options if option is not None], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{name}={value!r}; {hint}accepted: {', '.join(map(repr, options))}")


def unknown(kind: str, given: object, accepted: Iterable[str]) -> UnknownNameError:
    """The error for a name that does not exist, with the near matches."""
    names = sorted(accepted)
    near = get_close_matches(str(given), names, n=3) or names[:12]
    more = "" if len(names) <= len(near) else f" ({len(names)} in all)"
    return UnknownNameError(f"unknown {kind} {given!r}; did you mean {', '.join(map(repr, near))}?{more}")
