"""How much of a growth fits within the sizes that a policy sets."""

from collections.abc import Mapping

import torch

from auxin.collect import Measurement
from auxin.costs import multiply_adds, parameters
from auxin.features import blank_change
from auxin.layers.base import has_bias, weight_of
from auxin.policy import Policy
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
    changes = [widening(site, numbers[site.name]) for site in sites if numbers.get(site.name)]
    wider = changed(measurement.model, changes)
    if policy.parameters is not None and parameters(wider) > policy.parameters:
        return False
    example = measurement.task.inputs(measurement.kept[0].batch)
    return policy.multiply_adds is None or multiply_adds(wider, example) <= policy.multiply_adds


def widening(site: Site, number: int) -> Change:
    """A change by so many neurons of no effect, rounded up to whole groups."""
    producer = site.model.get_submodule(site.producers[0])
    features = weight_of(producer).shape[1:].numel() + has_bias(producer)
    return blank_change(site, torch.zeros(-(-number // site.group) * site.group, features))
