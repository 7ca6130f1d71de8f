"""What is minimised: pairs with a loss, and objectives for every other kind of batch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auxin
from auxin.errors import InputError
from auxin.objectives import Objective, Supervised, as_task, best_constant, call, first_tensor
from helpers_growth import batches, mlp, trained

cross_entropy = nn.functional.cross_entropy
mse = nn.functional.mse_loss


class Language(nn.Module):
    """Embedding, a block over the tokens, and logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        h = self.embed(tokens)
        h = h + self.down(nn.functional.gelu(self.up(self.norm(h))))
        return {"logits": self.head(h if mask is None else h * mask[..., None])}


def language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**inputs(batch))["logits"]
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"tokens": batch["tokens"], "mask": batch["mask"]}


def texts(count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 11, (6, 1), generator=generator) for _ in range(count)]
    return [{"tokens": (t + 3 * torch.arange(8)) % 11, "mask": torch.ones(6, 8)} for t in tokens]


def test_a_language_model_with_batches_of_dicts() -> None:
    model = Language()
    objective = auxin.Objective(language_loss, inputs=inputs)
    sites = auxin.find_sites(model, inputs(texts()[0]))
    assert "up" in sites
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    growth = auxin.grow(model, texts(), objective, optimizer=optimizer, neurons={"up": 3}, samples=24)
    assert growth["up"].added == 3
    assert (growth.samples, growth.samples_held_out) == (12, 12)
    assert growth["up"].measured > 0
    language_loss(model, texts()[0]).backward()
    assert model.up.weight.grad.any(dim=1).all()
    report = auxin.diagnose(model, texts(), objective, sites=sites)
    assert report["up"].bottleneck > 0


def test_a_grower_with_an_objective() -> None:
    model = Language()

    def score(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.full((6,), float(language_loss(net, batch)))

    for options in ({}, {"score": score}, {"score": score, "baseline": 9.0}):
        objective = auxin.Objective(language_loss, inputs=inputs, **options)
        grower = auxin.Grower(model, objective, policy=auxin.Policy(smallest=1, rho=0.0, errors=0.0))
        grower.step(texts())
        slack = next(slack for slack in grower.slack if slack.site == "up")
        assert slack.constant == (9.0 if "baseline" in options else pytest.approx(slack.score))
        assert objective.baseline == options.get("baseline")


def test_sizes_weigh_batches() -> None:
    x, y = batches(5, count=1, size=30)[0]
    parts = [{"x": x[:5], "y": y[:5]}, {"x": x[5:], "y": y[5:]}]
    objective = auxin.Objective(
        lambda net, b: cross_entropy(net(b["x"]), b["y"]), size=lambda b: len(b["y"]), inputs=lambda b: b["x"]
    )
    model = mlp(5, 3, 3).double()
    model.double()
    parts = [{"x": part["x"].double(), "y": part["y"]} for part in parts]
    whole = auxin.diagnose(model, [(x.double(), y)], cross_entropy)
    assert auxin.diagnose(model, parts, objective)["0"].bottleneck == pytest.approx(whole["0"].bottleneck, rel=1e-9)


def test_inputs_of_every_kind() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x))) + shift

    model = Two()
    x, y = batches(5)[0]
    shift = torch.zeros(len(x), 3)
    for given in ((x, shift), [x, shift], {"x": x, "shift": shift}):
        assert call(model, given).shape == (24, 3)
        growth = auxin.grow(model, [(given, y)], cross_entropy, neurons=1)
        assert growth["a"].added == 1


def test_scores_of_classes() -> None:
    task = as_task(cross_entropy)
    logits = torch.tensor([[20.0, 0.0, 0.0], [0.0, 20.0, 0.0]])
    target = torch.tensor([0, 0])
    scores = task.scores(logits, (None, target))
    torch.testing.assert_close(scores, torch.tensor([0.0, 1.0]).double(), atol=1e-6, rtol=0)
    triples = [(logits, (None, target), None), (logits, (None, torch.tensor([1, 1])), torch.tensor([0]))]
    shares = [2 / 3, 1 / 3]
    assert task.constant_score(triples) == pytest.approx((1 - sum(s**2 for s in shares)) / 2)
    padded = task.scores(logits[..., None].expand(2, 3, 4), (None, torch.tensor([[0, 0, -100, -100], [-100] * 4])))
    torch.testing.assert_close(padded, torch.tensor([0.0, 0.0]).double(), atol=1e-6, rtol=0)
    positions = torch.randn(2, 3, 7)
    assert task.scores(positions, (None, torch.zeros(2, 7, dtype=torch.long))).shape == (2,)


