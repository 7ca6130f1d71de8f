"""What a growth method sees of a site, and what it answers. A method changes nothing.

A new method is one file: a frozen dataclass with `name`, `statistics` and `propose`, and one call of `register`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from auxin.collect import Fold, Measurement
from auxin.errors import InputError, unknown
from auxin.features import FeatureMoments, Slopes, feature_moments, one_sided_slopes
from auxin.layers import Rule, rule_for
from auxin.layers.base import has_bias
from auxin.linalg import convolution_rank
from auxin.statistics import Sums
from auxin.structure import Site

Statistics = Literal["none", "raw", "projected"]
Scaling = Literal["sqrt", "both", "fan_out", "fixed"]
Choice = int | Literal["auto"]
TINY_FAN_IN = 1e-6
LARGEST = 4.0**9
"""The largest amplitude that a search looks at, L of `sec:AMplFactNormalization`."""


@dataclass(frozen=True)
class Proposal:
    """Neurons for one site, strongest first, and what goes with them.

    Shapes: `alpha` (K, F0); `omega`, a consumer, (K, M, O); `updates`, a consumer, (M, F1). `scaling` says how an
    amplitude g enters: "sqrt" (sqrt|g| alpha, +-sqrt|g| omega, g update), "both" (g alpha, g omega; the update has a
    search of its own), "fan_out" (alpha, g omega, g update), "fixed" (as they are, nothing is searched).
    `intercepts`: a shift of a consumer's output, (M,), for consumers without a bias that a batch norm follows.
    `signed`: whether negative amplitudes are worth a try; `largest`: the largest one that is. `rescale`: consumers
    behind a batch norm keep the norms of their filters.
    """

    alpha: Tensor
    omega: dict[str, Tensor]
    updates: dict[str, Tensor] = field(default_factory=dict)
    intercepts: dict[str, Tensor] = field(default_factory=dict)
    singular_values: Tensor = field(default_factory=lambda: torch.zeros(0))
    scaling: Scaling = "sqrt"
    signed: bool = False
    largest: float = LARGEST
    rescale: bool = False
    rate_neurons: float | None = None
    rate_update: float | None = None
    offset: dict[str, Tensor | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """K."""
        return len(self.alpha)


@dataclass(frozen=True)
class SiteView:
    """A read-only view of one site: its moments, and two questions that cost a pass over the kept batches."""

    site: Site
    measurement: Measurement
    generator: torch.Generator
    updates: dict[str, Tensor]
    """Prop. 3.1's best update of each consumer, (M, F1), from the estimate fold."""
    consumer_sums: dict[tuple[str, Fold], Sums]
    site_means: dict[tuple[str, Fold], dict[str, Tensor]]
    precision: float | None = None
    """Relative error of the moments' products, for thresholds; None for that of float64."""
    _known: dict[tuple[str, Fold], Tensor] = field(default_factory=dict, repr=False)

    @property
    def folds(self) -> Sequence[Fold]:
        """The folds that hold samples."""
        return ("estimate", "held_out") if self.measurement.count("held_out") else ("estimate",)

    @property
    def producer_rule(self) -> Rule:
        """The rule of the (first) producer's family."""
        return rule_for(self.producer)

    @property
    def producer(self) -> torch.nn.Module:
        """The (first) producer."""
        return self.measurement.model.get_submodule(self.site.producers[0])

    @property
    def constant(self) -> bool:
        """Whether the last feature of b0 is the constant 1 of a bias."""
        return has_bias(self.producer)

    @property
    def features(self) -> int:
        """F0."""
        weight = self.producer.get_parameter("weight")
        return weight.shape[1:].numel() + self.constant

    def shape(self, consumer: str) -> tuple[int, int]:
        """(M, O) of a consumer."""
        module = self.measurement.model.get_submodule(consumer)
        reading = self.site.readings[self.site.consumers.index(consumer)]
        return rule_for(module).outputs(module), rule_for(module).offsets(module, reading)

    @property
    def most(self) -> int:
        """G, the number of entries of a fan-out over all consumers: no method of moments has more directions."""
        return sum(outputs * offsets for outputs, offsets in map(self.shape, self.site.consumers))

    def s(self, fold: Fold = "estimate") -> Tensor:
        """S (F0, F0): r times the consumers' own; the common one where they agree, else their sum."""
        if ("s", fold) not in self._known:
            means = self.site_means[self.site.name, fold]
            ranks = [convolution_rank(self.shape(name)[1], self.features) for name in self.site.consumers]
            parts = [means[f"b0_b0:{name}"] for name in self.site.consumers]
            parts = [part if rank == 1 else part * rank for part, rank in zip(parts, ranks, strict=True)]
            common = all(torch.allclose(part, parts[0], rtol=1e-6) for part in parts[1:])
            self._known["s", fold] = parts[0] if common else torch.stack(parts).sum(0)
        return self._known["s", fold]

    def n(self, fold: Fold = "estimate") -> Tensor:
        """N (F0, G): the columns of all consumers side by side."""
        if ("n", fold) not in self._known:
            means = self.site_means[self.site.name, fold]
            self._known["n", fold] = torch.cat([means[f"b0_v:{name}"] for name in self.site.consumers], dim=1)
        return self._known["n", fold]

    def split(self, omega: Tensor) -> dict[str, Tensor]:
        """A fan-out (K, G) by consumer, each (K, M, O)."""
        shapes = [self.shape(name) for name in self.site.consumers]
        parts = omega.split([outputs * offsets for outputs, offsets in shapes], dim=1)
        named = zip(self.site.consumers, parts, shapes, strict=True)
        return {name: part.reshape(-1, *shape) for name, part, shape in named}

    def slopes(self, alpha: Tensor, updates: dict[str, Tensor] | None = None) -> Slopes:
        """One-sided derivatives of E<v, phi> at zero fan-in along `alpha`, v less the moves `updates`."""
        return one_sided_slopes(self.measurement, self.site, alpha, updates)

    def feature_moments(
        self, alpha: Tensor, updates: dict[str, Tensor] | None = None
    ) -> dict[tuple[str, Fold], FeatureMoments]:
        """Moments of real features on every fold, v less the moves `updates`."""
        return feature_moments(self.measurement, self.site, alpha, updates, self.folds)

    def update_rate(self, updates: dict[str, Tensor]) -> float:
        """E<v, dW b1>: the slope of the loss's fall along a change of the consumers' weights."""
        means = {name: self.consumer_sums[name, "estimate"].mean("v_b1") for name in updates}
        return sum(float((updates[name] * mean).sum()) for name, mean in means.items())

    def random_fan_ins(self, count: int) -> Tensor:
        """Fan-ins as torch's usual initialisation draws them, U(-1, 1) / sqrt(fan-in), bias included."""
        bound = max(1, self.features - self.constant) ** -0.5
        draw = torch.rand(count, self.features, generator=self.generator, dtype=torch.float64)
        return ((2 * draw - 1) * bound).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(iter(self.measurement.model.parameters())).device


