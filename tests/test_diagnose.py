"""`diagnose` against brute force from raw activations and gradients, collected with plain autograd in float64."""

import itertools
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auxin
import reference
from helpers_growth import batches, cnn, double, mlp, trained, untouched

cross_entropy = nn.functional.cross_entropy
Raw = dict[str, tuple[Tensor, Tensor]]


def raw(model: nn.Module, names: Iterable[str], x: Tensor, y: Tensor, loss: Any = cross_entropy) -> Raw:
    """Input and v = -n dL/da of layers."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            output.retain_grad()
            seen[name] = args[0].detach(), output

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    value = loss(model(x), y)
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(value, [output for _, output in seen.values()])
    return {name: (seen[name][0], -len(x) * g) for name, g in zip(seen, gradients, strict=True)}


def rows_of(module: Any, inputs: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What a consumer's weight multiplies (rows, F1), and v (rows, M)."""
    if isinstance(module, nn.Linear):
        rows, v = inputs.flatten(0, -2), v.flatten(0, -2)
    else:
        patches = reference.unfold(inputs, geometry_of(module))  # (n, q, o, c)
        rows = patches.transpose(2, 3).flatten(2).flatten(0, 1)
        v = v.flatten(2).transpose(1, 2).flatten(0, 1)
    return (rows if module.bias is None else reference.with_constant(rows)), v


def geometry_of(conv: Any) -> reference.Geometry:
    return conv.kernel_size, conv.stride, conv.padding, conv.dilation


def left_over(module: Any, inputs: Tensor, v: Tensor) -> tuple[Tensor, float, Tensor]:
    """The best update (M, F1), the bottleneck, and v less the update's move in v's own layout."""
    n = len(inputs)
    b1, rows = rows_of(module, inputs, v)
    update = reference.best_update(rows, b1)
    rest = rows - b1 @ update.T
    if v.dim() > 2 and not isinstance(module, nn.Linear):
        rest = rest.unflatten(0, (n, -1)).transpose(1, 2).reshape(v.shape)
    return update, reference.bottleneck(rows, b1, update, n), rest.reshape(v.shape)


def check_update(found: Tensor, update: Tensor, module: Any) -> None:
    features = module.weight[0].numel()
    torch.testing.assert_close(found, update[:, :features].reshape(module.weight.shape), rtol=1e-8, atol=1e-9)


def check_values(found: Tensor, s: Tensor, n: Tensor) -> None:
    expected = reference.neurons(s, n)[2]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def conv_moments(
    producer: Any, consumer: Any, image: Tensor, v: Tensor, through: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    virtual = through(reference.virtual_channels(image, geometry_of(producer), producer.bias is not None))
    return reference.pseudo_moments(virtual, v, geometry_of(consumer))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [2, 3])
def test_linear(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3, bias=bias), nn.Tanh(), nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 3))
    model.double()
    x = torch.randn(40, 6).double() if rows == 2 else torch.randn(12, 5, 6).double()
    y = torch.randn(*x.shape[:-1], 3).double()
    loss = nn.functional.mse_loss
    report = auxin.diagnose(model, [(x, y)], loss)
    seen = raw(model, ["0", "2", "4"], x, y, loss)
    for producer, consumer in (("0", "2"), ("2", "4")):
        module: Any = model.get_submodule(consumer)
        update, psi, rest = left_over(module, *seen[consumer])
        b0, v = seen[producer][0].flatten(0, -2), rest.flatten(0, -2)
        b0 = reference.with_constant(b0) if model.get_submodule(producer).bias is not None else b0
        row = report[producer]
        assert row.bottleneck == pytest.approx(psi, rel=1e-9)
        check_update(row.best_update, update, module)
        check_values(row.singular_values, b0.T @ b0 / len(x), b0.T @ v / len(x))
        assert row.desired == pytest.approx(float(seen[consumer][1].square().sum()) / len(x), rel=1e-9)
        variance = module(seen[consumer][0]).flatten(0, -2).var(0, unbiased=False).mean()
        assert row.output_variance == pytest.approx(float(variance), rel=1e-9)
        assert row.worth == pytest.approx(row.first_gain * row.output_variance / row.parameters_per_neuron)


