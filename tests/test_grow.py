"""`grow`: what enters where, what the records say, and the special layers between producer and consumer."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auxin
from helpers_growth import batches, cnn, double, mlp, trained, untouched

cross_entropy = nn.functional.cross_entropy
mse = nn.functional.mse_loss


def mean_loss(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        losses = [float(cross_entropy(model(x), y)) * len(x) for x, y in data]
    return sum(losses) / sum(len(x) for x, _ in data)


@pytest.mark.parametrize("method", ["sprout", "tiny", "random"])
@pytest.mark.parametrize("held_out", [True, False])
def test_records_tell_the_truth(method: str, held_out: bool) -> None:
    model, data, others = mlp(5, 3, 4, 3).double(), double(batches(5)), double(batches(5, seed=9))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, data, optimizer)
    seed = copy.deepcopy(model)
    growth = auxin.grow(
        model, data, cross_entropy, optimizer=optimizer, method=method, neurons={"0": 2, "2": 1},
        held_out=others if held_out else None,
    )  # fmt: skip
    sizes = [auxin.parameters(seed), auxin.parameters(seed) + 2 * (6 + 4)]
    sizes.append(sizes[1] + (6 + 3))  # the second site's neuron reads the two new ones too
    assert [record.site for record in growth] == ["0", "2"]
    assert [(r.parameters_before, r.parameters_after) for r in growth] == [(sizes[0], sizes[1]), (sizes[1], sizes[2])]
    assert auxin.parameters(model) == sizes[2]
    assert [(r.width_before, r.width_after, r.asked, r.added) for r in growth] == [(3, 5, 2, 2), (4, 5, 1, 1)]
    assert growth.added == 3
    assert growth.changed
    assert all(record.seconds > 0 for record in growth)
    assert growth.seconds > sum(record.seconds for record in growth)
    assert growth["2"] is growth[1]
    if held_out:
        assert growth.loss_before == pytest.approx(mean_loss(seed, others), rel=1e-12)
        assert growth.loss_after == pytest.approx(mean_loss(model, others), rel=1e-12)
        assert (growth.samples, growth.samples_held_out) == (48, 48)
    else:
        assert (growth.samples, growth.samples_held_out) == (24, 24)
    assert sum(record.measured for record in growth) == pytest.approx(growth.loss_before - growth.loss_after)


def test_amplitude_given_uses_every_sample() -> None:
    model, data = mlp(5, 3, 3).double(), double(batches(5))
    seed = copy.deepcopy(model)
    growth = auxin.grow(model, data, cross_entropy, method="tiny", neurons=1, amplitude=0.5)
    assert (growth.samples, growth.samples_held_out) == (48, 0)
    assert growth["0"].measured == pytest.approx(mean_loss(seed, data) - mean_loss(model, data), rel=1e-9)


def test_records_survive_json() -> None:
    growth = auxin.grow(cnn(), batches(2, 6, 6, size=12), cross_entropy, neurons=1)
    history = auxin.History([growth])
    assert auxin.History.from_json(history.to_json()) == history
    assert auxin.Growth.from_dict(json.loads(growth.to_json())) == growth


def test_samples_are_drawn_as_far_as_needed() -> None:
    drawn = []

    def stream() -> Any:
        for index, batch in enumerate(batches(5, count=50, size=24)):
            drawn.append(index)
            yield batch

    growth = auxin.grow(mlp(5, 3, 3), stream(), cross_entropy, neurons=1, samples=60)
    assert len(drawn) == 3
    assert growth.samples + growth.samples_held_out == 72
    drawn.clear()
    auxin.grow(mlp(5, 3, 3), stream(), cross_entropy, neurons=1, amplitude=1.0, method="random")
    assert len(drawn) == 3  # ten rows a feature, of which there are six
    auxin.grow(mlp(5, 3, 3), batches(5, count=1, size=8), cross_entropy, neurons=1, samples=60)


def test_corner_between_two_grown_sides_is_zero() -> None:
    model, data = mlp(5, 3, 4, 3), batches(5)
    auxin.grow(model, data, cross_entropy, neurons=2)
    assert model[2].weight.shape == (6, 5)
    assert not model[2].weight[4:, 3:].any()
    assert model[2].weight[4:, :3].any()
    assert model[2].weight[:4, 3:].any()


def test_only_the_sites_asked_for_grow() -> None:
    model, data = mlp(5, 3, 4, 3), batches(5)
    first = model[0].weight.detach().clone()
    growth = auxin.grow(model, data, cross_entropy, neurons=2, sites=["2"])
    assert [record.site for record in growth] == ["2"]
    assert torch.equal(model[0].weight, first)
    sites = auxin.find_sites(model, data[0][0])
    assert [r.site for r in auxin.grow(model, data, cross_entropy, neurons=1, sites=sites[:1])] == ["0"]
    assert [r.site for r in auxin.grow(model, data, cross_entropy, neurons=1, sites=[sites[1]])] == ["2"]


def test_auto_adds_what_gains_on_held_out_samples() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    teacher = torch.randn(6, 1)
    y = torch.cat([torch.sin(x @ teacher), torch.zeros(400, 2)], dim=1)
    model = nn.Sequential(nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 3))
    loss = nn.functional.mse_loss
    growth = auxin.grow(model, [(x[:200], y[:200])], loss, neurons="auto", held_out=[(x[200:], y[200:])])
    assert growth["0"].added >= 1
    assert growth["0"].asked == growth["0"].added <= 3
    assert growth["0"].measured > 0
    assert growth.loss_after < growth.loss_before


def perfect(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Held-out batches on which the model errs nowhere, so that any change makes it worse."""
    return [(x, model(x).detach()) for x, _ in double(batches(5, seed=9))]


