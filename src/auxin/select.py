"""Which sites, and how many neurons: what a user may ask for, and one ranking over all sites."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auxin.errors import InputError, NoSiteError, check_number
from auxin.structure import Site, Sites


@dataclass(frozen=True)
class Budget:
    """What one growth may spend, in parameters or in multiply-adds a sample (or both); the ranking spends it.

    Neurons are ranked by lambda^2 Var(a) / cost: the fall of the bottleneck times the variance of the consumer's
    output, a squared loss, for each parameter or multiply-add.
    """

    parameters: int | None = None
    multiply_adds: int | None = None

    def __post_init__(self) -> None:
        given = {"parameters": self.parameters, "multiply_adds": self.multiply_adds}
        if not any(value is not None for value in given.values()):
            raise InputError("Budget() limits nothing; accepted: parameters=..., multiply_adds=... or both")
        for name, value in given.items():
            if value is not None:
                check_number(f"Budget: {name}", value, whole=True)


Neurons = int | str | Budget | Mapping[str, int]


def chosen_sites(found: Sites, wanted: "Sites | Sequence[str] | None") -> Sites:
    """The sites to look at: all, or those named."""
    if wanted is None:
        chosen = found
    elif isinstance(wanted, str):
        chosen = Sites((found[wanted],), found.refused)
    else:
        names = site_names(wanted)
        picked = {found[name].name for name in names}
        chosen = Sites(tuple(site for site in found if site.name in picked), found.refused)
    if not chosen:
        reasons = "\n".join(f"  {refusal}" for refusal in found.refused) or "  it has no hidden Linear or Conv layer"
        raise NoSiteError(f"the model has no site that can grow:\n{reasons}")
    return chosen


def site_names(wanted: object) -> list[str]:
    """The names in a list of names and sites."""
    items: list[Any] = list(wanted) if isinstance(wanted, Iterable) else []
    names = [item.name if isinstance(item, Site) else item for item in items]
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"sites is {wanted!r}; accepted: what find_sites gave, a list of names, or None for all")
    return names


def asked_numbers(sites: Sites, neurons: Any) -> dict[str, int | str]:
    """The number asked for each site, rounded up to whole groups, or "auto"; sites that are not asked are left out."""
    if isinstance(neurons, Budget) or neurons == "auto":
        return {site.name: "auto" for site in sites}
    if isinstance(neurons, Mapping):
        for name in neurons:
            if name not in sites:
                raise sites.missing(name)
        if not neurons:
            raise InputError("neurons is an empty dict, which asks nothing; accepted: {site name: number}")
        return {site.name: whole(site, neurons[site.name]) for site in sites if site.name in neurons}
    return {site.name: whole(site, neurons) for site in sites}


def whole(site: Site, number: Any) -> int:
    """A number of neurons, rounded up to the site's groups."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise InputError(
            f"neurons for {site.name!r} is {number!r}; accepted: a whole number of at least 0, a dict "
            "{site name: number}, auxin.Budget(...) or 'auto'"
        )
    return -(-number // site.group) * site.group


@dataclass(frozen=True)
class Candidates:
    """What one site has to offer: its singular values and Var(a) of its consumers."""

    site: Site
    singular_values: Sequence[float]
    variance: float


def spend(candidates: Sequence[Candidates], budget: Budget) -> dict[str, int]:
    """How many neurons of each site the budget buys, best first by lambda^2 Var(a) / cost."""
    units = []
    for candidate in candidates:
        site, values = candidate.site, list(candidate.singular_values)
        costs = {"parameters": site.parameters_per_neuron, "multiply_adds": site.multiply_adds_per_neuron}
        price = costs["parameters" if budget.parameters is not None else "multiply_adds"] * site.group
        for start in range(0, len(values) - site.group + 1, site.group):
            worth = sum(value**2 for value in values[start : start + site.group]) * candidate.variance
            units.append((worth / price, candidate, costs))
    units.sort(key=lambda unit: -unit[0])
    left = {"parameters": budget.parameters, "multiply_adds": budget.multiply_adds}
    numbers = {candidate.site.name: 0 for candidate in candidates}
    for worth, candidate, costs in units:
        group = candidate.site.group
        if worth > 0 and all(room is None or costs[kind] * group <= room for kind, room in left.items()):
            numbers[candidate.site.name] += group
            left = {kind: None if room is None else room - costs[kind] * group for kind, room in left.items()}
    return numbers
