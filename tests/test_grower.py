"""`Grower` and `Policy`: when, where, how many, up to where, when to stop, and how to resume."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import auxin
from helpers_growth import Batch, batches, mlp, trained, untouched

cross_entropy = nn.functional.cross_entropy
DATA = batches(5, size=40)


def grower_on(model: nn.Module, **policy: Any) -> auxin.Grower:
    return auxin.Grower(model, cross_entropy, policy=auxin.Policy(**policy))


def calls_that_grow(grower: auxin.Grower, calls: int, metrics: list[float] | None = None) -> list[int]:
    """On which calls a growth was attempted: batches are iterated at opportunities alone."""
    asked: list[int] = []
    for call in range(1, calls + 1):

        def stream(number: int = call) -> Iterator[Batch]:
            asked.append(number)
            yield from DATA

        grower.step(stream(), None if metrics is None else metrics[call - 1])
    return asked


def test_every() -> None:
    assert calls_that_grow(grower_on(mlp(5, 2, 3), neurons=1, every=3), 8) == [3, 6]


def test_schedule() -> None:
    grower = grower_on(mlp(5, 2, 3), neurons=1, schedule=[1, 4, 5])
    assert calls_that_grow(grower, 5) == [1, 4, 5]
    assert grower.finished
    assert calls_that_grow(grower, 3) == []
    assert [growth.call for growth in grower.history] == [1, 4, 5]


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_patience_waits_for_a_plateau(better: str) -> None:
    sign = 1 if better == "lower" else -1
    values = [sign * value for value in (5.0, 4.0, 3.95, 4.5, 3.0, 3.0, 2.99, 2.0)]
    grower = grower_on(mlp(5, 2, 3), neurons=1, patience=2, better=better, margin=0.1)
    assert calls_that_grow(grower, 8, values) == [4, 7]
    assert [growth.metric for growth in grower.history] == [values[3], values[6]]


def test_total_and_until() -> None:
    grower = grower_on(mlp(5, 2, 3), neurons=1, total=8, until=0.5)
    assert calls_that_grow(grower, 3) == [1, 2, 3]
    assert not grower.finished
    assert calls_that_grow(grower, 3) == [1]
    assert grower.finished
    fewer = grower_on(mlp(5, 2, 3), neurons=1, total=8, until=0.5, every=3)
    assert calls_that_grow(fewer, 24) == [3, 6, 9, 12]


def wide_enough() -> tuple[nn.Module, list[Batch]]:
    """A trained model of which half the neurons would do, and batches that it has learned."""
    data = batches(5, size=200)
    model = mlp(5, 64, 3)
    trained(model, data, torch.optim.Adam(model.parameters(), lr=0.01), steps=150)
    return model, data


def test_growth_ends_for_good_after_three_idle_opportunities() -> None:
    model, data = wide_enough()
    grower = grower_on(model, rho=0.2)
    for _ in range(3):
        assert not grower.finished
        with untouched(model):
            assert grower.step(data) is None
    assert grower.finished
    assert grower.slack[0].too_narrow(0.2) is False
    assert calls_that_grow(grower, 2) == []
    assert len(grower.history) == 0


def test_slack_doubles_what_is_too_narrow() -> None:
    *data, others = batches(5, count=3, size=200)
    model = mlp(5, 4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, data, optimizer, steps=20)
    grower = auxin.Grower(model, cross_entropy, optimizer=optimizer, policy=auxin.Policy(confirm=2))
    assert grower.step(data, held_out=[others]) is None
    assert grower.slack[0].too_narrow()
    growth = grower.step(data, held_out=[others])
    assert growth is not None
    assert (growth["0"].width_before, growth["0"].width_after) == (4, 8)
    assert grower.step(data, held_out=[others]) is None  # confirmation starts anew
    trained(model, data, optimizer)
    assert all(bool(p.grad.any()) for p in model.parameters())
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (8, 5)


@pytest.mark.parametrize("tied", [True, False])
def test_one_young_site_widens_all_where_they_are_tied(tied: bool) -> None:
    model = mlp(5, 1, 16, 3)
    growth = grower_on(model, tied=tied, rho=10.0).step(DATA)
    assert growth is not None
    assert {record.site: record.added for record in growth} == ({"0": 1, "2": 16} if tied else {"0": 1})


def test_a_dead_young_layer_widens_all_the_same() -> None:
    model = mlp(5, 1, 3, activation=nn.ReLU)
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
        model[2].bias.zero_()
    grower = grower_on(model)
    for width in (2, 4):
        assert grower.step(DATA).added == width // 2
        assert model[0].out_features == width


@pytest.mark.parametrize("neurons", [3, {"0": 3, "2": 3}, "auto", "slack", auxin.Budget(parameters=200)])
def test_no_site_grows_beyond_the_largest_width(neurons: Any) -> None:
    model, data = mlp(5, 2, 3, 3), batches(5, size=200)
    grower = grower_on(model, neurons=neurons, largest=5, total=100)
    for _ in range(6):
        trained(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
        grower.step(data)
    assert 3 < max(model[0].out_features, model[2].out_features) <= 5


@pytest.mark.parametrize("neurons", [8, {"0": 8}, "auto", "slack", auxin.Budget(parameters=200)])
@pytest.mark.parametrize("limit", ["parameters", "multiply_adds"])
def test_sizes_are_respected(neurons: Any, limit: str) -> None:
    model = mlp(5, 2, 3, 3)
    size = {"parameters": 60, "multiply_adds": 45}[limit]
    grower = grower_on(model, neurons=neurons, total=100, **{limit: size})
    measure = auxin.parameters if limit == "parameters" else lambda net: auxin.multiply_adds(net, DATA[0][0])
    before = measure(model)
    for _ in range(5):
        trained(model, DATA, torch.optim.SGD(model.parameters(), lr=0.1))
        grower.step(DATA)
        assert measure(model) <= size
    assert measure(model) > before


def test_a_model_that_is_full_stays_as_it_is() -> None:
    model = mlp(5, 4, 3)
    for policy in ({"neurons": 2, "largest": 4}, {"neurons": "auto", "largest": 4}, {"neurons": 2, "parameters": 1}):
        with untouched(model):
            assert grower_on(model, **policy).step(DATA) is None


def test_share_of_the_bottleneck_must_rise() -> None:
    model = mlp(5, 2, 3)
    grower = grower_on(model, neurons=1, share_rise=0.05)
    for _ in range(5):
        assert grower.step(DATA) is None
    assert not grower.finished  # none of these was an opportunity
    shares = grower.state_dict()["shares"]
    report = auxin.diagnose(model, DATA, cross_entropy)
    assert shares == pytest.approx({row.site: row.share for row in report}, rel=1e-6)
    assert 0 < shares["0"] <= 1
    state = grower.state_dict()
    grower.load_state_dict({**state, "shares": {"0": shares["0"] - 0.04}})
    assert grower.step(DATA) is None
    grower.load_state_dict({**state, "shares": {"0": shares["0"] - 0.06}})
    assert grower.step(DATA) is not None
    assert grower.state_dict()["shares"] == {}  # the next look is the first since this growth


def test_best_updates_alone_are_remembered() -> None:
    model = mlp(5, 3, 3)
    for normalisation in (None, "unit"):
        grower = auxin.Grower(
            model, cross_entropy, method=auxin.Tiny(normalisation=normalisation), policy=auxin.Policy(neurons=0)
        )
        before = copy.deepcopy(model.state_dict())
        growth = grower.step(DATA)
        assert growth is not None
        assert growth.added == 0
        assert len(grower.history) == 1
        assert not torch.equal(before["2.weight"], model.state_dict()["2.weight"])


def run(epochs: int, stop: int | None, policy: auxin.Policy, loss: Any) -> tuple[nn.Module, auxin.Grower]:
    """Training with growth, interrupted after `stop` epochs and resumed from what was saved then."""
    data = batches(5, size=60)
    torch.manual_seed(0)
    model = mlp(5, 1, 1, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    grower = auxin.Grower(model, loss, optimizer=optimizer, policy=policy)
    for epoch in range(epochs):
        if epoch == stop:
            state = json.loads(json.dumps(grower.state_dict()))
            model, kept = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            optimizer.load_state_dict(kept)
            fresh_loss = auxin.Objective(loss.fn) if isinstance(loss, auxin.Objective) else loss
            grower = auxin.Grower(model, fresh_loss, optimizer=optimizer, policy=policy)
            grower.load_state_dict(state)
        trained(model, data, optimizer, steps=10)
        x, y = data[0]
        grower.step(data, float(cross_entropy(model(x), y)))
    return model, grower


POLICIES = [
    auxin.Policy(total=12, confirm=2), auxin.Policy(neurons=1, patience=1, margin=0.05),
    auxin.Policy(neurons="auto", share_rise=0.01, every=2), auxin.Policy(tied=False, rho=0.001, errors=0.5),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("objective", [False, True])
def test_resuming_is_as_if_nothing_had_happened(policy: auxin.Policy, objective: bool) -> None:
    loss = auxin.Objective(lambda net, batch: cross_entropy(net(batch[0]), batch[1])) if objective else cross_entropy
    whole, grower = run(8, None, policy, loss)
    for stop in (3, 5):
        resumed, other = run(8, stop, policy, loss)
        assert {n: p.shape for n, p in whole.named_parameters()} == {n: p.shape for n, p in resumed.named_parameters()}
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
        assert [g.call for g in other.history] == [g.call for g in grower.history]
        ours, theirs = grower.state_dict(), other.state_dict()
        ours.pop("history"), theirs.pop("history")
        assert ours == theirs
        assert other.history.widths() == grower.history.widths()
    assert len(grower.history) > 0


def test_the_history_fits_the_model(tmp_path: Any) -> None:
    model, grower = run(8, None, auxin.Policy(neurons=1), cross_entropy)
    auxin.save(tmp_path / "grown", model, grower.history)
    loaded = auxin.load(tmp_path / "grown", mlp(5, 1, 1, 3))
    x = DATA[0][0]
    assert torch.equal(loaded(x), model(x))
    assert grower.history.widths() == {"0": model[0].out_features, "2": model[2].out_features}
    assert auxin.History.from_json(grower.history.to_json()) == grower.history
    assert grower.history[0] is grower.history[:1][0]


def test_held_out_batches_are_not_trained_on() -> None:
    model = mlp(5, 4, 3)
    *data, first, second = batches(5, count=4, size=40)
    grower = grower_on(model, confirm=1)
    grower.step(data, held_out=iter([first, second]))
    answers = torch.cat([mlp(5, 4, 3)(x) for x, _ in (first, second)]).softmax(1)
    classes = nn.functional.one_hot(torch.cat([first[1], second[1]]), 3)
    assert grower.slack[0].score == pytest.approx(float((answers - classes).square().sum(1).mean()) / 2, rel=1e-5)
    growth = grower_on(mlp(5, 2, 3), neurons=1).step(data, held_out=[first])
    assert growth is not None
    assert (growth.samples, growth.samples_held_out) == (80, 40)


def test_samples_of_the_policy() -> None:
    growth = grower_on(mlp(5, 2, 3), neurons=1, samples=30).step(DATA)
    assert growth is not None
    assert growth.samples + growth.samples_held_out == 40
    assert growth.call == 1


def test_random_numbers_are_left_alone() -> None:
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*DATA[0]), batch_size=20, shuffle=True
    )  # fmt: skip
    grower = grower_on(mlp(5, 2, 3), neurons=1)
    before = torch.get_rng_state()
    grower.step(loader, held_out=loader)
    assert torch.equal(torch.get_rng_state(), before)
