"""Random neurons with a line search over their amplitude: the baseline of `fig:Pareto_RT`."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from auxin.errors import check_option
from auxin.methods.base import Choice, Method, Proposal, SiteView, Statistics, register
from auxin.methods.tiny import to_norm


@register
@dataclass(frozen=True)
class Random(Method):
    """Fan-in and fan-out drawn from N(0, 1) or U(-1, 1), brought to norm 1 and searched in [-L, L] (E.3.2).

    "auto" adds one neuron: random directions have no order.
    """

    distribution: Literal["normal", "uniform"] = "normal"
    name = "random"

    def __post_init__(self) -> None:
        check_option("distribution", self.distribution, ("normal", "uniform"))

    @property
    def statistics(self) -> Statistics:
        """None."""
        return "none"

    def propose(self, view: SiteView, count: Choice) -> Proposal:
        """`count` neurons with their first-order slope."""
        number = 1 if count == "auto" else count
        alpha, _ = to_norm(self._draw(view, number, view.features), 1.0)
        omega, _ = to_norm(self._draw(view, number, view.most), 1.0)
        split = view.split(omega)
        if number == 0:
            return Proposal(alpha, split, scaling="both", rate_neurons=0.0)
        slopes = view.slopes(alpha)
        rate = sum(float((split[name] * slopes.plus[name]).sum()) for name in split)
        return Proposal(alpha, split, scaling="both", signed=True, rate_neurons=rate, offset=slopes.offset)

    def _draw(self, view: SiteView, count: int, size: int) -> Tensor:
        empty = torch.empty(count, size, dtype=torch.float64)
        if self.distribution == "normal":
            return empty.normal_(generator=view.generator).to(view.device)
        return empty.uniform_(-1.0, 1.0, generator=view.generator).to(view.device)