def random_convolution(ins: int, outs: int, generator: random.Random) -> nn.Conv2d:
    def pick(options: list[int]) -> tuple[int, int]:
        return generator.choice(options), generator.choice(options)

    return nn.Conv2d(
        ins, outs, pick([1, 2, 3]), pick([1, 2]), pick([0, 1]), pick([1, 2]), bias=generator.random() < 0.5
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_convolutions_of_random_geometry(seed: int) -> None:
    torch.manual_seed(seed)
    generator = random.Random(seed)
    model = nn.Sequential(
        random_convolution(2, 2, generator), nn.Tanh(), random_convolution(2, 3, generator), nn.Flatten()
    ).double()  # fmt: skip
    x = torch.randn(5, 2, 11, 10).double()
    y = torch.randn_like(model(x))
    loss = nn.functional.mse_loss
    row = auxin.diagnose(model, [(x, y)], loss)["0"]
    seen = raw(model, ["0", "2"], x, y, loss)
    producer, consumer = model[0], model[2]
    update, psi, rest = left_over(consumer, *seen["2"])
    assert row.bottleneck == pytest.approx(psi, rel=1e-9)
    check_update(row.best_update, update, consumer)
    check_values(row.singular_values, *conv_moments(producer, consumer, x, rest, lambda t: t))


def test_through_pooling() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2, padding=1), nn.Flatten(), nn.Linear(32, 3)
    ).double()  # fmt: skip
    x, y = torch.randn(6, 2, 8, 8).double(), torch.randint(0, 3, (6,))
    row = auxin.diagnose(model, [(x, y)], cross_entropy)["0"]
    seen = raw(model, ["0", "3"], x, y)
    update, psi, rest = left_over(model[3], *seen["3"])
    assert row.bottleneck == pytest.approx(psi, rel=1e-9)
    check_update(row.best_update, update, model[3])
    average = nn.AvgPool2d(2)  # max pooling has no linearisation at 0: the average stands for it
    check_values(row.singular_values, *conv_moments(model[0], model[3], x, rest, average))


@pytest.mark.parametrize("pool", [False, True])
def test_flattened_images(pool: bool) -> None:
    torch.manual_seed(0)
    middle = nn.AdaptiveAvgPool2d(1) if pool else nn.Identity()
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), middle, nn.Flatten(), nn.Linear(3 if pool else 48, 3)
    ).double()  # fmt: skip
    x, y = torch.randn(7, 2, 4, 4).double(), torch.randint(0, 3, (7,))
    row = auxin.diagnose(model, [(x, y)], cross_entropy)["0"]
    seen = raw(model, ["0", "4"], x, y)
    update, psi, rest = left_over(model[4], *seen["4"])
    virtual = middle(reference.virtual_channels(x, geometry_of(model[0]), True)).flatten(2)  # (n, F0, pixels)
    offsets, features = virtual.shape[2], virtual.shape[1]
    s = torch.einsum("nfp,ngp->fg", virtual, virtual) * min(offsets, features) / len(x)
    n = torch.einsum("nfp,nm->fmp", virtual, rest).flatten(1) / len(x)
    assert row.bottleneck == pytest.approx(psi, rel=1e-9, abs=1e-12)
    check_update(row.best_update, update, model[4])
    check_values(row.singular_values, s, n)


