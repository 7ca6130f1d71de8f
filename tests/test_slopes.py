"""The first-order fall of the loss that is predicted, against finite differences of the real one (float64)."""

import copy

import pytest
import torch
from torch import nn

import auxin

SMOOTH = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 4)),
    "linear-gelu": lambda: nn.Sequential(nn.Linear(6, 3), nn.GELU(), nn.Linear(3, 4)),
    "linear-sigmoid": lambda: nn.Sequential(nn.Linear(6, 3), nn.Sigmoid(), nn.Linear(3, 4)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, padding=1, stride=2),
        nn.Flatten(), nn.Linear(64, 4),
    ),
    "conv-pool-conv": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 4)
    ),
    "conv-flatten-linear": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.SiLU(), nn.Flatten(), nn.Linear(108, 4)),
    "conv-global-pool-linear": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)
    ),
    "conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 64)), nn.Conv1d(2, 3, 5, dilation=2), nn.Tanh(), nn.Conv1d(3, 4, 3, stride=2),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(),
    ),
    "batch-norm-eval": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 4)
    ).eval(),
    "linear-batch-norm-eval": lambda: nn.Sequential(
        nn.Linear(6, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 4)
    ).eval(),
}  # fmt: skip
KINKED = {
    "relu": lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 4)),
    "leaky": lambda: nn.Sequential(nn.Linear(6, 3), nn.LeakyReLU(0.2), nn.Linear(3, 4)),
    "selu": lambda: nn.Sequential(nn.Linear(6, 3), nn.SELU(), nn.Linear(3, 4)),
    "prelu": lambda: nn.Sequential(nn.Linear(6, 3), nn.PReLU(3), nn.Linear(3, 4)),
    "conv-relu-max-conv": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 4)
    ),
}


def data(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (6,) if name in ("linear", "linear-gelu", "linear-sigmoid", "linear-batch-norm-eval") else (2, 8, 8)
    shape = (128,) if name == "conv1d" else shape
    shape = (6,) if name in ("relu", "leaky", "selu", "prelu") else shape
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (64,), generator=generator)


@pytest.mark.parametrize("best_update", [True, False])
@pytest.mark.parametrize("name", [*SMOOTH, *KINKED])
def test_predicted_slope_is_the_measured_one(name: str, best_update: bool) -> None:
    torch.manual_seed(1)
    model = {**SMOOTH, **KINKED}[name]().double()
    loss = nn.functional.cross_entropy
    x, y = data(name)
    before = loss(model(x), y).item()
    falls = []
    # neurons enter as sqrt(gamma) on both sides: the fall over gamma is a series in sqrt(gamma)
    for root in (4e-3, 2e-3, 1e-3):
        gamma = root**2
        grown = copy.deepcopy(model)
        site = auxin.find_sites(grown, x)[0].name
        growth = auxin.grow(
            grown, [(x, y)], loss, neurons={site: 2}, amplitude=gamma, method=auxin.Tiny(best_update=best_update)
        )
        falls.append((before - loss(grown(x), y).item()) / gamma)
        record = growth[site]
        assert record.added == 2
        assert record.measured == pytest.approx(before - loss(grown(x), y).item(), rel=1e-6, abs=1e-10)
    first = [2 * falls[1] - falls[0], 2 * falls[2] - falls[1]]
    slope = (4 * first[1] - first[0]) / 3
    predicted = record.rate_neurons + record.rate_update
    assert predicted * gamma == pytest.approx(record.predicted)
    assert predicted == pytest.approx(slope, rel=1e-4 if name in SMOOTH else 1e-3)
