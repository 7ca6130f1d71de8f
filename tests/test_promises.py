"""What a user may rely on across modules; each of these once did not hold."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auxin
from auxin.errors import InputError, ModelChangedError, UnknownNameError

cross_entropy = nn.CrossEntropyLoss()


def data(features: int = 5, classes: int = 3, samples: int = 96, shape: tuple[int, ...] = ()) -> list:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, features, *shape, generator=generator)
    return [(x, torch.randint(classes, (samples,), generator=generator))]


@pytest.mark.parametrize("method", ["sprout", "tiny", "gradmax"])
@pytest.mark.parametrize("parameters", [60, 300, 1000])
def test_a_budget_is_never_overspent(method: str, parameters: int) -> None:
    layers = [part for _ in range(6) for part in (nn.Linear(5, 5), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(5, 3))
    before = auxin.parameters(model)
    auxin.grow(model, data(), cross_entropy, neurons=auxin.Budget(parameters=parameters), method=method, amplitude=0.5)
    assert 0 < auxin.parameters(model) - before <= parameters


@pytest.mark.parametrize("method", ["random", "sprout"])
def test_successive_growths_draw_other_neurons(method: str) -> None:
    model = nn.Sequential(nn.Linear(10, 2), nn.Tanh(), nn.Linear(2, 3))
    for _ in range(3):
        auxin.grow(model, data(10), cross_entropy, neurons=6, method=method, amplitude=0.5)
    fan_ins = F.normalize(model[0].weight.detach()[2:], dim=1)
    cosines = (fan_ins @ fan_ins.T).abs() - torch.eye(len(fan_ins))
    assert float(cosines.max()) < 0.9999


def test_sites_of_a_forward_that_changed_are_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(5, 4), nn.Linear(4, 3), False

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return self.b(F.layer_norm(h, (h.shape[1],)) if self.norm else h)

    model = Net()
    sites = auxin.find_sites(model, data()[0][0])
    model.norm = True
    with pytest.raises(ModelChangedError, match="find_sites again"):
        auxin.grow(model, data(), cross_entropy, sites=sites, neurons=1)
    assert model.a.out_features == 4


@pytest.mark.parametrize("method", [auxin.Tiny(), auxin.Random(), auxin.Tiny(normalisation="unit"), auxin.Sprout()])
@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 4), lambda: nn.InstanceNorm2d(4)])
def test_the_slope_behind_a_norm_of_size_one(method: auxin.Method, norm) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm(), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(18, 3))
    model.double()
    x, y = data(3, shape=(6, 6))[0]
    batch = [(x.double(), y)]
    record = auxin.grow(model, batch, cross_entropy, neurons={"0": 2}, amplitude=1e-6, method=method, held_out=batch)[0]
    assert record.measured == pytest.approx(record.predicted, rel=1e-3)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda o, t: torch.zeros((), requires_grad=True), "has no gradient"),
        (lambda o, t: cross_entropy(o, t)[None], "scalar"),
    ],
)
def test_losses_that_cannot_be_followed(loss, reason: str) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(InputError, match=reason):
        auxin.grow(model, data(), loss, neurons=1)
    with pytest.raises(InputError, match="reduction='mean'"):
        auxin.diagnose(model, data(), nn.CrossEntropyLoss(reduction="sum"))


def test_the_slack_of_models_that_return_tuples_and_dicts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = torch.relu(self.body(x))
            return {"one": self.one(h), "two": self.two(h)}

    def loss(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
        return cross_entropy(outputs["one"], target) + outputs["two"].square().mean()

    grower = auxin.Grower(Two(), loss, policy=auxin.Policy(smallest=1))
    for _ in range(3):
        grower.step(data())
    assert grower.slack[0].site == "body"


def test_an_objective_with_a_score_still_has_its_gradient() -> None:
    def fn(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(net(batch[0]), batch[1])

    plain = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    scored = auxin.Objective(fn, score=lambda net, b: F.cross_entropy(net(b[0]), b[1], reduction="none"))
    wanted = auxin.diagnose(plain, data(), cross_entropy)["0"].bottleneck
    assert auxin.diagnose(plain, data(), scored)["0"].bottleneck == pytest.approx(wanted)


def test_growth_and_sites_print_as_tables() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    sites = auxin.find_sites(model, data()[0][0])
    assert "refused: 2: it is the width of the model's output" in str(sites)
    assert "4 → 6" in str(auxin.grow(model, data(), cross_entropy, neurons=2))
    with pytest.raises(UnknownNameError, match="it was refused: it is the width of the model's output"):
        sites["2"]


def test_features_next_to_nothing_take_no_huge_fan_out() -> None:
    for seed in (48, 109, 139):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(2, 5, bias=False), nn.Sigmoid(), nn.Linear(5, 1, bias=False), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(1, 3, bias=False),
        )  # fmt: skip
        batch = [(100 + torch.randn(12, 2), torch.randn(12, 3))]
        growth = auxin.grow(model, batch, F.smooth_l1_loss, neurons=1)
        assert max(float(p.detach().abs().max()) for p in model.parameters()) < 1e6
        assert auxin.History.from_json(auxin.History([growth]).to_json()) == auxin.History([growth])
