"""`Grower`: growth while a model trains, in anyone's loop."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from auxin.collect import Measurement, Stream, iterated, split_folds, with_held_out
from auxin.errors import CheckpointError, InputError, ModelChangedError
from auxin.growth import (
    Request,
    as_list,
    fresh_seed,
    measure,
    planned_growth,
    psi,
    resolve_sites,
    samples_wanted,
    trainable,
)
from auxin.history import Growth, History
from auxin.isolation import isolated
from auxin.limits import within_limits
from auxin.methods import Method, Tiny, resolve
from auxin.moments import consumer_sums
from auxin.objectives import as_task
from auxin.optimizers import check as check_optimizers
from auxin.policy import Policy, checked_metric
from auxin.select import asked_numbers, site_names
from auxin.slack import Slack, measure_slack, widths_doubled
from auxin.structure import Change, Site, Sites
from auxin.surgery import apply, plain


@dataclass
class State:
    """What a Grower remembers between calls, all of it JSON."""

    calls: int = 0
    idle: int = 0
    best: float | None = None
    waited: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    narrow: dict[str, int] = field(default_factory=dict)
    baseline: float | None = None


def checked(state: State) -> State:
    """A state whose fields are of the right types; TypeError names one that is not."""
    for name, kinds in {"calls": int, "idle": int, "waited": int, "shares": dict, "narrow": dict}.items():
        if not isinstance(getattr(state, name), kinds):
            raise TypeError(f"{name} is {getattr(state, name)!r}")
    return state


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
        if not isinstance(policy, Policy | None):
            raise InputError(f"policy is {policy!r}; accepted: auxin.Policy(...) or None for the default one")
        self.policy = policy or Policy()
        if sites is not None and not isinstance(sites, Sites):
            site_names(sites)
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
        return self.policy.over(self._state.calls + 1, self._state.idle)

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
        value = checked_metric(self.policy, metric)
        with self._whole_or_not_at_all():
            return self._step(batches, value, held_out)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, to resume with `load_state_dict` (the model is saved apart)."""
        return {**asdict(self._state), "history": self.history.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        try:
            values = dict(state)
            history = History.from_json(values.pop("history"))
            loaded = checked(copy.deepcopy(State(**values)))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not a state that Grower.state_dict gave: {error}") from error
        self._state, self.history = loaded, history

    @contextmanager
    def _whole_or_not_at_all(self) -> Iterator[None]:
        """A call that fails is as if it had not been made."""
        before, events = {**vars(self), "_state": copy.deepcopy(self._state)}, list(self.history.events)
        try:
            yield
        except BaseException:
            vars(self).update(before)
            self.history.events[:] = events
            raise

    def _step(self, batches: Iterable[Any], metric: float | None, held_out: Iterable[Any] | None) -> Growth | None:
        state, over = self._state, self.finished
        state.calls += 1
        if over or not self._due(metric):
            return None
        planned = self._opportunity(batches, held_out)
        if planned is None:
            return None
        growth, changes = planned
        state.idle = 0 if growth.added else state.idle + 1
        if not growth.changed:
            return None
        growth = self._remember(growth, metric)
        apply(plain(self.model), changes, self.optimizers)
        return growth

    def _remember(self, growth: Growth, metric: float | None) -> Growth:
        growth = replace(growth, call=self._state.calls, metric=metric)
        self.history.append(growth)
        self._state.waited = 0
        self._state.narrow.clear()
        self._state.shares.clear()
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

    def _opportunity(
        self, batches: Iterable[Any], held_out: Iterable[Any] | None
    ) -> tuple[Growth, list[Change]] | None:
        """What to do now; None where it turns out not to be an opportunity."""
        target = plain(self.model)
        with isolated(target):
            others = None if held_out is None else list(iterated(held_out))
            measurement, sites = self._look(target, batches, others)
            drawn = [kept.batch for kept in measurement.kept]
            if self.policy.share_rise is not None and not self._risen(measurement):
                return None
            numbers = self._numbers(measurement, sites, others)
        if not numbers:
            return Growth(()), []
        young = self.policy.neurons == "slack" and any(site.width < self.policy.smallest for site in sites)
        # a layer of one or two units may be dead, and then no amplitude lowers anything: it widens all the same
        request = Request(self.method, numbers, sites, None, None, others, insists=young)
        planned = planned_growth(target, drawn, self.task, request, self.optimizers)
        chosen = {record.site: record.added for record in planned[0]}
        cut = within_limits(self.policy, measurement, sites, chosen)
        if cut == chosen:
            return planned
        if not any(cut.values()):
            return Growth(()), []
        return planned_growth(target, drawn, self.task, replace(request, neurons=cut), self.optimizers)

    def _look(self, target: nn.Module, batches: Iterable[Any], others: list[Any] | None) -> tuple[Measurement, Sites]:
        stream = Stream(batches, self.task, target, fresh_seed(target))
        kept = [stream.first()]
        self._sites = self._found(target, self.task.inputs(kept[0].batch))
        sites = trainable(target, self._sites, False)
        wanted = self.policy.samples or samples_wanted(target, sites) * (2 if others is None else 1)
        stream.more(kept, wanted)
        return Measurement(target, self.task, sites, kept), sites

    def _found(self, target: nn.Module, example: Any) -> Sites:
        """The sites, searched again where the model has changed since we found them ourselves."""
        if self._sites is not None:
            try:
                return resolve_sites(target, example, self._sites)
            except ModelChangedError:
                if self._sites is self._wanted:
                    raise
        return resolve_sites(target, example, self._wanted)

    def _numbers(self, measurement: Measurement, sites: Sites, others: list[Any] | None) -> Any:
        """What to ask of `grow` now; nothing where the sites are wide enough."""
        if self.policy.neurons != "slack":
            asked = asked_numbers(sites, self.policy.neurons)
            fixed = {name: number for name, number in asked.items() if not isinstance(number, str)}
            if len(fixed) < len(asked):
                return self.policy.neurons
            return within_limits(self.policy, measurement, sites, fixed)
        young = {site.name for site in sites if site.width < self.policy.smallest}
        narrow = set(young)
        if not young or not self.policy.tied:
            narrow |= self._too_narrow(measurement, [s for s in sites if s.name not in young], others)
        numbers = widths_doubled(list(sites), narrow, self.policy.tied, self.policy.largest)
        return within_limits(self.policy, measurement, sites, numbers)

    def _too_narrow(self, measurement: Measurement, sites: list[Site], others: list[Any] | None) -> set[str]:
        if not sites:
            return set()
        if others is None:
            split_folds(measurement, torch.Generator().manual_seed(measurement.kept[0].seed))
        else:
            with_held_out(measurement, others)
        sums = consumer_sums(measurement, ["estimate"])
        self.slack = measure_slack(measurement, sums, sites, self._state.baseline)
        self._state.baseline = self.slack[0].constant
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
        if not before:
            self._state.shares = shares
        return any(share >= before[name] + rise for name, share in shares.items() if name in before)
