"""TINY, the paper's method to the letter (Prop. 3.1 and 3.2), every difference from GradMax a switch."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from auxin.errors import check_number, check_option
from auxin.linalg import new_neurons
from auxin.methods.base import (
    Choice,
    Method,
    Proposal,
    SiteView,
    Statistics,
    better_signs,
    directions_that_gain,
    flat,
    nearly_zero,
    register,
)

FIXED_NORM = 1e-3


@register
@dataclass(frozen=True)
class Tiny(Method):
    """The optimal neurons of Prop. 3.2, entered at the paper's scales.

    damping: added to S and to the best update's Gram matrix, relative to their diagonals; 0 is the pseudo-inverse.
    best_update: apply Prop. 3.1's move of the consumers beside the neurons.
    normalisation: None is the main text (one amplitude g; sqrt(g) on both sides, g on the update); "fixed" brings
        both sides to a mean square norm of 1e-3 (E.3.1), with no search; "unit" to 1, with a search in [-L, L] for
        the neurons and one for the update (E.3.2).
    projection: look at what the best update leaves of v; without, at v itself (B.1, first difference).
    whiten: measure moves at the consumer's output; without, in the space of weights (second difference).
    zero: set "fan_in" or "fan_out" to zero (A.5; third difference).
    """

    damping: float = 0.0
    best_update: bool = True
    normalisation: Literal["fixed", "unit"] | None = None
    projection: bool = True
    whiten: bool = True
    zero: Literal["fan_in", "fan_out"] | None = None
    name = "tiny"

    def __post_init__(self) -> None:
        check_option("normalisation", self.normalisation, (None, "fixed", "unit"))
        check_option("zero", self.zero, (None, "fan_in", "fan_out"))
        check_number("damping", self.damping)

    @property
    def statistics(self) -> Statistics:
        """v less the best update's move, where projected."""
        return "projected" if self.projection else "raw"

    @property
    def update_damping(self) -> float:
        """The same as of S."""
        return self.damping

    @property
    def searches(self) -> bool:
        """Unless the norm is fixed, or nothing would move the output."""
        return self.normalisation != "fixed" and (self.zero is None or self.best_update)

    @property
    def updates_weights(self) -> bool:
        """With a best update."""
        return self.best_update

    def propose(self, view: SiteView, count: Choice) -> Proposal:
        """All R neurons for "auto" (those that gain on the held-out fold), else the first `count`."""
        updates = dict(view.updates) if self.best_update else {}
        alpha, omega, values = self._neurons(view, count)
        notes: tuple[str, ...] = ()
        if count != "auto" and len(alpha) < count:
            notes = (
                f"asked for {count} neurons, and there are {len(alpha)} directions (the rank of S^-1/2 N): added those",
            )
        split = view.split(omega)
        if count == "auto" and len(alpha):
            chosen = directions_that_gain(view, alpha, split)
            alpha, split = alpha[chosen], {name: part[chosen] for name, part in split.items()}
        proposal = Proposal(alpha, split, updates, singular_values=values, notes=notes)
        return self._normalised(self._signed(view, proposal))

    def _neurons(self, view: SiteView, count: Choice) -> tuple[Tensor, Tensor, Tensor]:
        wanted = None if count == "auto" else count
        if self.whiten:
            found = new_neurons(view.s(), view.n(), wanted, self.damping, view.constant, precision=view.precision)
        else:
            found = new_neurons(torch.eye(view.features, dtype=torch.float64, device=view.device), view.n(), wanted)
        return found.alpha, found.omega, found.singular_values

    def _signed(self, view: SiteView, proposal: Proposal) -> Proposal:
        """The better sign of each neuron, and the first-order slopes of the loss on real data."""
        update = view.update_rate(proposal.updates)
        if proposal.count == 0:
            return replace(proposal, rate_neurons=0.0, rate_update=update)
        signs, slopes, rates = better_signs(view, proposal.alpha, proposal.omega)
        alpha = proposal.alpha * signs[:, None]
        omega = {name: part * signs[:, None, None] for name, part in proposal.omega.items()}
        notes = proposal.notes
        if self.zero == "fan_in":
            alpha, note = nearly_zero(alpha, slopes, view.site.normalised)
            notes = (*notes, *note)
        if self.zero == "fan_out":
            omega = {name: torch.zeros_like(part) for name, part in omega.items()}
        rate = 0.0 if self.zero else float(rates.sum())
        offset = slopes.offset
        return replace(
            proposal, alpha=alpha, omega=omega, rate_neurons=rate, rate_update=update, offset=offset, notes=notes,
            signed=rate + update <= 0, scaling="sqrt" if self.searches else "fixed",
        )  # fmt: skip

    def _normalised(self, proposal: Proposal) -> Proposal:
        if self.normalisation is None or (proposal.count == 0 and not proposal.updates):
            return proposal
        target = FIXED_NORM**0.5 if self.normalisation == "fixed" else 1.0
        alpha, factor_in = (proposal.alpha, 1.0) if self.zero == "fan_in" else to_norm(proposal.alpha, target)
        _, factor_out = to_norm(flat(proposal.omega), target) if proposal.count else (None, 1.0)
        omega = {name: part * factor_out for name, part in proposal.omega.items()}
        rate = None if proposal.rate_neurons is None else proposal.rate_neurons * factor_in * factor_out
        if not self.searches:
            return replace(proposal, alpha=alpha, omega=omega, rate_neurons=rate, scaling="fixed", signed=False)
        per_neuron = max(1, proposal.count)
        norm = (sum(float(u.square().sum()) for u in proposal.updates.values()) / per_neuron) ** 0.5
        shrink = 1.0 / norm if norm > 0 else 1.0
        updates = {name: update * shrink for name, update in proposal.updates.items()}
        rate_update = None if proposal.rate_update is None else proposal.rate_update * shrink
        return replace(
            proposal, alpha=alpha, omega=omega, updates=updates, rate_neurons=rate, rate_update=rate_update,
            scaling="both", signed=True,
        )  # fmt: skip


def to_norm(vectors: Tensor, target: float) -> tuple[Tensor, float]:
    """Vectors (K, ...) times the factor that brings their root mean square norm to `target`; and that factor."""
    norm = float(vectors.flatten(1).square().sum(1).mean().sqrt()) if len(vectors) else 0.0
    factor = target / norm if norm > 0 else 1.0
    return vectors * factor, factor
