"""An exception at every internal stage in turn leaves everything as it was.

A profile function raises inside the package's own functions: at the first call of each one that a growth goes
through, and, once everything is planned, at every single call and every call of a built-in that is left.
"""

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import auxin
from helpers_growth import batches, cnn, everything, mlp, trained

PACKAGE = str(Path(auxin.__file__).parent)
cross_entropy = nn.functional.cross_entropy

Key = tuple[str, CodeType]
FAULTS = (RuntimeError, KeyboardInterrupt)


class Setting:
    """A trained model with Adam, a grower on it, and data."""

    def __init__(self, kind: str) -> None:
        self.data = batches(5, size=16) if kind == "mlp" else batches(2, 6, 6, size=6)
        self.model: nn.Module = mlp(5, 2, 4, 3) if kind == "mlp" else cnn()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        trained(self.model, self.data, self.optimizer)
        sites = auxin.find_sites(self.model, self.data[0][0])
        policy = auxin.Policy(smallest=4, tied=False, parameters=10_000, share_rise=0.0, patience=1)
        self.grower = auxin.Grower(self.model, cross_entropy, optimizer=self.optimizer, policy=policy, sites=sites)
        for metric in (0.5, 1.0):
            assert self.grower.step(self.data, metric) is None

    def grow(self, **options: Any) -> Any:
        model, optimizer = self.model, self.optimizer
        return auxin.grow(model, self.data, cross_entropy, optimizer=optimizer, **options)


def found_anew(setting: Setting) -> Any:
    return setting.grow(neurons=2, method="gradmax")


def sprout(setting: Setting) -> Any:
    return setting.grow(neurons=2, sites=setting.grower._sites)


def quick(setting: Setting) -> Any:
    return setting.grow(neurons={"0": 2}, sites=setting.grower._sites, amplitude=0.5)


def tiny(setting: Setting) -> Any:
    return setting.grow(neurons=auxin.Budget(parameters=60), method="tiny", sites=setting.grower._sites)


def step(setting: Setting) -> Any:
    return setting.grower.step(setting.data, metric=1.0)


CASES = [
    ("mlp", found_anew, 1), ("mlp", sprout, 2), ("mlp", tiny, 3), ("mlp", step, 3), ("cnn", quick, 3), ("cnn", step, 6),
]  # fmt: skip
"""Model, what is run, and of how many stages one is tried."""

FINDER = ("sites.py", "tracing.py", "proving.py", "layers/operations")


@contextmanager
def profiled(see: Callable[[str, CodeType, FrameType], None]) -> Iterator[None]:
    """`see` is told of calls of the package's functions, and of built-ins from within them."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call", "return") and frame.f_code.co_filename.startswith(PACKAGE):
            see(event, frame.f_code, frame)

    gc.disable()  # it would close generators of earlier runs, and a fault while that happens is lost
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


def stages(run: Callable[[], Any]) -> list[CodeType]:
    """The package's functions that a run goes through, in the order of their first calls."""
    seen: dict[CodeType, None] = {}
    with profiled(lambda event, code, frame: seen.setdefault(code) if event == "call" else None):
        run()
    return list(seen)


def failing(setting: Setting, run: Callable[[Setting], Any], fault: type[BaseException], where: Any) -> bool:
    """Whether the exception came out; if so, everything is as it was."""
    before, state = everything(setting.model, setting.optimizer), setting.grower.state_dict()
    error: BaseException | None = None
    try:
        with profiled(where):
            run(setting)
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    if error is None:
        assert fault is not KeyboardInterrupt, "a fault may be taken for a site that cannot grow, an interrupt never"
        return False
    assert any("injected" in str(link) for link in chain(error)), f"{error!r} took the place of the fault"
    after = everything(setting.model, setting.optimizer)
    assert [name for name in before if before[name] != after[name]] == []
    assert setting.grower.state_dict() == state
    return True


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, what it was raised while handling, and so on."""
    while error is not None:
        yield error
        error = error.__context__


def at_first_call(code: CodeType, fault: type[BaseException]) -> Callable[[str, CodeType, FrameType], None]:
    def see(event: str, seen: CodeType, frame: FrameType) -> None:
        if event == "call" and seen is code:
            raise fault("injected")

    return see


def of_the_finder(code: CodeType) -> bool:
    return any(part in code.co_filename for part in FINDER)


@pytest.mark.parametrize(("kind", "run", "stride"), CASES)
def test_a_fault_at_every_stage(kind: str, run: Callable[[Setting], Any], stride: int) -> None:
    template = Setting(kind)
    found = stages(lambda: run(copy.deepcopy(template)))
    if run is found_anew:
        found = [code for code in found if of_the_finder(code)]
    assert len(found) > 80
    for index, code in enumerate(found[::stride]):
        setting, fault = copy.deepcopy(template), FAULTS[index // 3 % 2]
        try:
            raised = failing(setting, run, fault, at_first_call(code, fault))
        except AssertionError as error:
            raise AssertionError(f"{fault.__name__} in {code.co_filename}:{code.co_qualname}") from error
        assert raised or of_the_finder(code), f"{fault.__name__} in {code.co_qualname} was lost"
        if raised and index % 20 == 0:
            assert run(setting).added > 0


class Late:
    """Counts the package's calls and built-ins after the function `last` has returned; raises at the one wanted."""

    def __init__(self, last: str, wanted: int | None, fault: type[BaseException] = RuntimeError) -> None:
        self.last, self.wanted, self.fault = last, wanted, fault
        self.planned, self.applied = False, False
        self.count = 0

    def __call__(self, event: str, code: CodeType, frame: FrameType) -> None:
        if event == "return":
            self.planned |= code.co_name == self.last
            self.applied |= self.planned and code.co_name == "commit"
        elif self.planned and not self.applied and code.co_name != "<genexpr>":  # which is also called to be closed
            self.count += 1
            if self.count == self.wanted:
                raise self.fault("injected")


@pytest.mark.parametrize(("kind", "run", "last"), [("mlp", step, "_remember"), ("cnn", quick, "planned_growth")])
def test_a_fault_at_every_call_while_it_is_applied(kind: str, run: Callable[[Setting], Any], last: str) -> None:
    template = Setting(kind)
    counter = Late(last, None)
    with profiled(counter):
        run(copy.deepcopy(template))
    assert counter.count > 200
    for index in range(1, counter.count + 1, counter.count // 40):
        setting, fault = copy.deepcopy(template), FAULTS[index % 2]
        raised = failing(setting, run, fault, Late(last, index, fault))
        assert raised, f"call {index} of {counter.count}"
    assert run(setting).added > 0
