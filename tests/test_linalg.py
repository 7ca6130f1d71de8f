"""The algebra against brute force in float64, one test a formula, and the traps that each formula has."""

import importlib
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import reference
from auxin import linalg
from auxin.errors import InputError, NumericalError
from auxin.statistics import cross_sum, gram_sum

EXACT = {"rtol": 1e-9, "atol": 1e-9}
shapes = st.fixed_dictionaries(
    {"m": st.integers(1, 30), "f": st.integers(1, 9), "g": st.integers(1, 6), "seed": st.integers(0, 10**6)}
)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def problem(m: int, f: int, g: int, seed: int, kind: str = "plain") -> tuple[Tensor, Tensor, int]:
    """Rows that end with a 1, desired updates, and the number of samples behind them."""
    x = draw(seed, m, f)
    if kind == "dead":
        x[:, ::2] = 0
    if kind == "constants":
        x[:, ::2] = 3.0
    if kind == "duplicated" and f > 1:
        x[:, -1] = x[:, 0]
    if kind == "dependent" and f > 1:
        x[:, -1] = x[:, :-1].sum(dim=1)
    return reference.with_constant(x), draw(seed + 1, m, g), max(1, m // 2)


KINDS = ["plain", "dead", "constants", "duplicated", "dependent"]


def moments(b0: Tensor, v: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return reference.outer_sum(b0, b0) / n, reference.outer_sum(b0, v) / n


def product(neurons: linalg.Neurons) -> Tensor:
    return neurons.alpha.T @ neurons.omega


# --- whitening -------------------------------------------------------------------------------------------------


@given(shape=shapes, kind=st.sampled_from(KINDS), constant=st.booleans())
def test_whitening_gives_the_moore_penrose_inverse(shape, kind, constant):
    b0, v, n = problem(**shape, kind=kind)
    s, _ = moments(b0, v, n)
    w = linalg.whitening(s, constant=constant)
    expected = reference.pseudo_inverse(s)
    assert w.shape[1] == torch.linalg.matrix_rank(s, hermitian=True, rtol=1e-11)
    torch.testing.assert_close(w @ w.T / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=1e-9)


@given(shape=shapes, kind=st.sampled_from(["plain", "duplicated", "dependent"]), damping=st.sampled_from([1e-3, 1.0]))
def test_damping_adds_its_share_of_every_variance(shape, kind, damping):
    b0, v, n = problem(**{**shape, "m": shape["m"] + 2}, kind=kind)
    s, _ = moments(b0, v, n)
    expected = torch.linalg.inv(s + damping * s.diagonal().diag())
    w = linalg.whitening(s, damping)
    torch.testing.assert_close(w @ w.T, expected, **EXACT)
    variance = F.pad(linalg.centred(s).diagonal(), (0, 1))
    w = linalg.whitening(s, damping, constant=True)
    torch.testing.assert_close(w @ w.T, torch.linalg.inv(s + damping * variance.diag()), **EXACT)


@pytest.mark.parametrize(("shift", "scale"), [(100.0, 1.0), (0.0, 1e-4), (100.0, 1e-4), (-1e4, 1e-4)])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_shifts_and_scales_of_the_inputs_do_no_harm(shift, scale, damping):
    x, v = draw(0, 200, 8), draw(1, 200, 5)
    plain = linalg.new_neurons(*moments(reference.with_constant(x), v, 200), damping=damping, constant=True)
    moved = reference.with_constant((x + shift) * scale)
    s, n = moments(moved, v, 200)
    found = linalg.new_neurons(s, n, damping=damping, constant=True)
    assert linalg.whitener(s, damping, constant=True).rank == 9
    torch.testing.assert_close(found.singular_values, plain.singular_values, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        moved @ product(found), reference.with_constant(x) @ product(plain), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(("shift", "scale"), [(100.0, 1.0), (0.0, 1e-4), (100.0, 1e-4)])
def test_float32_rows_keep_every_direction(shift, scale):
    x, v = ((draw(0, 200, 8) + shift) * scale).float(), draw(1, 200, 5).float()
    s, n = gram_sum(x, constant=True) / 200, cross_sum(x, v, constant=True) / 200
    found = linalg.new_neurons(s, n, constant=True, precision=1e-7)
    wide = reference.with_constant(x.double())
    assert linalg.whitener(s, constant=True, precision=1e-7).rank == 9
    expected = reference.singular_values(wide, v.double(), 200)
    torch.testing.assert_close(found.singular_values, expected, rtol=1e-5, atol=0)
    plain = reference.with_constant(x).T @ reference.with_constant(x) / 200
    assert torch.linalg.matrix_rank(plain, hermitian=True) < 9 or torch.linalg.eigvalsh(plain)[0] < 1e-4


def test_without_centring_and_scaling_a_shift_ruins_the_damped_directions():
    x, v = draw(0, 200, 8), draw(1, 200, 5)
    plain = linalg.new_neurons(*moments(reference.with_constant(x), v, 200), damping=0.1, constant=True)
    s, n = moments(reference.with_constant(x + 100), v, 200)
    ruined = torch.linalg.svdvals(reference.inverse_root(s + 0.1 * s.diagonal().mean() * torch.eye(9)) @ n)
    assert plain.singular_values[1] > 0.1
    assert ruined[1] < 0.1 * plain.singular_values[1]


def test_features_that_never_vary_share_the_weight_of_the_constant():
    b0 = reference.with_constant(torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.float64))
    w = linalg.whitening(reference.outer_sum(b0, b0), constant=True)
    torch.testing.assert_close(w[1], 5 * w[2], **EXACT)
    assert w.shape == (3, 2)


def test_a_feature_of_tiny_scale_is_no_dead_feature():
    x = draw(0, 50, 3) * torch.tensor([1.0, 1e-6, 1e4])
    s = reference.outer_sum(x, x)
    assert linalg.whitening(s).shape == (3, 3)
    torch.testing.assert_close(linalg.whitening(s).T @ s @ linalg.whitening(s), torch.eye(3).double(), **EXACT)


def test_noise_of_float32_products_is_no_direction_when_the_precision_is_given():
    b0, v, n = problem(100, 8, 3, 0, "dependent")
    s, _ = moments(b0, v, n)
    noise = draw(5, 9, 9)
    noisy = s + 1e-8 * (noise + noise.T) * s.diagonal().max()
    noisy = noisy + 1e-7 * torch.eye(9)
    assert linalg.whitener(noisy).rank == 9
    assert linalg.whitener(noisy, precision=1e-7).rank == 8


def test_no_features_and_no_rows():
    for constant in (False, True):
        assert linalg.whitening(torch.zeros(3, 3).double(), constant=constant).shape == (3, 0)
        found = linalg.new_neurons(torch.zeros(3, 3).double(), torch.zeros(3, 2).double(), constant=constant)
        assert (found.alpha.shape, found.omega.shape, len(found.singular_values)) == ((0, 3), (0, 2), 0)
    assert linalg.whitening(torch.zeros(0, 0).double()).shape == (0, 0)
    assert linalg.best_update(torch.zeros(2, 0).double(), torch.zeros(0, 0).double()).shape == (2, 0)
    only_bias = linalg.best_update(torch.ones(2, 1).double(), 4 * torch.ones(1, 1).double(), constant=True)
    torch.testing.assert_close(only_bias, torch.full((2, 1), 0.25).double())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(bad):
    s, n = torch.eye(3).double(), torch.ones(3, 2).double()
    with pytest.raises(NumericalError, match="second moments"):
        linalg.new_neurons(s * bad, n)
    with pytest.raises(NumericalError, match="cross moments"):
        linalg.new_neurons(s, n * bad)
    with pytest.raises(NumericalError, match="cross moments"):
        linalg.gradmax(n * bad, 1)


# --- Prop. 3.1 and the bottleneck ------------------------------------------------------------------------------


@given(shape=shapes, kind=st.sampled_from(KINDS), constant=st.booleans())
def test_best_update_and_bottleneck(shape, kind, constant):
    b1, v, n = problem(**shape, kind=kind)
    s, n_b1 = moments(b1, v, n)
    update = linalg.best_update(n_b1.T, s, constant=constant)
    torch.testing.assert_close(update, reference.best_update(v, b1), rtol=1e-7, atol=1e-8)
    square = float(v.square().sum()) / n
    for any_update in (update, torch.zeros_like(update), draw(shape["seed"], *update.shape)):
        expected = reference.bottleneck(v, b1, any_update, n)
        assert linalg.bottleneck(square, n_b1.T, s, any_update) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_fewer_rows_than_features_leave_no_bottleneck():
    b1, v, n = problem(4, 9, 3, 0)
    s, n_b1 = moments(b1, v, n)
    update = linalg.best_update(n_b1.T, s)
    assert abs(linalg.bottleneck(float(v.square().sum()) / n, n_b1.T, s, update)) < 1e-9


def test_refit_is_least_squares_with_an_intercept():
    features, v = draw(0, 60, 4).relu() * torch.tensor([1.0, 1e-3, 1e3, 1.0]), draw(1, 60, 3) + 2
    phi = reference.with_constant(features)
    omega = linalg.refit(reference.outer_sum(phi, phi), reference.outer_sum(v, phi))
    torch.testing.assert_close(phi @ omega.T, phi @ torch.linalg.lstsq(phi, v).solution, **EXACT)
    damped = linalg.refit(reference.outer_sum(phi, phi), reference.outer_sum(v, phi), damping=1e9)
    torch.testing.assert_close(phi @ damped.T, v.mean(dim=0).expand_as(v), rtol=0, atol=1e-6)


# --- Prop. 3.2 and Prop. 3.4 -----------------------------------------------------------------------------------


@given(shape=shapes, kind=st.sampled_from(KINDS), constant=st.booleans())
def test_new_neurons_are_those_of_the_paper(shape, kind, constant):
    b0, v, n = problem(**shape, kind=kind)
    s, cross = moments(b0, v, n)
    alpha, omega, values = reference.neurons(s, cross)
    found = linalg.new_neurons(s, cross, constant=constant, energy=float(v.square().sum()) / n)
    scale = float(values[0])
    assert len(found.singular_values) >= len(values)
    torch.testing.assert_close(found.singular_values[: len(values)], values, rtol=0, atol=1e-9 * scale)
    torch.testing.assert_close(product(found), alpha @ omega.T, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(
        found.singular_values[: len(values)], reference.singular_values(b0, v, n)[: len(values)], rtol=0, atol=1e-9
    )
    largest = found.alpha.gather(1, found.alpha.abs().argmax(dim=1, keepdim=True))
    assert (largest > 0).all()


@given(shape=shapes, kind=st.sampled_from(KINDS), constant=st.booleans(), share=st.floats(0, 1))
def test_a_fixed_linear_move_lowers_the_bottleneck_by_the_squares(shape, kind, constant, share):
    b0, v, n = problem(**shape, kind=kind)
    s, cross = moments(b0, v, n)
    count = int(share * min(cross.shape))
    found = linalg.new_neurons(s, cross, count, constant=constant)
    psi = float(v.square().sum()) / n
    assert len(found.alpha) <= count
    expected = psi - float(found.singular_values[: len(found.alpha)].square().sum())
    after = linalg.moved_bottleneck(psi, s, cross, found.alpha, found.omega)
    assert after == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert after == pytest.approx(reference.moved(v, b0, found.alpha, found.omega, n), rel=1e-9, abs=1e-9)
    assert linalg.gain(s, cross, found.alpha, found.omega) == pytest.approx(psi - after, rel=1e-9, abs=1e-9)


def test_gain_on_held_out_moments_is_the_fall_on_the_held_out_rows():
    b0, v, n = problem(40, 6, 4, 0)
    found = linalg.new_neurons(*moments(b0, v, n), count=3)
    other, w, k = problem(30, 6, 4, 9)
    expected = float(w.square().sum()) / k - reference.moved(w, other, found.alpha, found.omega, k)
    assert linalg.gain(*moments(other, w, k), found.alpha, found.omega) == pytest.approx(expected, abs=1e-9)


def test_several_consumers_stand_side_by_side():
    b0, first, n = problem(50, 5, 3, 0)
    second = draw(7, 50, 4)
    s, together = moments(b0, torch.cat([first, second], dim=1), n)
    columns = torch.cat([moments(b0, first, n)[1], moments(b0, second, n)[1]], dim=1)
    found = linalg.new_neurons(s, columns)
    torch.testing.assert_close(found.singular_values, reference.neurons(s, together)[2], **EXACT)
    psi = float(first.square().sum() + second.square().sum()) / n
    split = [found.omega[:, :3], found.omega[:, 3:]]
    falls = [
        linalg.moved_bottleneck(0.0, s, moments(b0, v, n)[1], found.alpha, w)
        for v, w in zip([first, second], split, strict=True)
    ]
    assert psi + sum(falls) == pytest.approx(psi - float(found.singular_values.square().sum()), abs=1e-9)


def test_a_sum_of_moments_where_they_differ_keeps_the_inequality():
    for seed in range(50):
        parts = [problem(12, 4, 3, seed * 10), problem(12, 4, 2, seed * 10 + 5)]
        pairs = [moments(*part) for part in parts]
        s, cross = pairs[0][0] + pairs[1][0], torch.cat([pairs[0][1], pairs[1][1]], dim=1)
        found = linalg.new_neurons(s, cross)
        split = [found.omega[:, :3], found.omega[:, 3:]]
        fall = sum(linalg.gain(*pair, found.alpha, w) for pair, w in zip(pairs, split, strict=True))
        assert fall >= float(found.singular_values.square().sum()) - 1e-9


def test_no_correlation_no_neuron():
    x = draw(0, 40, 5)
    b0, v = reference.with_constant(x), draw(1, 40, 3)
    hidden = reference.with_constant(x @ draw(2, 5, 7))
    left = v - hidden @ reference.best_update(v, hidden).T
    s, cross = moments(b0, left, 40)
    energy = float(v.square().mean()) * 3
    assert float(left.square().sum()) / 40 > 1
    assert len(linalg.new_neurons(s, cross, constant=True, energy=energy).alpha) == 0
    assert len(linalg.new_neurons(s, moments(b0, v, 40)[1], constant=True, energy=energy).alpha) == 3


def decaying(f: int, g: int, power: float) -> tuple[Tensor, Tensor]:
    """Moments with singular values 1, 2^-p, 3^-p ..."""
    x = draw(0, 2 * f, f)
    left, right = torch.linalg.qr(draw(1, f, f))[0], torch.linalg.qr(draw(2, g, g))[0]
    count = min(f, g)
    return x.T @ x / (2 * f), left[:, :count] / torch.arange(1, count + 1).double() ** power @ right[:count]


@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(("f", "g"), [(240, 300), (300, 240), (12, 5), (5, 12)])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_top_neurons_are_the_first_of_all(f, g, count, power):
    s, cross = decaying(f, g, power)
    found = linalg.top_neurons(s, cross, count)
    every = linalg.new_neurons(s, cross, count)
    kept = len(every.alpha)
    torch.testing.assert_close(found.singular_values, every.singular_values[:kept], **EXACT)
    torch.testing.assert_close(product(found), product(every), rtol=1e-8, atol=1e-8)
    identity = found.alpha @ s @ found.alpha.T
    torch.testing.assert_close(identity, torch.eye(kept).double(), **EXACT)
    torch.testing.assert_close(found.omega, found.alpha @ cross, **EXACT)
    residual = found.alpha @ cross @ cross.T - found.singular_values[:, None] ** 2 * (found.alpha @ s)
    assert residual.abs().max() < 1e-9 * cross.norm() ** 2


def test_the_krylov_space_is_really_used_and_stays_small():
    s, cross = decaying(400, 400, 1.0)
    factors = linalg.whitener(s)
    left, values, _ = linalg._krylov(factors, cross, 9, 1, None)
    assert left.shape[1] <= 100
    assert values[0] == pytest.approx(float(torch.linalg.svdvals(factors.whiten(cross))[0]), rel=1e-12)


@given(shape=shapes, kind=st.sampled_from(KINDS), constant=st.booleans(), damping=st.sampled_from([0.0, 0.3]))
def test_top_neurons_where_s_is_singular_or_damped(shape, kind, constant, damping):
    b0, v, n = problem(**shape, kind=kind)
    s, cross = moments(b0, v, n)
    found = linalg.top_neurons(s, cross, 100, damping, constant)
    every = linalg.new_neurons(s, cross, None, damping, constant)
    torch.testing.assert_close(product(found), product(every), rtol=1e-7, atol=1e-8)


def test_top_neurons_leave_the_random_numbers_alone():
    s, cross = decaying(240, 240, 2.0)
    before = torch.get_rng_state()
    first = linalg.top_neurons(s, cross, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.alpha, linalg.top_neurons(s, cross, 2).alpha)
    other = linalg.top_neurons(s, cross, 2, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(product(other), product(first), **EXACT)


# --- GradMax, slopes, batch norm -------------------------------------------------------------------------------


def test_gradmax_maximises_the_gradient_of_the_fan_in():
    n = draw(0, 7, 5)
    omega, values = linalg.gradmax(n, 2)
    torch.testing.assert_close(omega @ omega.T, torch.eye(2).double(), **EXACT)
    best = (n @ omega.T).square().sum()
    assert float(best) == pytest.approx(float(values[:2].square().sum()), abs=1e-9)
    for seed in range(100):
        other = torch.linalg.qr(draw(seed, 5, 2))[0]
        assert (n @ other).square().sum() <= best
    assert float(linalg.gradmax(n, 3, norm=0.1)[0].norm()) == pytest.approx(0.1)
    assert linalg.gradmax(n, 9)[0].shape == (5, 5)


def two_layers(act, seed: int = 0) -> dict[str, Tensor]:
    """A network x -> act -> out with a logistic loss, and its moments; everything in float64."""
    x, y = reference.with_constant(draw(seed, 60, 4)), (draw(seed + 1, 60, 3) > 0).double()
    w1, w2 = draw(seed + 2, 3, 5), draw(seed + 3, 3, 4)
    b1 = reference.with_constant(act(x @ w1.T))
    out = (b1 @ w2.T).requires_grad_()
    v = -60 * torch.autograd.grad(F.binary_cross_entropy_with_logits(out, y), out)[0]
    return {"x": x, "y": y, "b1": b1, "out": out.detach(), "v": v}


def loss_along(net: dict[str, Tensor], act, found: linalg.Neurons, step: float) -> float:
    """The loss with neurons (sqrt step alpha, sqrt step omega) added."""
    new = act(net["x"] @ (step**0.5 * found.alpha.T)) @ (step**0.5 * found.omega)
    return float(F.binary_cross_entropy_with_logits(net["out"] + new, net["y"]))


def projected(net: dict[str, Tensor]) -> linalg.Neurons:
    left = net["v"] - net["b1"] @ reference.best_update(net["v"], net["b1"]).T
    return linalg.new_neurons(*moments(net["x"], left, 60), constant=True)


def test_the_slope_of_the_loss_takes_the_raw_v_where_the_projected_one_is_wrong():
    net = two_layers(torch.tanh)
    found = projected(net)
    phi = net["x"] @ found.alpha.T
    rate = linalg.slope(reference.outer_sum(net["v"], phi) / 60, found.omega)
    step = 1e-6
    measured = (loss_along(net, torch.tanh, found, 0.0) - loss_along(net, torch.tanh, found, step)) / step
    assert measured == pytest.approx(rate, rel=1e-4)
    assert abs(measured - float(found.singular_values.square().sum())) > 0.1 * abs(measured)


def test_one_sided_slopes_at_a_kink_add_up_over_both_signs():
    net = two_layers(torch.relu)
    found = linalg.new_neurons(*moments(net["x"], net["v"], 60), constant=True)
    rates = []
    for sign in (1, -1):
        move = linalg.Neurons(found.alpha[:1] * sign, found.omega[:1] * sign, found.singular_values)
        rates.append(linalg.slope(reference.outer_sum(net["v"], (net["x"] @ move.alpha.T).relu()) / 60, move.omega))
        step = 1e-6
        measured = (loss_along(net, torch.relu, move, 0.0) - loss_along(net, torch.relu, move, step)) / step
        assert measured == pytest.approx(rates[-1], rel=1e-3)
    assert sum(rates) == pytest.approx(float(found.singular_values[0]) ** 2, abs=1e-9)
    assert max(rates) >= float(found.singular_values[0]) ** 2 / 2


@pytest.mark.parametrize("variance", [1e-12, 1e-6, 1.0])
def test_batch_norm_is_the_identity_on_an_inserted_channel(variance):
    x = draw(0, 9, 2) * variance**0.5 + 3
    mean, spread = x.mean(dim=0), x.var(dim=0, unbiased=False)
    weight, bias = linalg.batch_norm_insertion(mean, spread, 1e-5)
    torch.testing.assert_close(F.batch_norm(x, mean, spread, weight, bias, eps=1e-5), x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(F.batch_norm(x, mean, spread, weight, bias, training=True, eps=1e-5), x, **EXACT)


# --- selection -------------------------------------------------------------------------------------------------


@given(shape=shapes, share=st.floats(0, 1))
def test_greedy_selection_and_restriction_equal_trying_every_feature(shape, share):
    m, f, g, seed = shape["m"] + 10, shape["f"], shape["g"], shape["seed"]
    b1, weight = draw(seed, m, f) @ draw(seed + 1, f, f), draw(seed + 2, g, f)
    gram = reference.outer_sum(b1, b1)
    count = round(share * f)
    order = linalg.select_greedy(gram, weight, count)
    assert order.tolist() == reference.greedy(b1, weight, count)
    if count:
        kept = order.sort().values
        refitted = linalg.restrict(gram, weight, kept)
        expected = torch.linalg.lstsq(b1[:, kept], b1 @ weight.T).solution.T
        torch.testing.assert_close(b1[:, kept] @ refitted.T, b1[:, kept] @ expected.T, rtol=1e-7, atol=1e-7)


def test_selection_leaves_duplicated_and_dead_features_to_the_end():
    b1 = draw(0, 30, 4)
    b1 = torch.stack([b1[:, 0], b1[:, 0], torch.zeros(30).double(), b1[:, 1], b1[:, 0] + b1[:, 1]], dim=1)
    gram, weight = reference.outer_sum(b1, b1), draw(1, 3, 5)
    order = linalg.select_greedy(gram, weight, 5)
    assert sorted(order.tolist()) == [0, 1, 2, 3, 4]
    assert order.tolist()[2:] == sorted(order.tolist()[2:])
    kept = order[:2]
    torch.testing.assert_close(b1[:, kept] @ linalg.restrict(gram, weight, kept).T, b1 @ weight.T, **EXACT)
    assert linalg.select_greedy(gram, torch.zeros(3, 5).double(), 2).shape == (2,)


@pytest.mark.parametrize("seed", range(10))
def test_selection_is_not_led_by_rounding_once_the_rest_depends(seed):
    b1 = draw(seed, 30, 4) @ draw(seed + 1, 4, 9)
    order = linalg.select_greedy(reference.outer_sum(b1, b1), draw(seed + 2, 3, 9), 9).tolist()
    assert sorted(order) == list(range(9))
    assert order[4:] == sorted(order[4:])


# --- convolutions ----------------------------------------------------------------------------------------------


def geometry(rng: random.Random, dims: int) -> tuple[reference.Geometry, reference.Geometry, tuple[int, ...]]:
    """Producer, consumer and an input size that both can read."""
    choices = [1, 2, 3], [1, 2, 3], [0, 1, 2], [1, 2]
    while True:
        pair = [tuple(tuple(rng.choice(options) for _ in range(dims)) for options in choices) for _ in range(2)]
        size = tuple(rng.randint(3, 7) for _ in range(dims))
        grid = reference.output_size(size, pair[0])
        if min(grid) > 0 and min(reference.output_size(grid, pair[1])) > 0:
            return pair[0], pair[1], size


CONVOLUTIONS = [(seed, dims, bias) for seed, dims in enumerate([1] * 6 + [2] * 20 + [3] * 4) for bias in (False, True)]


def convolution_problem(seed: int, dims: int, bias: bool) -> tuple[Tensor, Tensor, reference.Geometry]:
    producer, consumer, size = geometry(random.Random(seed), dims)
    virtual = reference.virtual_channels(draw(seed, 2, 2 if dims < 3 else 1, *size), producer, bias)
    outputs = reference.output_size(tuple(virtual.shape[2:]), consumer)
    return virtual, draw(seed + 100, 2, 2, *outputs), consumer


def convolution_moments(virtual: Tensor, v: Tensor, consumer: reference.Geometry) -> tuple[Tensor, Tensor]:
    counts = linalg.read_counts(virtual.shape[2:], *consumer)
    rank = linalg.convolution_rank(torch.Size(consumer[0]).numel(), virtual.shape[1])
    s = linalg.convolution_s(virtual, counts) * rank / len(virtual)
    return s, linalg.convolution_n(virtual, v, *consumer) / len(virtual)


@pytest.mark.parametrize(("seed", "dims", "bias"), CONVOLUTIONS)
def test_convolution_moments_equal_the_unfold_of_the_unfold(seed, dims, bias):
    virtual, v, consumer = convolution_problem(seed, dims, bias)
    s, n = convolution_moments(virtual, v, consumer)
    expected_s, expected_n = reference.pseudo_moments(virtual, v, consumer)
    torch.testing.assert_close(s, expected_s, **EXACT)
    torch.testing.assert_close(n, expected_n, **EXACT)


@pytest.mark.parametrize("dims", [1, 2])
def test_a_fixed_move_of_a_convolution_lowers_the_bottleneck_at_least_by_the_squares(dims):
    strict = 0
    for seed in range(40):
        virtual, v, consumer = convolution_problem(seed, dims, bias=True)
        found = linalg.new_neurons(*convolution_moments(virtual, v, consumer), constant=True)
        promised = float(v.square().sum()) / 2 - float(found.singular_values.square().sum())
        reached = reference.convolution_moved(virtual, v, consumer, found.alpha, found.omega)
        assert reached <= promised + 1e-9
        strict += reached < promised - 1e-6
    assert strict > 10


def test_a_single_offset_makes_a_convolution_linear():
    virtual, v, _ = convolution_problem(0, 2, True)
    v = draw(1, 2, 2, *virtual.shape[2:])
    consumer = ((1, 1), (1, 1), (0, 0), (1, 1))
    found = linalg.new_neurons(*convolution_moments(virtual, v, consumer), constant=True)
    promised = float(v.square().sum()) / 2 - float(found.singular_values.square().sum())
    reached = reference.convolution_moved(virtual, v, consumer, found.alpha, found.omega)
    assert reached == pytest.approx(promised, abs=1e-9)


def test_convolution_n_in_float32_loses_nothing_to_a_mean_of_100():
    virtual, v = draw(0, 16, 3, 8, 8), draw(1, 16, 2, 8, 8)
    consumer = ((3, 3), (1, 1), (1, 1), (1, 1))

    def error(mean: float) -> float:
        moved = (virtual + mean).float()
        exact = linalg.convolution_n(moved.double(), v.float().double(), *consumer)
        return float((linalg.convolution_n(moved, v.float(), *consumer) - exact).abs().max())

    assert error(100.0) < 3 * error(0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("kind", KINDS)
def test_an_accelerator_gives_the_same(kind):
    b0, v, n = problem(300, 240, 260, 0, kind)
    s, cross = moments(b0, v, n)
    for constant in (False, True):
        for solve in (linalg.new_neurons, linalg.top_neurons):
            here = solve(s, cross, 2, constant=constant)
            there = solve(s.cuda(), cross.cuda(), 2, constant=constant)
            torch.testing.assert_close(product(there).cpu(), product(here), **EXACT)
    assert linalg.select_greedy(s.cuda(), cross.T.cuda(), 3).tolist() == linalg.select_greedy(s, cross.T, 3).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 needs an accelerator")
def test_convolution_n_on_an_accelerator_is_as_exact():
    virtual, v = draw(0, 16, 40, 8, 8).float() + 100, draw(1, 16, 30, 8, 8).float()
    consumer = ((3, 3), (1, 1), (1, 1), (1, 1))
    exact = linalg.convolution_n(virtual.double(), v.double(), *consumer)
    found = linalg.convolution_n(virtual.cuda(), v.cuda(), *consumer).cpu()
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-3)


def test_read_counts_of_unequal_lengths_are_refused():
    with pytest.raises(InputError, match="one number a dimension"):
        linalg.read_counts((4, 4), (3,), (1, 1), (1, 1), (1, 1))


def test_read_counts_where_nothing_fits():
    assert float(linalg.read_counts((2,), (3,), (1,), (0,), (1,)).sum()) == 0


# --- the page --------------------------------------------------------------------------------------------------


def test_the_mathematics_page_names_what_exists():
    tests = Path(__file__).parent
    page = (tests.parent / "docs" / "mathematics.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in tests.glob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", page))
    assert len(names) > 20
    assert [name for name in names if f"def {name}(" not in sources] == []
    functions = set(re.findall(r"`(linalg|statistics|whitening)\.(\w+)`", page))
    assert len(functions) > 15
    assert [f for f in functions if not hasattr(importlib.import_module(f"auxin.{f[0]}"), f[1])] == []
