"""Which sites, and how many neurons: names, numbers and the ranking that spends a budget."""

import itertools
import random

import pytest
import torch
from torch import nn

import auxin
from auxin.select import Budget, Candidates, asked_numbers, chosen_sites, site_names, spend
from helpers_growth import batches, mlp

cross_entropy = nn.functional.cross_entropy


def sites_of(*widths: int) -> auxin.Sites:
    return auxin.find_sites(mlp(*widths), torch.randn(8, widths[0]))


def test_names_sites_and_lists_of_both() -> None:
    sites = sites_of(5, 3, 4, 3)
    assert [site.name for site in chosen_sites(sites, None)] == ["0", "2"]
    assert [site.name for site in chosen_sites(sites, "2")] == ["2"]
    assert [site.name for site in chosen_sites(sites, ["2", "0"])] == ["0", "2"]
    assert [site.name for site in chosen_sites(sites, [sites[1]])] == ["2"]
    assert site_names([sites[0], "2"]) == ["0", "2"]
    assert chosen_sites(sites, ["2"]).refused == sites.refused


def test_numbers() -> None:
    sites = sites_of(5, 3, 4, 3)
    assert asked_numbers(sites, 3) == {"0": 3, "2": 3}
    assert asked_numbers(sites, {"2": 0}) == {"2": 0}
    assert asked_numbers(sites, "auto") == asked_numbers(sites, Budget(parameters=1)) == {"0": "auto", "2": "auto"}
    model = nn.Sequential(nn.Conv2d(2, 6, 1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 2, 1))
    grouped = auxin.find_sites(model, torch.randn(4, 2, 4, 4))
    assert asked_numbers(grouped, 4) == {"0": 6}


def by_hand(candidates: list[Candidates], budget: Budget) -> dict[str, int]:
    """Greedy by worth over price, neuron by neuron, every affordable one."""
    prices = {
        "parameters": lambda site: site.parameters_per_neuron,
        "multiply_adds": lambda site: site.multiply_adds_per_neuron,
    }
    unit = "parameters" if budget.parameters is not None else "multiply_adds"
    neurons = [
        (value**2 * candidate.variance / prices[unit](candidate.site), candidate.site)
        for candidate in candidates
        for value in candidate.singular_values
    ]
    left = {kind: getattr(budget, kind) for kind in prices if getattr(budget, kind) is not None}
    bought = {candidate.site.name: 0 for candidate in candidates}
    for worth, site in sorted(neurons, key=lambda pair: -pair[0]):
        if worth > 0 and all(prices[kind](site) <= room for kind, room in left.items()):
            bought[site.name] += 1
            left = {kind: room - prices[kind](site) for kind, room in left.items()}
    return bought


@pytest.mark.parametrize("seed", range(10))
def test_ranking_is_worth_over_cost(seed: int) -> None:
    generator = random.Random(seed)
    sites = sites_of(5, 3, 9, 2, 3)
    candidates = [
        Candidates(site, sorted(map(generator.uniform, [0] * 6, [1] * 6), reverse=True), generator.choice([0.1, 9.0]))
        for site in sites
    ]
    for parameters, adds in itertools.product((None, 40, 90), (None, 30, 100)):
        if parameters is None and adds is None:
            continue
        budget = Budget(parameters=parameters, multiply_adds=adds)
        bought = spend(candidates, budget)
        assert bought == by_hand(candidates, budget)
        if parameters is not None:
            assert sum(bought[site.name] * site.parameters_per_neuron for site in sites) <= parameters


def test_neurons_of_no_worth_are_not_bought() -> None:
    site = sites_of(5, 3, 3)[0]
    assert spend([Candidates(site, [2.0, 0.0], 1.0)], Budget(parameters=1000)) == {"0": 1}
    assert spend([Candidates(site, [2.0, 1.0], 0.0)], Budget(parameters=1000)) == {"0": 0}


def test_groups_are_bought_whole() -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 2, 1))
    site = auxin.find_sites(model, torch.randn(4, 2, 4, 4))[0]
    price = 3 * site.parameters_per_neuron
    values = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.2]
    assert spend([Candidates(site, values, 1.0)], Budget(parameters=price)) == {"0": 3}
    assert spend([Candidates(site, values, 1.0)], Budget(parameters=price - 1)) == {"0": 0}
    assert spend([Candidates(site, values, 1.0)], Budget(parameters=10 * price)) == {"0": 6}


def test_a_budget_spends_as_the_diagnosis_ranks() -> None:
    model, data = mlp(5, 3, 8, 3), batches(5, size=80)
    report = auxin.diagnose(model, data, cross_entropy)
    cheapest = max(site.parameters_per_neuron for site in auxin.find_sites(model, data[0][0]))
    growth = auxin.grow(
        model, data, cross_entropy, method="tiny", neurons=Budget(parameters=cheapest), held_out=data, samples=160
    )
    best = max(growth, key=lambda record: record.added)
    assert best.added >= 1
    assert best.site == report.tightest.site