class Heads(nn.Module):
    """One width, read by two consumers."""

    def __init__(self, body: nn.Module, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.body, self.first, self.second = body, first, second

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return torch.cat([self.first(h).flatten(1), self.second(h).flatten(1)], dim=1)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_several_consumers(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "linear":
        model, x = Heads(nn.Linear(5, 3), nn.Linear(3, 2), nn.Linear(3, 4)), torch.randn(30, 5).double()
    else:
        model = Heads(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 2, 2, stride=2))
        x = torch.randn(6, 2, 6, 6).double()
    model.double()
    y = torch.randn_like(model(x))
    loss = nn.functional.mse_loss
    row = auxin.diagnose(model, [(x, y)], loss)["body"]
    seen = raw(model, ["body", "first", "second"], x, y, loss)
    total, parts_s, parts_n = 0.0, [], []
    for name in ("first", "second"):
        module: Any = model.get_submodule(name)
        update, psi, rest = left_over(module, *seen[name])
        total += psi
        check_update(row.best_update[name], update, module)
        if kind == "linear":
            b0 = reference.with_constant(x)
            s, n = b0.T @ b0 / len(x), b0.T @ rest / len(x)
        else:
            s, n = conv_moments(model.body, module, x, rest, lambda t: t)
        parts_s.append(s)
        parts_n.append(n)
    assert row.consumers == ("first", "second")
    assert row.bottleneck == pytest.approx(total, rel=1e-9)
    check_values(row.singular_values, parts_s[0] if kind == "linear" else sum(parts_s), torch.cat(parts_n, dim=1))


@pytest.mark.parametrize("make", [lambda: mlp(5, 3, 4, 3), cnn])
def test_unequal_batches_are_one_large_batch(make: Callable[[], nn.Module]) -> None:
    model = make().double().eval()
    shape = (5,) if isinstance(model[0], nn.Linear) else (2, 6, 6)
    x, y = double(batches(*shape, count=1, size=37))[0]
    parts = [(x[a:b], y[a:b]) for a, b in itertools.pairwise([0, 1, 20, 30, 37])]
    whole, split = auxin.diagnose(model, [(x, y)], cross_entropy), auxin.diagnose(model, iter(parts), cross_entropy)
    assert whole.samples == split.samples == 37
    assert whole.loss == pytest.approx(split.loss, rel=1e-12)
    for a, b in zip(whole, split, strict=True):
        assert a.bottleneck == pytest.approx(b.bottleneck, rel=1e-9)
        torch.testing.assert_close(a.singular_values, b.singular_values, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(a.best_update, b.best_update, rtol=1e-8, atol=1e-10)
        assert a.output_variance == pytest.approx(b.output_variance, rel=1e-9)


def test_damping_is_of_both_gram_matrices() -> None:
    model = mlp(5, 3, 3).double()
    x, y = double(batches(5, count=1, size=40))[0]
    row = auxin.diagnose(model, [(x, y)], cross_entropy, damping=0.5)["0"]
    seen = raw(model, ["0", "2"], x, y)
    b1, v = rows_of(model[2], *seen["2"])
    update = damped(b1, len(x)) @ (b1.T @ v) / len(x)
    check_update(row.best_update, update.T, model[2])
    rest = v - b1 @ update
    assert row.bottleneck == pytest.approx(float(rest.square().sum()) / len(x), rel=1e-9)
    b0 = reference.with_constant(x)
    n = b0.T @ rest / len(x)
    values = torch.linalg.eigvalsh(n.T @ damped(b0, len(x)) @ n).clamp_min(0).sqrt().flip(0)
    torch.testing.assert_close(row.singular_values, values[: len(row.singular_values)], rtol=1e-8, atol=1e-10)


def damped(rows: Tensor, n: int) -> Tensor:
    """(S + D / 2)^-1, D the variances, the constant undamped."""
    s = rows.T @ rows / n
    variances = rows.var(0, unbiased=False)
    return torch.linalg.inv(s + 0.5 * torch.diag(variances))


@pytest.mark.parametrize("mode", [True, False])
def test_nothing_is_changed(mode: bool) -> None:
    model, data = cnn(), batches(2, 6, 6, size=8)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, data, optimizer).train(mode)
    with untouched(model, optimizer):
        auxin.diagnose(model, data, cross_entropy)
    with untouched(model, optimizer), torch.inference_mode():
        auxin.diagnose(model, data, cross_entropy)


def test_sites_may_be_named_or_given() -> None:
    model, data = mlp(5, 3, 4, 3), batches(5)
    assert [row.site for row in auxin.diagnose(model, data, cross_entropy, sites=["2"])] == ["2"]
    sites = auxin.find_sites(model, data[0][0])
    report = auxin.diagnose(model, data, cross_entropy, sites=sites)
    assert [row.site for row in report] == ["0", "2"]
    assert len(report) == 2
    assert report.tightest.worth == max(row.worth for row in report)
    with pytest.raises(auxin.AuxinError, match="unknown site '3'"):
        report["3"]


def test_report_prints_and_goes_to_json() -> None:
    model, data = mlp(5, 3, 4, 3), batches(5, size=40)
    report = auxin.diagnose(model, data, cross_entropy)
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded["rows"][0]["site"] == "0"
    assert loaded["rows"][0]["bottleneck"] == report["0"].bottleneck
    assert loaded["samples"] == 80
    text = str(report)
    assert "Expressivity bottlenecks on 80 samples" in text
    assert "1 width is not offered" in text
    assert f"{report['2'].bottleneck:.4g}" in text


def test_objective_measures_the_same() -> None:
    model, data = mlp(5, 3, 3), batches(5)
    objective = auxin.Objective(
        lambda net, batch: cross_entropy(net(batch["x"]), batch["y"]), inputs=lambda batch: batch["x"]
    )
    ours = auxin.diagnose(model, [{"x": x, "y": y} for x, y in data], objective)["0"]
    plain = auxin.diagnose(model, data, cross_entropy)["0"]
    assert ours.bottleneck == plain.bottleneck
    torch.testing.assert_close(ours.singular_values, plain.singular_values)
