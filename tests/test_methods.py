"""What each growth method adds, read off the grown model, against the paper's formulas computed in the tests."""

import copy
import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auxin
import reference
from auxin.methods import METHODS
from auxin.methods.base import resolve
from helpers_growth import batches, cnn, mlp, trained

cross_entropy = nn.functional.cross_entropy
mse = nn.functional.mse_loss


class Solved:
    """A 5-w-4 network in float64, one batch, and everything of Prop. 3.1 and 3.2 from raw rows."""

    def __init__(self, activation: type[nn.Module] = nn.Tanh, width: int = 2, projection: bool = True) -> None:
        self.model = mlp(5, width, 4, activation=activation).double()
        generator = torch.Generator().manual_seed(8)
        self.x = torch.randn(50, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(50, 4, generator=generator, dtype=torch.float64)
        self.old = copy.deepcopy(self.model)
        hidden = self.model[1](self.model[0](self.x)).detach()
        output = self.model[2](hidden)
        (gradient,) = torch.autograd.grad(mse(output, self.y), output)
        self.v = -50 * gradient
        self.b0, self.b1 = reference.with_constant(self.x), reference.with_constant(hidden)
        self.update = reference.best_update(self.v, self.b1)
        self.rest = self.v - self.b1 @ self.update.T if projection else self.v
        self.s, self.n = self.b0.T @ self.b0 / 50, self.b0.T @ self.rest / 50
        alpha, omega, self.values = reference.neurons(self.s, self.n)
        self.alpha, self.omega = alpha.T, omega.T

    def grow(self, **options: Any) -> auxin.Record:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return auxin.grow(self.model, [(self.x, self.y)], mse, **options)["0"]

    @property
    def fan_in(self) -> Tensor:
        """New fan-ins, bias last: (K, F0)."""
        width = self.old[0].out_features
        layer: Any = self.model[0]
        return torch.cat([layer.weight[width:], layer.bias[width:, None]], dim=1).detach()

    @property
    def fan_out(self) -> Tensor:
        """New fan-outs: (K, M)."""
        layer: Any = self.model[2]
        return layer.weight[:, self.old[0].out_features :].T.detach()

    @property
    def moved(self) -> Tensor:
        """What the consumer's old weight and bias gained: (M, F1)."""
        width = self.old[0].out_features
        new, old = self.model[2], self.old[2]
        both = torch.cat([new.weight[:, :width], new.bias[:, None]], dim=1)
        return (both - torch.cat([old.weight, old.bias[:, None]], dim=1)).detach()


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def values_of(record: auxin.Record) -> Tensor:
    return torch.tensor(record.singular_values, dtype=torch.float64)


@pytest.mark.parametrize("amplitude", [1.0, 0.09, -0.25, 0])
def test_tiny_enters_exactly(amplitude: float) -> None:
    case = Solved()
    record = case.grow(method="tiny", neurons=2, amplitude=amplitude)
    sign = 1 if amplitude >= 0 else -1
    close(case.fan_in.T @ case.fan_out, amplitude * case.alpha[:2].T @ case.omega[:2])
    close(case.moved, amplitude * case.update)
    root = abs(amplitude) ** 0.5 if amplitude else 1.0
    signs = (case.fan_in * case.alpha[:2]).sum(1).sign()[:, None]
    close(case.fan_in, root * case.alpha[:2] * signs)
    close(case.fan_out, sign * (root if amplitude else 0.0) * case.omega[:2] * signs)
    assert record.added == 2
    assert record.amplitude == amplitude
    close(values_of(record), case.values)
    assert record.bottleneck == pytest.approx(float((case.v - case.b1 @ case.update.T).square().sum()) / 50)


def test_fixed_move_lowers_the_bottleneck_by_the_sum_of_squares() -> None:
    case = Solved(nn.Identity)
    record = case.grow(method=auxin.Tiny(), neurons=3, amplitude=1.0)
    psi = float(case.rest.square().sum()) / 50
    left = case.rest - case.b0 @ case.fan_in.T @ case.fan_out
    lambdas = values_of(record)[:3]
    assert float(left.square().sum()) / 50 == pytest.approx(psi - float(lambdas.square().sum()), rel=1e-10)
    assert reference.moved(case.rest, case.b0, case.fan_in, case.fan_out, 50) == pytest.approx(
        psi - float(case.values[:3].square().sum()), rel=1e-10
    )


def test_the_move_of_the_output_is_that_of_the_formula() -> None:
    case = Solved(nn.Identity)
    gamma = 0.3
    case.grow(method=auxin.Tiny(), neurons=3, amplitude=gamma)
    expected = case.old(case.x) + gamma * (case.b1 @ case.update.T + case.b0 @ case.alpha[:3].T @ case.omega[:3])
    close(case.model(case.x), expected)


def test_tiny_without_projection_looks_at_v_itself() -> None:
    case = Solved(projection=False)
    record = case.grow(method=auxin.Tiny(projection=False, best_update=False), neurons=2, amplitude=1.0)
    close(case.fan_in.T @ case.fan_out, case.alpha[:2].T @ case.omega[:2])
    close(case.moved, torch.zeros_like(case.moved))
    close(values_of(record), case.values)


def test_tiny_without_whitening() -> None:
    case = Solved()
    record = case.grow(method=auxin.Tiny(whiten=False), neurons=2, amplitude=1.0)
    left, values, right = torch.linalg.svd(case.n, full_matrices=False)
    close(case.fan_in.T @ case.fan_out, left[:, :2] * values[:2] @ right[:2])
    close(values_of(record), values)
    close(case.moved, case.update)


def test_tiny_with_damping() -> None:
    case = Solved()
    case.grow(method=auxin.Tiny(damping=0.5), neurons=4, amplitude=1.0)
    variances = torch.diag(case.b1.var(0, unbiased=False))
    update = case.v.T @ case.b1 / 50 @ torch.linalg.inv(case.b1.T @ case.b1 / 50 + 0.5 * variances)
    close(case.moved, update)
    n = case.b0.T @ (case.v - case.b1 @ update.T) / 50
    damped = torch.linalg.inv(case.s + 0.5 * torch.diag(case.b0.var(0, unbiased=False)))
    close(case.fan_in.T @ case.fan_out, damped @ n)  # all four directions: S^-1/2 of the sum is S^-1 N


def root_mean_square(vectors: Tensor) -> float:
    return float(vectors.square().sum(1).mean().sqrt())


def test_fixed_normalisation() -> None:
    case = Solved()
    record = case.grow(method=auxin.Tiny(normalisation="fixed"), neurons=3)
    assert root_mean_square(case.fan_in) == pytest.approx(1e-3**0.5, rel=1e-12)
    assert root_mean_square(case.fan_out) == pytest.approx(1e-3**0.5, rel=1e-12)
    product = case.alpha[:3].T @ case.omega[:3]
    norms = root_mean_square(case.alpha[:3]) * root_mean_square(case.omega[:3])
    close(case.fan_in.T @ case.fan_out, product * 1e-3 / norms)
    close(case.moved, case.update)
    assert record.amplitude == 1.0
    assert record.added == 3


@pytest.mark.parametrize("gamma", [0.2, -0.2])
def test_unit_normalisation(gamma: float) -> None:
    case = Solved()
    record = case.grow(method=auxin.Tiny(normalisation="unit"), neurons=3, amplitude=gamma)
    assert root_mean_square(case.fan_in) == pytest.approx(abs(gamma), rel=1e-12)
    assert root_mean_square(case.fan_out) == pytest.approx(abs(gamma), rel=1e-12)
    product = case.alpha[:3].T @ case.omega[:3] / root_mean_square(case.alpha[:3]) / root_mean_square(case.omega[:3])
    close(case.fan_in.T @ case.fan_out, gamma * abs(gamma) * product)
    close(case.moved, gamma * case.update / (case.update.norm() / 3**0.5))
    slope = record.rate_neurons
    assert record.predicted == pytest.approx(gamma * abs(gamma) * slope + gamma * record.rate_update)


def test_unit_normalisation_searches_twice() -> None:
    case = Solved()
    record = case.grow(method=auxin.Tiny(normalisation="unit"), neurons=3)
    update = record.details["amplitude_update"]
    assert update != record.amplitude
    assert float(case.moved.norm()) == pytest.approx(abs(update) * 3**0.5, rel=1e-9)
    assert root_mean_square(case.fan_in) == pytest.approx(abs(record.amplitude), rel=1e-9)
    assert record.measured > 0


def test_rates_are_scaled_along() -> None:
    plain, unit = Solved(), Solved()
    first = plain.grow(method=auxin.Tiny(), neurons=3, amplitude=0.5)
    second = unit.grow(method=auxin.Tiny(normalisation="unit"), neurons=3, amplitude=0.5)
    norms = root_mean_square(plain.alpha[:3]) * root_mean_square(plain.omega[:3])
    assert second.rate_neurons == pytest.approx(first.rate_neurons / norms, rel=1e-6)
    assert second.rate_update == pytest.approx(first.rate_update * 3**0.5 / float(plain.update.norm()), rel=1e-9)


def test_first_order_rates() -> None:
    case = Solved()
    record = case.grow(method=auxin.Tiny(), neurons=2, amplitude=0.1)
    move = case.b0 @ case.alpha[:2].T @ case.omega[:2]  # tanh'(0) = 1
    assert record.rate_neurons == pytest.approx(float((case.v * move).sum()) / 50, rel=1e-6)
    assert record.rate_update == pytest.approx(float((case.v * (case.b1 @ case.update.T)).sum()) / 50, rel=1e-9)
    assert record.predicted == pytest.approx(0.1 * (record.rate_neurons + record.rate_update))


@pytest.mark.parametrize("side", ["fan_in", "fan_out"])
def test_one_side_may_be_zero(side: str) -> None:
    case = Solved()
    case.grow(method=auxin.Tiny(zero=side), neurons=2, amplitude=0.25)
    zero, other = (case.fan_in, case.fan_out) if side == "fan_in" else (case.fan_out, case.fan_in)
    assert not zero.any()
    expected = case.omega[:2] if side == "fan_in" else case.alpha[:2]
    close(other.abs(), 0.5 * expected.abs())
    close(case.moved, 0.25 * case.update)


@pytest.mark.parametrize("side", ["fan_in", "fan_out"])
def test_neurons_with_one_zero_side_enter_as_they_are(side: str) -> None:
    case = Solved()
    record = case.grow(method=auxin.Tiny(zero=side, best_update=False), neurons=2)
    zero, other = (case.fan_in, case.fan_out) if side == "fan_in" else (case.fan_out, case.fan_in)
    assert not zero.any()
    assert (other.norm(dim=1) > 0.05).all()
    assert not [note for note in record.notes if "no amplitude" in note]
    close(case.model(case.x), case.old(case.x), 1e-12)


def test_zero_fan_in_is_not_dead_behind_a_kink() -> None:
    for normalisation in (None, "fixed", "unit"):
        case = Solved(nn.ReLU)
        method = auxin.Tiny(zero="fan_in", best_update=False, normalisation=normalisation)
        record = case.grow(method=method, neurons=2)
        close(case.fan_in.norm(dim=1), torch.full((2,), 1e-6, dtype=torch.float64))
        assert [note for note in record.notes if "kink" in note]


def test_no_neurons_is_prop_1_alone() -> None:
    case = Solved()
    record = case.grow(method="tiny", neurons=0, amplitude=0.5)
    assert record.added == 0
    assert case.model[0].out_features == 2
    close(case.moved, 0.5 * case.update)
    assert torch.equal(case.model[0].weight, case.old[0].weight)
    searched = Solved()
    assert searched.grow(method="tiny", neurons=0).measured > 0


def test_tiny_adds_only_what_there_is_and_warns() -> None:
    model = mlp(5, 2, 3)
    with pytest.warns(UserWarning, match="asked for 9 neurons, and there are 2"):  # of 3 classes
        record = auxin.grow(model, batches(5), cross_entropy, method="tiny", neurons=9)["0"]
    assert (record.asked, record.added) == (9, 2)
    assert "there are 2 directions" in record.notes[0]
    assert model[0].out_features == 4


@pytest.mark.filterwarnings("error")
def test_sprout_fills_up_with_random_fan_ins() -> None:
    case = Solved(width=3)
    record = case.grow(method="sprout", neurons=9, amplitude=1.0)
    assert (record.asked, record.added) == (9, 9)
    assert "5 of 9 fan-ins are random" in record.notes[0]
    norms = case.fan_in[:, :-1].norm(dim=1)
    close(norms[:4], torch.full((4,), 3**-0.5, dtype=torch.float64))
    assert (norms[4:].mean() / 3**-0.5 - 1).abs() < 0.3
    assert (case.fan_in[4:].abs() <= 5**-0.5).all()
    assert (case.fan_out.norm(dim=1) > 1e-4).all()


def test_sprout_refits_the_fan_out_on_real_features() -> None:
    case = Solved()
    case.grow(method=auxin.Sprout(damping=0.0), neurons=3, amplitude=1.0, held_out=[(case.x, case.y)])
    phi = reference.with_constant(torch.tanh(case.b0 @ case.fan_in.T))
    cross, gram = case.v.T @ phi / 50, phi.T @ phi / 50
    variances = torch.diag(phi.var(0, unbiased=False))
    fits = [cross @ torch.linalg.inv(gram + damping * variances) for damping in (0.001, 0.01, 0.1, 1.0)]
    distances = [float((fit[:, :-1].T - case.fan_out).norm() / fit.norm()) for fit in fits]
    assert min(distances) < 1e-5
    fit = fits[distances.index(min(distances))]
    close(case.moved[:, -1], fit[:, -1], 1e-6)
    close(case.moved[:, :-1], torch.zeros_like(case.moved[:, :-1]))


def test_sprout_with_a_best_update_moves_the_old_weights() -> None:
    case = Solved()
    record = case.grow(method=auxin.Sprout(best_update=True), neurons=1, amplitude=0.5)
    assert case.moved[:, :-1].norm() > 0.1 * case.update.norm()
    assert record.rate_update > 0
    nothing = Solved()
    assert nothing.grow(method=auxin.Sprout(best_update=True), neurons=0, amplitude=0.5).added == 0
    assert nothing.moved.norm() > 0


def test_the_change_of_a_predicted_loss_is_a_fall() -> None:
    case = Solved()
    record = case.grow(method="sprout", neurons=2, amplitude=1e-4, held_out=[(case.x, case.y)])
    before, after = mse(case.old(case.x), case.y), mse(case.model(case.x), case.y)
    assert record.rate_neurons > 0
    assert float(before - after) == pytest.approx(record.predicted, rel=1e-3)


@pytest.mark.parametrize("norm", ["linear", "sqrt"])
def test_gradmax(norm: str) -> None:
    case = Solved(projection=False)
    record = case.grow(method=auxin.GradMax(norm=norm), neurons=3)
    _, values, right = torch.linalg.svd(case.n, full_matrices=False)
    size = 1e-3 if norm == "linear" else 1e-3**0.5
    assert not case.fan_in.any()
    close(case.fan_out.abs(), size * right[:3].abs())
    close(values_of(record), values)
    assert not case.moved.any()
    assert record.predicted == 0.0
    close(case.model(case.x), case.old(case.x), 1e-14)


def test_gradmax_is_not_dead_behind_a_kink() -> None:
    case = Solved(nn.ReLU)
    record = case.grow(method="gradmax", neurons=2)
    close(case.fan_in.norm(dim=1), torch.full((2,), 1e-6, dtype=torch.float64))
    assert [note for note in record.notes if "kink" in note]
    mse(case.model(case.x), case.y).backward()
    assert (case.model[0].weight.grad[2:].norm(dim=1) > 0).all()


def test_gradmax_warns_where_it_has_too_few() -> None:
    with pytest.warns(UserWarning, match="asked for 9 neurons, and there are"):
        auxin.grow(mlp(5, 2, 3), batches(5), cross_entropy, method="gradmax", neurons=9)
    assert auxin.grow(mlp(5, 2, 3), batches(5), cross_entropy, method="gradmax")["0"].added >= 1


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_random_neurons(distribution: str) -> None:
    case = Solved()
    record = case.grow(method=auxin.Random(distribution), neurons=40, amplitude=-0.5)
    assert root_mean_square(case.fan_in) == pytest.approx(0.5, rel=1e-12)
    assert root_mean_square(case.fan_out) == pytest.approx(0.5, rel=1e-12)
    assert record.singular_values == ()
    assert record.bottleneck is None
    largest = float(case.fan_in.abs().max() / case.fan_in.square().mean().sqrt())
    assert largest < 1.9 if distribution == "uniform" else largest > 2.0
    assert not case.moved.any()


def test_random_neurons_are_searched_on_both_sides() -> None:
    signs = set()
    for seed in range(6):
        case = Solved()
        torch.manual_seed(seed)
        record = case.grow(method="random", neurons=3)
        signs.add((record.amplitude > 0) - (record.amplitude < 0))
        assert record.measured >= 0
    assert {1, -1} <= signs
    assert Solved().grow(method="random", neurons="auto").asked <= 1


@pytest.mark.parametrize("method", ["sprout", "tiny", "random"])
def test_amplitude_zero_keeps_the_own_fan_in_and_no_way_out(method: str) -> None:
    reference_case, case = Solved(), Solved()
    torch.manual_seed(3)
    case.grow(method=method, neurons=2, amplitude=0.0)
    torch.manual_seed(3)
    reference_case.grow(method=method, neurons=2, amplitude=1.0)
    close(case.fan_in, reference_case.fan_in)
    assert not case.fan_out.any()
    assert not case.moved.any()
    close(case.model(case.x), case.old(case.x), 1e-15)


def test_amplitude_zero_gives_gradmax_a_random_fan_in() -> None:
    case = Solved()
    case.grow(method="gradmax", neurons=2, amplitude=0.0)
    close(case.fan_in.norm(dim=1), torch.full((2,), 1e-3, dtype=torch.float64))
    assert not case.fan_out.any()
    mse(case.model(case.x), case.y).backward()
    assert case.model[2].weight.grad[:, 2:].any()


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Softplus])
@pytest.mark.parametrize("normalisation", [None, "fixed"])
def test_what_is_not_zero_at_zero_goes_into_the_bias(activation: type[nn.Module], normalisation: Any) -> None:
    case = Solved(activation)
    case.grow(method=auxin.Tiny(best_update=False, normalisation=normalisation), neurons=2, amplitude=1e-8)
    level = float(activation()(torch.zeros(())))
    close(case.moved[:, -1], -level * case.fan_out.sum(0), 1e-12)
    close(case.model(case.x), case.old(case.x), 1e-6)
    assert float(case.fan_out.norm()) > 1e-6