def test_scores_of_regression() -> None:
    task = as_task(nn.MSELoss())
    answer, target = torch.zeros(4, 2), torch.tensor([[0.0, 2.0]] * 3 + [[4.0, 2.0]])
    torch.testing.assert_close(task.scores(answer, (None, target)), torch.tensor([2.0, 2.0, 2.0, 10.0]).double())
    rows = torch.tensor([0, 3])
    assert task.scores(answer, (None, target), rows).tolist() == [2.0, 10.0]
    variance = float(target.var(0, unbiased=False).mean())
    assert task.constant_score([(answer, (None, target), None)]) == pytest.approx(variance)


def test_scores_of_everything_else_are_the_loss() -> None:
    bce = nn.functional.binary_cross_entropy_with_logits
    task = as_task(bce)
    answer = torch.randn(40, 1)
    target = (torch.arange(40)[:, None] % 4 == 0).float()
    expected = bce(answer, target, reduction="none")[:, 0].double()
    torch.testing.assert_close(task.scores(answer, (None, target)), expected)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert task.constant_score([(answer, (None, target), None)]) == pytest.approx(entropy, rel=1e-4)


def test_a_score_of_ones_own() -> None:
    task = Supervised(cross_entropy, score=lambda output, target: (output.argmax(1) != target).float())
    logits, target = torch.eye(3), torch.tensor([0, 1, 0])
    assert task.scores(logits, (None, target)).tolist() == [0.0, 0.0, 1.0]
    assert 0 <= task.constant_score([(logits, (None, target), None)]) <= 1


def test_a_constant_that_cannot_be_found() -> None:
    with pytest.raises(auxin.AuxinError, match=r"no best constant prediction.*baseline="):
        best_constant(lambda output, target: output.sum() * float("nan"), torch.randn(4, 2), torch.randn(4, 2))


def test_objective_answers() -> None:
    objective = Objective(lambda net, batch: net(batch).mean())
    batch = torch.ones(7, 5)
    assert objective.size(batch) == 7
    assert objective.inputs(batch) is batch
    assert objective.inputs((batch, 3)) is batch
    assert not objective.splits(None, batch)
    model = nn.Linear(5, 1)
    answer = objective.run(model, batch)
    assert objective.scores(answer, batch).shape == (1,)
    triples = [(answer, batch, None)]
    assert objective.constant_score(triples) == pytest.approx(float(answer[0]))
    assert objective.constant_score(triples, 4.0) == 4.0
    assert Objective(lambda net, batch: net(batch).mean(), baseline=2.0).constant_score(triples, 4.0) == 2.0
    with pytest.raises(InputError, match="found no tensor"):
        first_tensor({"a": [1, "b"]})


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), mse, nn.L1Loss(), nn.functional.huber_loss])
def test_losses_as_modules_and_functions(loss: Any) -> None:
    model = mlp(5, 3, 3)
    data = batches(5) if isinstance(loss, nn.CrossEntropyLoss) else [(x, torch.sin(x[:, :3])) for x, _ in batches(5)]
    grower = auxin.Grower(model, loss, policy=auxin.Policy(smallest=1, rho=0.0, errors=0.0))
    grower.step(data)
    assert grower.slack[0].constant > 0
    assert auxin.grow(model, data, loss, neurons=1).added == 1


def test_outputs_that_are_no_tensor() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(5, 3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(x), x

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return cross_entropy(output[0], target)

    model, data = Pair(), batches(5, count=4)
    growth = auxin.grow(model, data, loss, neurons=1, samples=96)
    assert (growth.samples, growth.samples_held_out) == (48, 48)
    task = as_task(loss)
    assert task.scores(model(data[0][0]), data[0]).shape == (1,)
    trained(model.body, data, torch.optim.SGD(model.parameters(), lr=0.1))
