"""GradMax (Evci et al. 2022), as B.1 of the paper states it: zero fan-in, the fan-out with the largest gradient."""

from dataclasses import dataclass
from typing import Literal

import torch

from auxin.errors import check_option
from auxin.linalg import gradmax
from auxin.methods.base import (
    Choice,
    Method,
    Proposal,
    SiteView,
    Statistics,
    directions_that_gain,
    nearly_zero,
    register,
)
from auxin.methods.tiny import FIXED_NORM, to_norm


@register
@dataclass(frozen=True)
class GradMax(Method):
    """The fan-out that maximises the gradient of the new fan-in (`eq:GradMax`), on the raw v.

    norm: "linear" brings the root mean square norm of the fan-outs to 1e-3 (`fig:Pareto_WT`), "sqrt" to sqrt(1e-3)
    (`fig:sqrt_GM`). Where the activation has a kink at 0, the fan-in is 1e-6 times the direction of its first
    gradient step (`nearly_zero`).
    """

    norm: Literal["linear", "sqrt"] = "linear"
    name = "gradmax"

    def __post_init__(self) -> None:
        check_option("norm", self.norm, ("linear", "sqrt"))

    @property
    def statistics(self) -> Statistics:
        """N with the raw v."""
        return "raw"

    @property
    def searches(self) -> bool:
        """The norm is fixed."""
        return False

    def propose(self, view: SiteView, count: Choice) -> Proposal:
        """The first `count` right singular vectors of N; for "auto" those that gain on the held-out fold."""
        n = view.n()
        most = min(n.shape)
        omega, values = gradmax(n, most if count == "auto" else min(count, most), precision=view.precision)
        notes: tuple[str, ...] = ()
        if count != "auto" and len(omega) < count:
            notes = (f"asked for {count} neurons, and there are {len(omega)} directions (the rank of N): added those",)
        toward = omega @ n.T
        if count == "auto" and len(omega):
            chosen = directions_that_gain(view, toward * 1e-9, view.split(omega))
            omega, toward = omega[chosen], toward[chosen]
        omega, _ = to_norm(omega, FIXED_NORM if self.norm == "linear" else FIXED_NORM**0.5)
        alpha = torch.zeros_like(toward)
        offset = {}
        if len(omega):
            slopes = view.slopes(toward)
            offset = slopes.offset
            alpha, note = nearly_zero(toward, slopes, view.site.normalised)
            notes = (*notes, *note)
        return Proposal(
            alpha, view.split(omega), singular_values=values, scaling="fixed", rate_neurons=0.0, offset=offset,
            notes=notes,
        )  # fmt: skip