def test_what_no_bias_can_take_up_enters_with_zero_fan_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 2), nn.Sigmoid(), nn.Linear(2, 3, bias=False))
    record = auxin.grow(model, batches(5), cross_entropy, method=auxin.Tiny(best_update=False), neurons=2)["0"]
    assert "'2' cannot absorb that (it has no bias)" in record.notes[0]
    assert not model[2].weight[:, 2:].any()
    padded = nn.Sequential(
        nn.Conv2d(2, 2, 3), nn.Softplus(), nn.Conv2d(2, 3, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    record = auxin.grow(padded, batches(2, 6, 6), cross_entropy, method=auxin.Tiny(best_update=False), neurons=2)["0"]
    assert "(some of its pixels are padding)" in record.notes[0]
    assert not padded[2].weight[:, 2:].any()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_results_hang_on_the_seed_alone(method: str) -> None:
    grown = []
    for seed in (0, 0, 1):
        model = mlp(5, 2, 3)
        torch.manual_seed(seed)
        auxin.grow(model, batches(5), cross_entropy, method=method, neurons=2)
        grown.append(model[0].weight.detach())
    assert torch.equal(grown[0], grown[1])
    assert not torch.equal(grown[0], grown[2]) or method in ("gradmax",)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("neurons", [2, "auto"])
def test_every_method_grows_convolutions_behind_batch_norm(method: str, neurons: Any) -> None:
    model, data = cnn(), batches(2, 6, 6, size=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trained(model, data, optimizer)
    growth = auxin.grow(model, data, cross_entropy, optimizer=optimizer, method=method, neurons=neurons)
    assert growth.method == method
    assert json.loads(growth.to_json())["records"]
    assert growth.added == sum(record.width_after - record.width_before for record in growth)
    if neurons == 2:
        assert growth.added == 4
    trained(model, data, optimizer)


def test_methods_are_known_by_name() -> None:
    assert resolve("tiny") == auxin.Tiny()
    method = auxin.Sprout(best_update=True)
    assert resolve(method) is method
    assert set(METHODS) >= {"gradmax", "random", "sprout", "tiny"}