def wrong() -> list[tuple[Tensor, Tensor]]:
    return [(x, torch.sin(3 * x[:, :3])) for x, _ in double(batches(5))]


@pytest.mark.parametrize("method", ["sprout", "tiny", "random"])
def test_auto_adds_nothing_where_nothing_gains(method: str) -> None:
    model = mlp(5, 3, 3).double()
    with untouched(model):
        growth = auxin.grow(model, wrong(), mse, neurons="auto", method=method, held_out=perfect(model))
    assert (growth.added, growth.changed) == (0, False)
    assert (growth["0"].asked, growth["0"].added) == (0, 0)
    assert growth.loss_before == growth.loss_after == 0.0


@pytest.mark.parametrize("method", ["sprout", "tiny", "random"])
def test_a_number_is_obeyed_where_nothing_gains(method: str) -> None:
    model = mlp(5, 3, 3).double()
    x = wrong()[0][0]
    before = model(x)
    record = auxin.grow(model, wrong(), mse, neurons=2, method=method, held_out=perfect(model))["0"]
    assert (record.added, record.amplitude) == (2, 0.0)
    assert "no amplitude lowered the held-out loss" in record.notes[-1]
    assert not model[2].weight[:, 3:].any()
    assert model[0].weight[3:].any(dim=1).all()
    torch.testing.assert_close(model(x), before)


def test_an_amplitude_that_makes_the_loss_infinite_is_refused() -> None:
    model, data = mlp(5, 3, 3, activation=nn.ReLU), batches(5)
    with untouched(model), pytest.raises(auxin.AuxinError, match=r"makes the loss non-finite.*amplitude=None"):
        auxin.grow(model, data, cross_entropy, method="tiny", neurons=1, amplitude=1e80)


def test_one_sample_is_not_split() -> None:
    model, (x, y) = mlp(5, 3, 3), batches(5)[0]
    growth = auxin.grow(model, [(x[:1], y[:1])], cross_entropy, neurons=1)
    assert "nothing could be held out" in growth.notes[0]
    assert growth.samples == growth.samples_held_out == 1
    assert model[0].out_features == 4
    single = [(x[i : i + 1], y[i : i + 1]) for i in range(20)]
    growth = auxin.grow(model, single, cross_entropy, neurons=1)
    assert (growth.samples, growth.samples_held_out) == (10, 10)


def test_what_cannot_be_split_alternates() -> None:
    model, data = mlp(5, 3, 3), batches(5, count=4)
    objective = auxin.Objective(lambda net, batch: cross_entropy(net(batch[0]), batch[1]))
    growth = auxin.grow(model, data, objective, neurons=1, samples=96)
    assert (growth.samples, growth.samples_held_out) == (48, 48)
    assert growth.notes == ()


def test_groups_are_filled() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )  # fmt: skip
    data = batches(2, 6, 6, size=12)
    record = auxin.grow(model, data, cross_entropy, neurons=3)["0"]
    assert (record.asked, record.added, record.width_after) == (4, 4, 8)
    assert (model[1].num_groups, model[1].num_channels) == (4, 8)
    assert auxin.grow(model, data, cross_entropy, neurons="auto")["0"].added % 2 == 0
    trained(model, data, torch.optim.SGD(model.parameters(), lr=0.01))


