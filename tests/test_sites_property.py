"""Random networks: every width between supported layers is offered, and what is offered widens without effect."""

import os
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from auxin.sites import find_sites, verify
from helpers_sites import wider

EXAMPLES = int(os.environ.get("AUXIN_EXAMPLES", "100"))
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SELU, nn.Sigmoid, nn.Softplus, nn.Tanh, nn.LeakyReLU, nn.Hardswish, nn.Identity)


def norms(draw: st.DrawFn, width: int, kinds: list[type[nn.Module]]) -> list[nn.Module]:
    """None, or one norm that fits the width."""
    kind = draw(st.sampled_from([None, nn.GroupNorm, *kinds]))
    if kind is None:
        return []
    if kind is nn.GroupNorm:
        return [nn.GroupNorm(draw(st.sampled_from([g for g in (1, 2, 3) if width % g == 0])), width)]
    return [kind(width)]


def activations(draw: st.DrawFn, width: int) -> list[nn.Module]:
    kind = draw(st.sampled_from([*ACTIVATIONS, nn.PReLU]))
    dropout = [nn.Dropout(0.3)] if draw(st.booleans()) else []
    return [nn.PReLU(width) if kind is nn.PReLU else kind(), *dropout]


class Beside(nn.Module):
    """A branch added to the stream."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


@st.composite
def perceptrons(draw: st.DrawFn) -> tuple[nn.Module, Tensor, list[str]]:
    torch.manual_seed(draw(st.integers(0, 10**6)))
    widths = [5, *draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)), 3]
    layers: list[nn.Module] = []
    names = []
    for before, width in pairwise(widths[:-1]):
        names.append(str(len(layers)))
        layers += [nn.Linear(before, width), *norms(draw, width, [nn.BatchNorm1d]), *activations(draw, width)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], 3)), torch.randn(4, 5), names


def convolution(draw: st.DrawFn, before: int, width: int) -> nn.Conv2d:
    kernel, mode = draw(st.sampled_from([1, 3])), draw(st.sampled_from(["zeros", "circular", "reflect"]))
    return nn.Conv2d(before, width, kernel, padding=kernel // 2, padding_mode=mode, bias=draw(st.booleans()))


@st.composite
def images(draw: st.DrawFn) -> tuple[nn.Module, Tensor, list[str]]:
    """Convolutions, residual blocks between them, and a linear head."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    layers: list[nn.Module] = []
    names: list[str] = []
    before = 2
    for width in draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)):
        residual = draw(st.booleans())
        names += [] if residual else [str(len(layers))]
        layers += [convolution(draw, before, width), *norms(draw, width, [nn.BatchNorm2d, nn.InstanceNorm2d])]
        layers += activations(draw, width)
        if residual:
            names.append(f"{len(layers)}.branch.0")
            inner = [convolution(draw, width, 4), *norms(draw, 4, [nn.BatchNorm2d]), *activations(draw, 4)]
            layers.append(Beside(nn.Sequential(*inner, convolution(draw, 4, width))))
        before = width
    layers.append(draw(st.sampled_from([nn.MaxPool2d(2, padding=1), nn.AvgPool2d(3), nn.AdaptiveAvgPool2d(2)])))
    layers.append(nn.Flatten())
    size = nn.Sequential(*layers).eval()(torch.randn(1, 2, 7, 7)).shape[1]
    return nn.Sequential(*layers, nn.Linear(size, 3)), torch.randn(3, 2, 7, 7), names


@settings(max_examples=EXAMPLES)
@given(case=st.one_of(perceptrons(), images()), training=st.booleans())
def test_every_private_width_is_offered_and_widens_without_effect(
    case: tuple[nn.Module, Tensor, list[str]], training: bool
) -> None:
    model, example, names = case
    model, example = model.double().train(training), example.double()
    sites = find_sites(model, example)
    assert [site.name for site in sites] == names, sites.refused
    model.eval()
    before = model(example)
    for site in sites:
        verify(site)
        grown = wider(model, site, site.group)
        assert torch.allclose(grown(example), before, rtol=1e-9, atol=1e-9)
