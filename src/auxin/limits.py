"""How much of a growth fits within the sizes that a policy or a budget sets."""

from collections.abc import Mapping, Sequence

import torch

from auxin.collect import Measurement
from auxin.costs import multiply_adds, parameters
from auxin.features import blank_change
from auxin.layers.base import has_bias, weight_of
from auxin.policy import Policy
from auxin.select import Budget, Candidates, spend
from auxin.structure import Change, Site, Sites
from auxin.surgery import changed


def within_limits(policy: Policy, measurement: Measurement, sites: Sites, numbers: Mapping[str, int]) -> dict[str, int]:
    """Numbers cut down, all by one share, so that sites and model stay within the policy's sizes."""
    each = dict(numbers)
    if policy.largest is not None:
        room = {site.name: max(0, policy.largest - site.width) // site.group * site.group for site in sites}
        each = {name: min(number, room[name]) for name, number in numbers.items()}
    share = 1.0 if fits(policy, measurement, sites, each) else share_that_fits(policy, measurement, sites, each)
    cut = {name: int(number * share) for name, number in each.items()}
    return {name: number for name, number in cut.items() if number or not numbers[name]}


def share_that_fits(policy: Policy, measurement: Measurement, sites: Sites, each: Mapping[str, int]) -> float:
    """The largest share of the numbers that fits, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        enough = fits(policy, measurement, sites, {name: int(n * middle) for name, n in each.items()})
        low, high = (middle, high) if enough else (low, middle)
    return low


def fits(policy: Policy, measurement: Measurement, sites: Sites, numbers: Mapping[str, int]) -> bool:
    """Whether the model with so many more neurons is within the policy's parameters and multiply-adds."""
    if policy.parameters is None and policy.multiply_adds is None:
        return True
    wider = costs_with(measurement, list(sites), numbers)
    limits = policy.parameters, policy.multiply_adds
    return all(limit is None or cost <= limit for cost, limit in zip(wider, limits, strict=True))


def affordable(measurement: Measurement, candidates: Sequence[Candidates], budget: Budget) -> dict[str, int]:
    """What the budget buys by the ranking, the corners between neurons of neighbouring sites paid for as well."""
    sites = [candidate.site for candidate in candidates]
    before = costs_with(measurement, sites, {})
    limits = budget.parameters, budget.multiply_adds

    def bought(share: float) -> dict[str, int]:
        scaled = [None if limit is None else int(limit * share) for limit in limits]
        return spend(candidates, Budget(*scaled))

    def paid(numbers: Mapping[str, int]) -> bool:
        spent = (now - was for now, was in zip(costs_with(measurement, sites, numbers), before, strict=True))
        return all(limit is None or cost <= limit for cost, limit in zip(spent, limits, strict=True))

    best, low, high = bought(1.0), 0.0, 1.0
    if paid(best):
        return best
    for _ in range(10):
        middle = (low + high) / 2
        numbers = bought(middle)
        low, high = (middle, high) if paid(numbers) else (low, middle)
    return bought(low)


def costs_with(measurement: Measurement, sites: Sequence[Site], numbers: Mapping[str, int]) -> tuple[int, int]:
    """Parameters and multiply-adds a sample of the model with so many more neurons."""
    wider = changed(measurement.model, [widening(site, numbers[site.name]) for site in sites if numbers.get(site.name)])
    return parameters(wider), multiply_adds(wider, measurement.task.inputs(measurement.kept[0].batch))


def widening(site: Site, number: int) -> Change:
    """A change by so many neurons of no effect, rounded up to whole groups."""
    producer = site.model.get_submodule(site.producers[0])
    features = weight_of(producer).shape[1:].numel() + has_bias(producer)
    return blank_change(site, torch.zeros(-(-number // site.group) * site.group, features))