class Method(ABC):
    """One way of choosing new neurons. Subclasses are frozen dataclasses whose fields are the switches."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def statistics(self) -> Statistics:
        """What must be measured first: nothing, S and N with the raw v, or with the projected one."""

    @abstractmethod
    def propose(self, view: SiteView, count: Choice) -> Proposal:
        """Neurons for one site: `count` of them, or as many as are worth it."""

    @property
    def searches(self) -> bool:
        """Whether its amplitude is searched where none is given."""
        return True

    @property
    def chooses(self) -> bool:
        """Whether it chooses anything on the held-out fold beside the amplitude."""
        return False

    @property
    def updates_weights(self) -> bool:
        """Whether it moves the old weights too, so that growth by no neuron is something."""
        return False

    @property
    def update_damping(self) -> float:
        """What the best update's Gram matrix is damped with."""
        return 0.0


METHODS: dict[str, Callable[[], Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Make a method known by its name; one call in the method's file."""
    METHODS[method.name] = method
    return method


def resolve(method: "str | Method") -> Method:
    """A method from its name or itself."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise InputError(f"method is {method!r}; accepted: a name ({', '.join(sorted(METHODS))}) or an instance")
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    return METHODS[method]()


def flat(omega: dict[str, Tensor]) -> Tensor:
    """Fan-outs by consumer, (K, M, O) each, side by side: (K, G)."""
    return torch.cat([part.flatten(1) for part in omega.values()], dim=1)


def better_signs(view: SiteView, alpha: Tensor, omega: dict[str, Tensor]) -> tuple[Tensor, Slopes, Tensor]:
    """The common sign of each (alpha, omega) with the larger one-sided rate; the slopes, and the rates, (K,).

    Where the activation is smooth at 0 both rates agree and the sign stays.
    """
    slopes = view.slopes(alpha)
    plus = sum((omega[name] * slopes.plus[name]).flatten(1).sum(1) for name in omega)
    minus = -sum((omega[name] * slopes.minus[name]).flatten(1).sum(1) for name in omega)
    plus, minus = torch.as_tensor(plus), torch.as_tensor(minus)
    tolerance = 1e-3 * torch.maximum(plus.abs(), minus.abs())
    signs = torch.where(minus > plus + tolerance, -1.0, 1.0).to(alpha)
    return signs, slopes, torch.where(signs < 0, minus, plus)


def nearly_zero(toward: Tensor, slopes: Slopes, normalised: bool) -> tuple[Tensor, tuple[str, ...]]:
    """Fan-ins of 0, or of norm 1e-6 where a kink at 0 would leave them dead for ever; and a note.

    The reference implementation of GradMax takes the derivative at 0 to be 1, to the same effect. Behind an instance
    norm, which takes the mean away, a mean over positions has no slope at 0 either.
    """
    if all(_opposite(slopes.plus[name], slopes.minus[name]) for name in slopes.plus) and not normalised:
        return torch.zeros_like(toward), ()
    length = toward.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return toward / length * TINY_FAN_IN, ("a kink or a norm at 0: fan-ins of norm 1e-6 in place of 0",)


def _opposite(plus: Tensor, minus: Tensor) -> bool:
    """Whether two slopes are each other's negative, to the precision at which they are measured."""
    largest = float(torch.maximum(plus.abs().max(), minus.abs().max()))
    return torch.allclose(plus, -minus, rtol=1e-2, atol=1e-3 * largest)


def directions_that_gain(view: SiteView, alpha: Tensor, omega: dict[str, Tensor]) -> Tensor:
    """Indices of the neurons whose move lowers the bottleneck on the held-out fold too, at least one where any does."""
    if "held_out" not in view.folds:
        return torch.arange(len(alpha))
    s, n, flat_omega = view.s("held_out"), view.n("held_out"), flat(omega)
    inner = ((alpha @ n) * flat_omega).sum(1)
    square = ((alpha @ s) * alpha).sum(1) * flat_omega.square().sum(1)
    return torch.nonzero(2 * inner - square > 0).flatten()
