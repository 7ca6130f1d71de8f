"""When a growing network grows, by how much, up to which size, and when it stops for good."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from auxin.errors import InputError, check_number, check_option
from auxin.select import Budget


@dataclass(frozen=True)
class Policy:
    """Settings of a `Grower`. A policy counts calls of `step`; each call that is due is an *opportunity*.

    When:
        every: an opportunity every so many calls.
        schedule: explicit calls (the first is 1) in the place of `every`.
        patience: only after so many calls without an improvement of the metric (`step` then needs one); `better`
            says whether "lower" or "higher" is one, `margin` by how much at least.
        share_rise: only where some site's share of the bottleneck in E|v|^2 has risen by so much since the last
            growth (or the first look).

    How many:
        neurons: "slack" (the default) doubles every site while half of one would not do; "auto", a number, a dict or
            a `Budget` are passed to `grow` at every opportunity.
        rho, errors, confirm, smallest, tied: of the slack rule. A site is too narrow below `smallest` neurons, or
            where leaving out half of it raises the held-out score by more than rho of what the model is better than
            a constant prediction, and by more than `errors` standard errors, at `confirm` opportunities in a row.
            Tied: one narrow site widens all.

    Up to where:
        largest: no site grows beyond this width. parameters, multiply_adds: nor the model beyond these sizes.
        samples: how many samples to draw at an opportunity, in the place of the sample rule.
        total: how many opportunities the whole training will have; growth ends for good after the share `until` of
            them. None: growth ends after three opportunities in a row that added nothing.
    """

    every: int = 1
    schedule: Sequence[int] | None = None
    patience: int | None = None
    better: Literal["lower", "higher"] = "lower"
    margin: float = 0.0
    share_rise: float | None = None
    neurons: int | str | Mapping[str, int] | Budget = "slack"
    rho: float = 0.01
    errors: float = 1.0
    confirm: int = 2
    smallest: int = 4
    tied: bool = True
    largest: int | None = 256
    parameters: int | None = None
    multiply_adds: int | None = None
    samples: int | None = None
    total: int | None = None
    until: float = 0.5

    def __post_init__(self) -> None:
        sizes = ("largest", "parameters", "multiply_adds")
        wholes = ("every", "patience", "confirm", "smallest", "samples", "total", *sizes)
        for name in wholes:
            if getattr(self, name) is not None or name in ("every", "confirm", "smallest"):
                check_number(f"Policy: {name}", getattr(self, name), 1, whole=True)
        for name in ("margin", "share_rise", "rho", "errors", "until"):
            if getattr(self, name) is not None:
                check_number(f"Policy: {name}", getattr(self, name))
        check_option("Policy: better", self.better, ("lower", "higher"))
        if not 0 < self.until <= 1:
            raise InputError(f"Policy: until={self.until!r}; accepted: a share of training, above 0 and at most 1")
        self._check_schedule()
        self._check_neurons()

    def _check_schedule(self) -> None:
        calls = self.schedule
        if calls is not None and not isinstance(calls, Sequence):
            raise InputError(f"Policy: schedule={calls!r}; accepted: a list of calls, such as [1, 5, 10]")
        for call in calls or ():
            check_number("Policy: a call of the schedule", call, 1, whole=True)

    def _check_neurons(self) -> None:
        wanted = self.neurons
        if isinstance(wanted, str):
            check_option("Policy: neurons", wanted, ("slack", "auto"))
        elif not isinstance(wanted, Budget):
            numbers = wanted.items() if isinstance(wanted, Mapping) else [("", wanted)]
            for name, number in numbers:
                accepted = f"Policy: neurons{f' for {name!r}' if name else ''} (or 'slack', 'auto', auxin.Budget(...))"
                check_number(accepted, number, whole=True)

    def over(self, calls: int, idle: int) -> bool:
        """Whether growth has ended for good, after so many calls and idle opportunities in a row."""
        if self.schedule is not None and calls > max(self.schedule, default=0):
            return True
        if self.total is not None:
            return calls > self.until * self.total * self.every
        return idle >= 3

    def due(self, calls: int) -> bool:
        """Whether a call is an opportunity by its number alone."""
        return calls in self.schedule if self.schedule is not None else calls % self.every == 0

    def improved(self, metric: float, best: float | None) -> bool:
        """Whether a metric beats the best so far."""
        if best is None:
            return True
        gain = best - metric if self.better == "lower" else metric - best
        return gain > self.margin


def checked_metric(policy: Policy, metric: Any) -> float | None:
    """The metric as a number; an error where the policy waits for one and there is none."""
    if metric is None and policy.patience is not None:
        raise InputError("the policy waits for a plateau (patience=...), and step() got no metric; pass metric=...")
    try:
        value = None if metric is None else float(metric)
    except (TypeError, ValueError) as error:
        raise InputError(f"metric is {metric!r}; accepted: a number") from error
    if value is not None and math.isnan(value):
        raise InputError("metric is NaN; accepted: a number")
    return value
