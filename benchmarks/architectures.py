"""Sites that the finder offers on real architectures with random weights, and whether growth there is sound.

    python benchmarks/architectures.py [name ...]

For every model: sites, refusals with their reasons, seconds; what is offered is grown by random neurons that nothing
reads yet, which must leave the output as it is (1e-5 in float64), and then trained on: every new neuron must get a
gradient in its fan-in and in its fan-out. Models of timm are left out where timm is not installed. The tables go to
benchmarks/results/architectures.md; the exit status is 1 if anything raised or grew wrongly.
"""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from auxin.errors import AuxinError
from auxin.proving import NEURONS, Outputs, entries, make_uneven
from auxin.sites import find_sites
from auxin.structure import Change, Site, Sites, slot_tensor, split_axis
from auxin.surgery import apply, scratch

RESULTS = Path(__file__).parent / "results" / "architectures.md"
TOLERANCE = 1e-5


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width) to the same."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(read.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """Attention and an MLP, each behind a layer norm and beside a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.ln2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width) to the same."""
        x = x + self.attention(self.ln1(x))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    """A small language model with a head tied to its embedding."""

    def __init__(self, vocabulary: int = 256, width: int = 128, depth: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, t) integers to (n, t, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain_cnn() -> nn.Module:
    """Convolutions with every kind of pass-through, flattened into two linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.GroupNorm(4, 32), nn.SiLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1, padding_mode="circular"), nn.PReLU(32), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(128, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 10),
    )  # fmt: skip


def image(size: int) -> Callable[[], Tensor]:
    """Two square images."""
    return lambda: torch.randn(2, 3, size, size)


def tokens() -> Tensor:
    """Two lines of text."""
    return torch.randint(256, (2, 48))


HAND_WRITTEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt (by hand)": (GPT, tokens),
    "cnn (by hand)": (plain_cnn, image(32)),
}
TIMM = {
    "resnet18": 64,
    "resnet50": 64,
    "resnext50_32x4d": 64,
    "vgg11_bn": 224,
    "mobilenetv2_100": 64,
    "efficientnet_b0": 64,
    "densenet121": 64,
    "inception_v3": 128,
    "convnext_tiny": 64,
    "vit_small_patch16_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "mixer_s32_224": 224,
}


@dataclass
class Result:
    """What one model showed."""

    name: str
    sites: Sites | None = None
    seconds: float = 0.0
    change: float = 0.0
    faults: list[str] = field(default_factory=list)


def timm_models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]]:
    """The models of timm, if it can be imported; torchvision has no operators on a CPU build."""
    try:
        library = torch.library.Library("torchvision", "DEF")
        for signature in ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor"):
            library.define(signature)
    except RuntimeError:
        pass
    try:
        import timm
    except ImportError:
        return {}
    return {name: (lambda name=name: timm.create_model(name), image(size)) for name, size in TIMM.items()}


def outputs(model: nn.Module, example: Tensor) -> Outputs:
    """What the model answers in evaluation mode."""
    with torch.no_grad():
        return Outputs((model.eval()(example),))