@pytest.mark.parametrize("method", ["sprout", "tiny", "random"])
def test_batch_norm_lets_new_channels_through(method: str) -> None:
    model, data = cnn().double(), double(batches(2, 6, 6, size=12))
    trained(model, data, torch.optim.SGD(model.parameters(), lr=0.01))
    model.eval()
    auxin.grow(model, data, cross_entropy, method=method, neurons={"0": 2}, amplitude=0.5)
    with torch.no_grad():
        entering = torch.cat([model[0](x) for x, _ in data])
        leaving = torch.cat([model[1](model[0](x)) for x, _ in data])
    torch.testing.assert_close(leaving[:, 3:], entering[:, 3:], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(leaving[:, :3], entering[:, :3], rtol=1e-3)
    norm: Any = model[1]
    rows = entering[:, 3:].movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(norm.running_mean[3:], rows.mean(0))
    torch.testing.assert_close(norm.running_var[3:], rows.var(0, unbiased=False))


def two_norms() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def test_filters_before_a_batch_norm_keep_their_norms_and_the_function() -> None:
    data = double(batches(2, 6, 6, size=12))
    seed = two_norms().double()
    trained(seed, data, torch.optim.SGD(seed.parameters(), lr=0.01))
    seed.eval()
    kept, plain = copy.deepcopy(seed), copy.deepcopy(seed)
    for model, rescale in ((kept, True), (plain, False)):
        torch.manual_seed(0)
        auxin.grow(model, data, cross_entropy, method=auxin.Sprout(rescale=rescale), neurons={"0": 3}, amplitude=1.0)
    old, new = (model[2].weight.detach().flatten(1).norm(dim=1) for model in (seed, kept))
    torch.testing.assert_close(new, old)
    assert (plain[2].weight.flatten(1).norm(dim=1) / old - 1).abs().max() > 1e-3
    x = data[0][0]
    torch.testing.assert_close(kept(x), plain(x), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(seed(x), kept(x))


def test_intercept_goes_into_the_mean_of_the_norm_behind() -> None:
    data, model = double(batches(2, 6, 6, size=12)), two_norms().double()
    trained(model, data, torch.optim.SGD(model.parameters(), lr=0.01))
    model.eval()
    mean = model[3].running_mean.clone()
    auxin.grow(model, data, cross_entropy, method=auxin.Sprout(rescale=False), neurons={"0": 2}, amplitude=1.0)
    assert (model[3].running_mean - mean).abs().max() > 1e-6


@pytest.mark.parametrize("method", ["sprout", "tiny", "gradmax", "random"])
def test_bfloat16(method: str) -> None:
    model = cnn().bfloat16()
    data = [(x.bfloat16(), y) for x, y in batches(2, 6, 6, size=12)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trained(model, data, optimizer)
    growth = auxin.grow(model, data, cross_entropy, optimizer=optimizer, method=method, neurons=1)
    assert growth.added == 2
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    trained(model, data, optimizer)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_width_zero_grows() -> None:
    model, data = mlp(5, 0, 3), batches(5)
    growth = auxin.grow(model, data, cross_entropy, neurons=2)
    assert growth["0"].width_after == 2
    trained(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model[0].weight.grad.any(dim=1).all()


@pytest.mark.parametrize("budget", [{"parameters": 40}, {"multiply_adds": 60}, {"parameters": 40, "multiply_adds": 25}])
def test_budgets_are_respected(budget: dict[str, int]) -> None:
    model, data = mlp(5, 3, 4, 3), batches(5, size=40)
    x = data[0][0]
    before = auxin.parameters(model), auxin.multiply_adds(model, x)
    sites = auxin.find_sites(model, x)
    growth = auxin.grow(model, data, cross_entropy, method="tiny", neurons=auxin.Budget(**budget))
    spent = sum(record.added * site.parameters_per_neuron for record, site in zip(growth, sites, strict=True))
    assert growth.added > 0
    if "parameters" in budget:
        # the corner between two sites that both grew is beyond what their neurons cost on their own
        corner = growth["0"].added * growth["2"].added
        assert auxin.parameters(model) - before[0] - corner <= budget["parameters"]
    if budget.keys() == {"multiply_adds"}:
        corner = growth["0"].added * growth["2"].added
        assert auxin.multiply_adds(model, x) - before[1] - corner <= budget["multiply_adds"]
    assert spent > 0


def test_methods_without_singular_values_cannot_spend_a_budget() -> None:
    with pytest.raises(auxin.AuxinError, match="this method has none"):
        auxin.grow(mlp(5, 3, 3), batches(5), cross_entropy, method="random", neurons=auxin.Budget(parameters=20))


def test_a_dead_consumer_does_no_harm() -> None:
    """Every unit dead, singular moments, duplicated and constant features, a mean of 100."""
    model, data = mlp(5, 3, 3, activation=nn.ReLU), batches(5, size=40)
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    odd = [(torch.cat([x[:, :1], x[:, :1], torch.full_like(x[:, :1], 7.0), x[:, :2] + 100], dim=1), y) for x, y in data]
    for method in ("sprout", "tiny", "gradmax", "random"):
        grown = copy.deepcopy(model)
        auxin.grow(grown, odd, cross_entropy, method=method, neurons=1)
        assert all(bool(p.isfinite().all()) for p in grown.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_random_layers_and_modes(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 3))
    model.train(training)
    data = batches(5, size=40)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = torch.get_rng_state()
    growth = auxin.grow(model, data, cross_entropy, neurons=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training is training
    assert torch.equal(model[1].running_mean[:4], buffers["1.running_mean"])
    assert torch.equal(model[1].num_batches_tracked, buffers["1.num_batches_tracked"])
    assert growth.added == 2


def test_several_optimizers() -> None:
    model, data = mlp(5, 3, 3), batches(5)
    optimizers = [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)]
    for x, y in data:
        cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    auxin.grow(model, data, cross_entropy, optimizer=optimizers, neurons=2)
    assert optimizers[0].state[model[0].weight]["exp_avg"].shape == (5, 5)
    assert optimizers[1].state[model[2].weight]["momentum_buffer"].shape == (3, 5)
