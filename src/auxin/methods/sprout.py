"""Sprout, our default: TINY's directions at the usual scale, their fan-out refitted on what they really do."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from auxin.collect import Fold
from auxin.errors import check_number
from auxin.features import FeatureMoments
from auxin.layers.base import has_bias
from auxin.linalg import new_neurons, refit
from auxin.methods.base import (
    Choice,
    Method,
    Proposal,
    SiteView,
    Statistics,
    directions_that_gain,
    register,
)

DAMPINGS = (0.001, 0.01, 0.1, 1.0)
USUAL = 0.1
"""The damping where nothing is held out to choose it on."""

FAINT = 1e-6
"""Mean square of a feature over that of its pre-activation, below which a refit gives it next to no fan-out."""
LEAST_SQUARE = 1e-10
"""Mean square below which any feature is taken for dead: behind sigmoids far below 0 fan-outs of 1e20 were seen."""
REACH = 2.0
LEAST_REACH = 0.1
"""How far the mean pre-activation may be from 0: in standard deviations, plus a share of the norm of the weights."""


@register
@dataclass(frozen=True)
class Sprout(Method):
    """TINY's direction, at the fan-in norm of torch's usual initialisation, with a refitted fan-out.

    damping: of S, relative to its diagonal; None chooses it by the gain on the held-out fold.
    best_update: also move the old weights of the consumers by Prop. 3.1, and refit the fan-out on what that leaves.
    rescale: consumers behind a batch norm keep the norms of their filters, and so their effective learning rate.
    """

    damping: float | None = None
    best_update: bool = False
    rescale: bool = True
    largest: float = 1.0
    name = "sprout"

    def __post_init__(self) -> None:
        if self.damping is not None:
            check_number("damping", self.damping)
        check_number("largest", self.largest)

    @property
    def statistics(self) -> Statistics:
        """v less the best update's move: directions that the old weights do not have."""
        return "projected"

    @property
    def chooses(self) -> bool:
        """The dampings."""
        return True

    @property
    def updates_weights(self) -> bool:
        """With a best update."""
        return self.best_update

    @property
    def update_damping(self) -> float:
        """The best update's Gram matrix is damped mildly: its move is noise where inputs barely vary."""
        return 0.01

    def propose(self, view: SiteView, count: Choice) -> Proposal:
        """Directions by Prop. 3.2, filled up with random ones where there are fewer than asked."""
        updates = dict(view.updates) if self.best_update else {}
        alpha, omega, values = self._directions(view, count)
        if count == "auto" and len(alpha):
            alpha = alpha[directions_that_gain(view, alpha, view.split(omega))]
        notes: tuple[str, ...] = ()
        alpha = usual_scale(view, self._signed(view, alpha))
        if count != "auto" and len(alpha) < count:
            notes = (f"{count - len(alpha)} of {count} fan-ins are random: S^-1/2 N has rank {len(alpha)}",)
            random = view.random_fan_ins(count - len(alpha))
            alpha = torch.cat([alpha, within_reach(view.s(), random) if view.constant else random])
        proposal = Proposal(
            alpha,
            {},
            updates,
            singular_values=values,
            scaling="fan_out",
            rescale=self.rescale,
            largest=self.largest,
            notes=notes,
        )
        return refitted(view, proposal)

    def _directions(self, view: SiteView, count: Choice) -> tuple[Tensor, Tensor, Tensor]:
        """The neurons whose move gains most on the held-out fold, over the dampings."""
        wanted = None if count == "auto" else count
        tried = [self.damping] if self.damping is not None else DAMPINGS if "held_out" in view.folds else [USUAL]
        found = [
            new_neurons(view.s(), view.n(), wanted, damping, view.constant, precision=view.precision)
            for damping in tried
        ]
        gains = [best_gain(view, neurons.alpha, neurons.omega) for neurons in found] if len(found) > 1 else [0.0]
        best = found[gains.index(max(gains))]
        return best.alpha, best.omega, best.singular_values

    def _signed(self, view: SiteView, alpha: Tensor) -> Tensor:
        """Each fan-in with the sign on whose side its feature goes further along with v."""
        if len(alpha) == 0:
            return alpha
        slopes = view.slopes(alpha, view.updates)
        plus, minus = (
            torch.stack([part.flatten(1).square().sum(1) for part in side.values()]).sum(0)
            for side in (slopes.plus, slopes.minus)
        )
        return alpha * torch.where(minus > 1.001 * plus, -1.0, 1.0).to(alpha)[:, None]


def best_gain(view: SiteView, alpha: Tensor, omega: Tensor) -> float:
    """The fall of the held-out bottleneck by the linear move, at its best common amplitude."""
    if len(alpha) == 0:
        return 0.0
    inner = float(((alpha @ view.n("held_out")) * omega).sum())
    square = float(((alpha @ view.s("held_out") @ alpha.T) * (omega @ omega.T)).sum())
    return inner**2 / square if inner > 0 and square > 0 else 0.0