def grown(model: nn.Module, sites: Sites) -> nn.Module:
    """A copy of `model` with random neurons in every site that nothing reads yet."""
    copy = scratch(model)
    for site in sites:
        count = -(-NEURONS // site.group) * site.group
        new = {slot: entries(slot_tensor(copy, slot), slot, count).abs() for slot in site.slots}
        apply(copy, [Change(site, count, new)])
    return copy


def untrained(copy: nn.Module, site: Site, width: int) -> list[str]:
    """New neurons of `site` that a backward pass gives no gradient, by role."""
    faults = []
    for role in ("fan_in", "fan_out"):
        slots = [slot for slot in site.slots if slot.role == role and slot.tensor == "weight"]
        for slot in slots:
            gradient = slot_tensor(copy, slot).grad
            if gradient is None or gradient.shape != slot_tensor(copy, slot).shape:
                faults.append(f"{slot.name} has no gradient")
                continue
            axis = slot.axis + 1
            new = split_axis(gradient, slot).narrow(axis, width, split_axis(gradient, slot).shape[axis] - width)
            if not bool(new.movedim(axis, 0).flatten(1).abs().amax(1).gt(0).all()):
                faults.append(f"{slot.name}: a new neuron has no gradient in its {role}")
    return faults


def train_on(copy: nn.Module, sites: Sites, example: Tensor) -> list[str]:
    """Faults of a backward pass after the new neurons are read."""
    for site in sites:
        for slot in site.slots:
            if slot.role == "fan_out":
                weight = slot_tensor(copy, slot)
                new = split_axis(weight.data, slot).narrow(slot.axis + 1, site.width, NEURONS)
                new += 0.1 * torch.randn_like(new) * weight[0].numel() ** -0.5
    output = copy.eval()(example)
    F.cross_entropy(output.flatten(0, -2), torch.arange(output.flatten(0, -2).shape[0]) % output.shape[-1]).backward()
    return [fault for site in sites for fault in untrained(copy, site, site.width)]


def examine(name: str, build: Callable[[], nn.Module], example: Callable[[], Tensor]) -> Result:
    """Find, grow and train one model."""
    torch.manual_seed(0)
    result, model, batch = Result(name), build(), example()
    started = time.perf_counter()
    try:
        result.sites = find_sites(model, batch)
        result.seconds = time.perf_counter() - started
        model = model.double()
        make_uneven(model)
        batch = batch.double() if batch.is_floating_point() else batch
        before, copy = outputs(model, batch), grown(model, result.sites)
        result.change = before.difference(outputs(copy, batch))
        if not result.change <= TOLERANCE:
            result.faults.append(f"growth changed the output by {result.change:.2g}")
        result.faults += train_on(copy, result.sites, batch)
    except (AuxinError, RuntimeError, TypeError, ValueError) as error:
        result.faults.append(f"{type(error).__name__}: {error}")
    return result


def summary(results: list[Result]) -> list[tuple[str, ...]]:
    """One row a model."""
    return [
        (r.name, str(len(r.sites or ())), str(len(r.sites.refused if r.sites else ())), f"{r.seconds:.1f}",
         f"{r.change:.1e}", "; ".join(r.faults[:3]) or "none")
        for r in results
    ]  # fmt: skip


def reasons(sites: Sites) -> list[tuple[str, int, str]]:
    """Refusals of one kind together: the reason, how many, and the first name."""
    kinds: Counter[str] = Counter()
    first: dict[str, str] = {}
    for refusal in sites.refused:
        kind = re.sub(r"'[^']*'", "…", refusal.reason)
        kinds[kind] += 1
        first.setdefault(kind, refusal.name)
    return [(kind, count, first[kind]) for kind, count in kinds.most_common()]


HEADER = ("model", "sites", "refused", "seconds", "change of the output", "faults")


def markdown(results: list[Result]) -> str:
    """The page that is committed."""
    lines = [
        "# Sites on real architectures", "",
        "Random weights, two samples, one thread. Every site offered is grown by random neurons with zero fan-out",
        "(change of the output, relative, in float64), then a backward pass must reach every new neuron.", "",
        "    python benchmarks/architectures.py", "",
        f"torch {torch.__version__}, {date.today().isoformat()}", "",
        f"| {' | '.join(HEADER)} |", "|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in summary(results)), "",
    ]  # fmt: skip
    for result in results:
        if result.sites is not None:
            lines += [f"## {result.name}", "", f"Sites: {', '.join(s.name for s in result.sites) or 'none'}", ""]
            lines += [f"- {count} × {kind} (first: {name})" for kind, count, name in reasons(result.sites)]
            lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Examine what is installed, or the models named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these models")
    chosen = parser.parse_args().names
    torch.set_num_threads(1)
    models = HAND_WRITTEN | timm_models()
    results = []
    console = Console()
    for name, (build, example) in models.items():
        if not chosen or name in chosen:
            console.print(f"{name} …")
            results.append(examine(name, build, example))
    table = Table(*HEADER)
    for row in summary(results):
        table.add_row(*row)
    console.print(table)
    if not chosen:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(markdown(results))
    return int(any(result.faults for result in results))


if __name__ == "__main__":
    sys.exit(main())
