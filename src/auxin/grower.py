"""`Grower`: growth while a model trains, in anyone's loop."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from auxin.collect import Measurement, Stream, consumer_sums, iterated, split_folds, with_held_out
from auxin.costs import multiply_adds, parameters
from auxin.errors import CheckpointError
from auxin.features import blank_change
from auxin.growth import Request, as_list, carry_out, measure, psi, resolve_sites, samples_wanted, trainable
from auxin.history import Growth, History
from auxin.isolation import isolated
from auxin.methods import Method, Tiny, resolve
from auxin.objectives import as_task
from auxin.optimizers import check as check_optimizers
from auxin.policy import Policy, checked_metric
from auxin.slack import Slack, measure_slack, widths_doubled
from auxin.structure import Site, Sites
from auxin.surgery import apply, plain, scratch

Numbers = Any


@dataclass
class State:
    """What a Grower remembers between calls, all of it JSON."""

    calls: int = 0
    idle: int = 0
    finished: bool = False
    best: float | None = None
    waited: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    narrow: dict[str, int] = field(default_factory=dict)
    baseline: float | None = None


class Grower:
    """Grows a model while it trains.

    >>> import auxin
    >>> model = nn.Sequential(nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 2))
    >>> grower = Grower(model, nn.functional.cross_entropy, policy=Policy(neurons=2))
    >>> batch = torch.randn(64, 4), torch.randint(2, (64,))
    >>> growth = grower.step([batch])
    >>> grower.history.events == [growth]
    True

    Args:
        model: the model that the loop trains, unwrapped.
        loss: `loss(output, target)`, mean-reduced, or an `auxin.Objective`.
        optimizer: the optimizer (or several) whose state is to follow.
        method: a name or an instance, as for `grow`.
        policy: when, how many, how far.
        sites: what `find_sites` gave, names, or None for every site.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        method: str | Method = "sprout",
        policy: Policy | None = None,
        sites: Sites | Sequence[str] | None = None,
    ) -> None:
        self.model = model
        self.task = as_task(loss)
        self.optimizers = as_list(optimizer)
        self.method = resolve(method)
        self.policy = policy or Policy()
        self.history = History()
        self.slack: list[Slack] = []
        self._wanted = sites
        self._sites: Sites | None = sites if isinstance(sites, Sites) else None
        self._state = State()
        plain(model)
        if self.optimizers:
            check_optimizers(plain(model), [], self.optimizers)

    @property
    def finished(self) -> bool:
        """Whether growth has ended for good; `step` then costs nothing."""
        return self._state.finished

    def step(
        self, batches: Iterable[Any], metric: float | None = None, held_out: Iterable[Any] | None = None
    ) -> Growth | None:
        """One call of the policy; grows when and where it says.

        Args:
            batches: an iterable of training batches, iterated only at an opportunity, and as far as needed.
            metric: what the policy watches, if it waits for a plateau.
            held_out: batches that the model is not trained on, for everything that is chosen: whether a width is
                enough, amplitudes, dampings. None holds out half of the rows of `batches`; a model that has learned
                those by heart then seems to miss every neuron.

        Returns:
            What was grown, or None.
        """
        state = self._state
        value = checked_metric(self.policy, metric)
        state.calls += 1
        state.finished = state.finished or self.policy.over(state.calls, state.idle)
        if state.finished or not self._due(value):
            return None
        growth = self._opportunity(batches, held_out)
        if growth is None or growth.added == 0:
            state.idle += 1
            return None if growth is None or not growth.changed else self._remember(growth, value)
        state.idle = 0
        return self._remember(growth, value)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, to resume with `load_state_dict` (the model is saved apart)."""
        return {**vars(self._state), "shares": dict(self._state.shares), "narrow": dict(self._state.narrow), "history": self.history.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        values = dict(state)
        try:
            history = History.from_json(values.pop("history"))
            loaded = State(**values)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"not a state that Grower.state_dict gave: {error}") from error
        self._state, self.history = loaded, history

    def _remember(self, growth: Growth, metric: float | None) -> Growth:
        growth = replace(growth, call=self._state.calls, metric=metric)
        self.history.append(growth)
        self._state.waited = 0
        self._state.narrow.clear()
        return growth

    def _due(self, metric: float | None) -> bool:
        state, policy = self._state, self.policy
        if metric is not None and policy.patience is not None:
            improved = policy.improved(metric, state.best)
            state.best = metric if improved else state.best
            state.waited = 0 if improved else state.waited + 1
            if state.waited < policy.patience:
                return False
        return policy.due(state.calls)

    def _opportunity(self, batches: Iterable[Any], held_out: Iterable[Any] | None) -> Growth | None:
        target = plain(self.model)
        others = None if held_out is None else list(iterated(held_out))
        with isolated(target):
            measurement, sites = self._look(target, batches, others)
            drawn = [kept.batch for kept in measurement.kept]
            numbers = self._numbers(measurement, sites, others)
        if not numbers:
            return None
        request = Request(self.method, numbers, sites, None, None, others, insists=False)
        return carry_out(target, drawn, self.task, request, self.optimizers)

    def _look(
        self, target: nn.Module, batches: Iterable[Any], others: list[Any] | None
    ) -> tuple[Measurement, Sites]:
        stream = Stream(batches, self.task, target, int(torch.randint(2**31, ())))
        kept = [stream.first()]
        known = self._sites if self._sites is not None else self._wanted
        self._sites = sites = trainable(target, resolve_sites(target, self.task.inputs(kept[0].batch), known), False)
        wanted = self.policy.samples or samples_wanted(target, sites) * (2 if others is None else 1)
        stream.more(kept, wanted)
        return Measurement(target, self.task, sites, kept), sites

    def _numbers(self, measurement: Measurement, sites: Sites, others: list[Any] | None) -> Numbers:
        """What to ask of `grow` now; nothing where no growth is due."""
        if self.policy.share_rise is not None and not self._risen(measurement):
            return None
        if self.policy.neurons != "slack":
            numbers: Numbers = self.policy.neurons
            return self._within(measurement, sites, numbers)
        young = {site.name for site in sites if site.width < self.policy.smallest}
        narrow = set(young)
        if not young or not self.policy.tied:
            narrow |= self._too_narrow(measurement, [s for s in sites if s.name not in young], others)
        numbers = widths_doubled(list(sites), narrow, self.policy.tied, self.policy.largest)
        return self._within(measurement, sites, numbers)

    def _too_narrow(self, measurement: Measurement, sites: list[Site], others: list[Any] | None) -> set[str]:
        if not sites:
            return set()
        if others is None:
            split_folds(measurement, torch.Generator().manual_seed(measurement.kept[0].seed))
        else:
            with_held_out(measurement, others)
        sums = consumer_sums(measurement, ["estimate"])
        self.slack = measure_slack(measurement, sums, sites)
        streaks = self._state.narrow
        for slack in self.slack:
            narrow = slack.too_narrow(self.policy.rho, self.policy.errors)
            streaks[slack.site] = streaks.get(slack.site, 0) + 1 if narrow else 0
        return {slack.site for slack in self.slack if streaks[slack.site] >= self.policy.confirm}

    def _risen(self, measurement: Measurement) -> bool:
        """Whether some site's share of the bottleneck has risen enough since the last growth."""
        for kept in measurement.kept:
            kept.rows = {"estimate": None}
        views = measure(measurement, Tiny(), torch.Generator(), ["estimate"])
        shares = {}
        for name, view in views.items():
            desired = [float(view.consumer_sums[c, "estimate"].mean("v_square")) for c in view.site.consumers]
            shares[name] = (psi(view) or 0.0) / max(sum(desired), 1e-300)
        before, rise = self._state.shares, self.policy.share_rise or 0.0
        risen = any(share >= before[name] + rise for name, share in shares.items() if name in before)
        if risen or not before:
            self._state.shares = shares
        return risen

    def _within(self, measurement: Measurement, sites: Sites, numbers: Numbers) -> Numbers:
        """Numbers cut down so that the model stays within the policy's sizes."""
        limits = self.policy.parameters, self.policy.multiply_adds
        if not isinstance(numbers, (int, Mapping)) or isinstance(numbers, bool) or not any(limits):
            return numbers
        each = dict(numbers) if isinstance(numbers, Mapping) else {site.name: numbers for site in sites}
        low, high = 0.0, 1.0
        if self._fits(measurement, sites, each):
            return each
        for _ in range(12):
            middle = (low + high) / 2
            fits = self._fits(measurement, sites, {name: int(n * middle) for name, n in each.items()})
            low, high = (middle, high) if fits else (low, middle)
        cut = {name: int(number * low) for name, number in each.items()}
        return {name: number for name, number in cut.items() if number}

    def _fits(self, measurement: Measurement, sites: Sites, numbers: dict[str, int]) -> bool:
        copy = scratch(measurement.model)
        for site in sites:
            count = -(-numbers.get(site.name, 0) // site.group) * site.group
            producer = copy.get_submodule(site.producers[0])
            features = producer.get_parameter("weight").shape[1:].numel() + (getattr(producer, "bias", None) is not None)
            if count:
                apply(copy, [blank_change(replace(site, model=copy), torch.zeros(count, features))])
        if self.policy.parameters is not None and parameters(copy) > self.policy.parameters:
            return False
        example = self.task.inputs(measurement.kept[0].batch)
        return self.policy.multiply_adds is None or multiply_adds(copy, example) <= self.policy.multiply_adds
