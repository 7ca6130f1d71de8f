"""Slack: what half of a site's neurons would cost, against brute force."""

import pytest
import torch
from torch import Tensor, nn

import auxin
import reference
from auxin.collect import Measurement, Stream, one_fold, with_held_out
from auxin.isolation import isolated
from auxin.moments import consumer_sums
from auxin.objectives import as_task
from auxin.slack import Slack, best_neurons, measure_slack, restricted_copy, widths_doubled
from helpers_growth import Batch, batches, double, mlp, trained

cross_entropy = nn.functional.cross_entropy


def measured(model: nn.Module, data: list[Batch], others: list[Batch]) -> tuple[list[Slack], Measurement, dict]:
    with isolated(model):
        task = as_task(cross_entropy)
        sites = auxin.find_sites(model, data[0][0])
        stream = Stream(data, task, model, 0)
        kept = [stream.first()]
        stream.more(kept, None)
        measurement = Measurement(model, task, sites, one_fold(kept))
        with_held_out(measurement, others)
        sums = consumer_sums(measurement, ["estimate"])
        return measure_slack(measurement, sums, list(sites)), measurement, sums


def brier(model: nn.Module, data: list[Batch]) -> Tensor:
    rows = [(model(x).softmax(1) - nn.functional.one_hot(y, 3)).square().sum(1) / 2 for x, y in data]
    return torch.cat(rows).detach()


def test_slack_of_a_linear_layer() -> None:
    model, data, others = mlp(5, 6, 3).double(), double(batches(5, size=40)), double(batches(5, size=30, seed=9))
    trained(model, data, torch.optim.Adam(model.parameters(), lr=0.02), steps=40)
    (slack,), _, _ = measured(model, data, others)
    hidden = torch.cat([model[1](model[0](x)) for x, _ in data]).detach()
    target = model[2](hidden).detach()
    kept = reference.greedy(hidden - hidden.mean(0), model[2].weight.detach(), 3)
    fit = torch.linalg.lstsq(reference.with_constant(hidden[:, sorted(kept)]), target).solution
    whole = brier(model, others)

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return reference.with_constant(model[1](model[0](x))[:, sorted(kept)]) @ fit

    rises = brier(Half(), others) - whole
    assert slack.rise == pytest.approx(float(rises.mean()), rel=1e-8)
    assert slack.error == pytest.approx(float(rises.std()) / len(rises) ** 0.5, rel=1e-8)
    assert slack.score == pytest.approx(float(whole.mean()), rel=1e-10)
    shares = torch.bincount(torch.cat([y for _, y in others]), minlength=3).double() / 60
    assert slack.constant == pytest.approx(float(1 - shares.square().sum()) / 2, rel=1e-10)
    assert (slack.site, slack.width) == ("0", 6)


def test_a_useless_half_costs_nothing() -> None:
    model, data = mlp(5, 6, 3).double(), double(batches(5, size=40))
    with torch.no_grad():
        model[2].weight[:, [0, 3, 5]] = 0
    (slack,), measurement, sums = measured(model, data, data)
    assert slack.rise == pytest.approx(0, abs=1e-12)
    assert not slack.too_narrow()
    grams = {"2": sums["2", "estimate"].mean("b1_b1")}
    assert best_neurons(model, measurement.sites[0], grams, 3).tolist() == [1, 2, 4]


def test_duplicated_neurons_are_not_missed() -> None:
    model, data = mlp(5, 4, 3).double(), double(batches(5, size=40))
    with torch.no_grad():
        model[0].weight[2:] = model[0].weight[:2]
        model[0].bias[2:] = model[0].bias[:2]
    (slack,), _, _ = measured(model, data, data)
    assert slack.rise == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("flat", [True, False])
def test_channels_of_convolutions(flat: bool) -> None:
    torch.manual_seed(0)
    head = [nn.Flatten(), nn.Linear(64, 3)] if flat else [nn.Conv2d(4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *head).double()
    data = double(batches(2, 6, 6, size=40))
    consumer = "3" if flat else "2"
    _, measurement, sums = measured(model, data, data)
    site = measurement.sites[0]
    grams = {consumer: sums[consumer, "estimate"].mean("b1_b1")}
    kept = best_neurons(model, site, grams, 2)
    assert len(kept) == 2
    half = restricted_copy(model, site, grams, kept)
    weight = half.get_submodule(consumer).weight.detach()
    lost = [c for c in range(4) if c not in kept.tolist()]
    view = weight.unflatten(1, (4, 16)) if flat else weight
    assert not view[:, lost].any()
    assert view[:, kept].any()
    x = torch.cat([x for x, _ in data])
    seen = model[1](model[0](x)).detach()
    rows = seen[:, kept].flatten(1) if flat else nn.functional.unfold(seen[:, kept], 2).transpose(1, 2).flatten(0, 1)
    whole = seen.flatten(1) if flat else nn.functional.unfold(seen, 2).transpose(1, 2).flatten(0, 1)
    module = model.get_submodule(consumer)
    target = reference.with_constant(whole) @ torch.cat([module.weight.flatten(1), module.bias[:, None]], 1).T.detach()
    fit = torch.linalg.lstsq(reference.with_constant(rows), target).solution
    torch.testing.assert_close(weight.flatten(1)[:, kept_columns(view, kept)], fit[:-1].T, rtol=1e-7, atol=1e-9)


def kept_columns(view: Tensor, kept: Tensor) -> Tensor:
    return torch.arange(view[0].numel()).reshape(view.shape[1:])[kept].flatten()


@pytest.mark.parametrize(
    ("rise", "error", "narrow"), [(0.02, 0.001, True), (0.009, 0.001, False), (0.02, 0.011, False), (-1.0, 0.0, False)]
)
def test_the_rule(rise: float, error: float, narrow: bool) -> None:
    slack = Slack("0", 8, rise, error, score=1.0, constant=2.0)
    assert slack.too_narrow(rho=0.01, errors=2.0) is narrow


def test_doubling() -> None:
    model = mlp(5, 3, 100, 0, 3)
    sites = list(auxin.find_sites(model, torch.randn(8, 5)))
    names = {site.name for site in sites}
    assert widths_doubled(sites, {"0"}, True, 128) == {"0": 3, "2": 28, "4": 1}
    assert widths_doubled(sites, {"2"}, False, None) == {"2": 100}
    assert widths_doubled(sites, set(), True, None) == {}
    assert widths_doubled(sites, names, True, 3) == {"4": 1}


def test_widths_of_one_and_few_samples() -> None:
    """Half of one neuron is none: the consumer is left with its bias."""
    model, data = mlp(5, 1, 3).double(), double(batches(5, size=40))
    (slack,), _, _ = measured(model, data, [(data[0][0][:1], data[0][1][:1])])
    assert slack.error == 0.0
    assert torch.isfinite(torch.tensor([slack.rise, slack.score, slack.constant])).all()