def usual_scale(view: SiteView, alpha: Tensor) -> Tensor:
    """Fan-ins at the norm of the usual initialisation; the bias scales along with the weights.

    Those that are a bias and no weights, as constant inputs give, are left out: such a neuron never learns to read.
    """
    weights = alpha[:, :-1] if view.constant else alpha
    norms = weights.norm(dim=1)
    reads = norms > 1e-12 * alpha.norm(dim=1)
    scaled = alpha[reads] * (view.producer_rule.usual_norm(view.producer) / norms[reads, None])
    return within_reach(view.s(), scaled) if view.constant else scaled


def within_reach(s: Tensor, alpha: Tensor) -> Tensor:
    """Fan-ins whose bias keeps the mean pre-activation within two standard deviations of 0.

    Where inputs barely vary, a direction is nearly all bias, and bringing its weights to the usual norm would make
    that bias as large as it likes (6.7e6 behind a dead layer), for a neuron that never bends.
    """
    level = s[-1, -1]
    if not level > 0:
        return alpha
    mean = s[-1, :-1] / level
    covariance = s[:-1, :-1] / level - torch.outer(mean, mean)
    weights, bias = alpha[:, :-1], alpha[:, -1]
    centre = weights @ mean + bias
    spread = ((weights @ covariance) * weights).sum(1).clamp(min=0).sqrt()
    reach = REACH * spread + LEAST_REACH * weights.norm(dim=1)
    return torch.cat([weights, (bias + centre.clamp(-reach, reach) - centre)[:, None]], dim=1)


def refitted(view: SiteView, proposal: Proposal) -> Proposal:
    """The fan-out that explains most of v by real features, its damping chosen on the held-out fold."""
    if proposal.count == 0:
        omega = view.split(proposal.alpha.new_zeros(0, view.most))
        return replace(proposal, omega=omega, rate_neurons=0.0, rate_update=view.update_rate(proposal.updates))
    moments = view.feature_moments(proposal.alpha, proposal.updates)
    omega, updates, intercepts, rate = {}, dict(proposal.updates), {}, 0.0
    update_rate = view.update_rate(proposal.updates)
    for name, reading in zip(view.site.consumers, view.site.readings, strict=True):
        module = view.measurement.model.get_submodule(name)
        shifts = has_bias(module) or reading.norm is not None
        fit = best_refit(view, name, moments, shifts, faintest(view, proposal.alpha, view.shape(name)[1]))
        rate += float((fit * moments[name, "estimate"].raw_f[:, : fit.shape[1]]).sum())
        outputs, offsets = view.shape(name)
        omega[name] = fit[:, : proposal.count * offsets].reshape(outputs, -1, offsets).transpose(0, 1)
        if shifts and has_bias(module):
            features = view.consumer_sums[name, "estimate"]["b1_b1"].shape[0]
            base = updates.get(name, fit.new_zeros(outputs, features)).clone()
            base[:, -1] += fit[:, -1]
            updates[name] = base
        elif shifts:
            intercepts[name] = fit[:, -1]
    return replace(
        proposal, omega=omega, updates=updates, intercepts=intercepts, rate_neurons=rate, rate_update=update_rate
    )


def faintest(view: SiteView, alpha: Tensor, offsets: int) -> Tensor:
    """The mean square below which a feature counts for nothing, (K * O,): against its pre-activation, or at all."""
    squares = ((alpha @ view.s()) * alpha).sum(1).clamp(min=0)
    return (FAINT * squares + LEAST_SQUARE).repeat_interleave(offsets)


def best_refit(
    view: SiteView,
    name: str,
    moments: dict[tuple[str, Fold], FeatureMoments],
    intercept: bool,
    floor: Tensor,
) -> Tensor:
    """(M, K * O) and, with an intercept, one more column."""
    size = None if intercept else -1
    estimate = moments[name, "estimate"]
    f_f, v_f = estimate.f_f[:size, :size], estimate.v_f[:, :size]
    tried = [refit(ridged(f_f, damping, floor), v_f, 0.0, intercept) for damping in DAMPINGS]
    if (name, "held_out") not in moments:
        return tried[DAMPINGS.index(USUAL)]
    held = moments[name, "held_out"]
    gains = [
        float(2 * (fit * held.v_f[:, :size]).sum() - ((fit @ held.f_f[:size, :size]) * fit).sum()) for fit in tried
    ]
    return tried[gains.index(max(gains))]


def ridged(f_f: Tensor, damping: float, floor: Tensor) -> Tensor:
    """E[phi phi^T] with each feature's own mean square, times the damping, and its floor added to the diagonal.

    A feature that is nearly constant would otherwise take a huge fan-out, and an intercept as huge against it, for
    what little it varies: both are out of tune as soon as the layers before it move. So would one that is nearly zero
    (a sigmoid far below 0). A constant at the end is left alone.
    """
    ridge = f_f.new_zeros(len(f_f))
    ridge[: len(floor)] = f_f.diagonal()[: len(floor)] * damping + floor
    return f_f + torch.diag(ridge)
