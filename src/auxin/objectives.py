"""What is minimised, seen from a batch: `(input, target)` with a loss, or anything with an `Objective`.

A *task* answers five questions about a batch: what the model makes of it, what that costs on average, how many
samples stand behind the average, whether the average can be taken over some of the rows only, and one score a
sample for the rules that compare sizes.
"""

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auxin.errors import AuxinError, InputError

Loss = Callable[[Any, Any], Tensor]


class Task(ABC):
    """How a batch is run, weighed and scored."""

    @abstractmethod
    def inputs(self, batch: Any) -> Any:
        """What the model is called with."""

    @abstractmethod
    def size(self, batch: Any) -> int:
        """The number of samples behind a batch's mean loss."""

    @abstractmethod
    def run(self, model: nn.Module, batch: Any) -> Any:
        """The model's answer to the whole batch."""

    @abstractmethod
    def mean(self, answer: Any, batch: Any, rows: Tensor | None = None) -> Tensor:
        """The mean loss over the batch, or over some of its rows."""

    @abstractmethod
    def splits(self, answer: Any, batch: Any) -> bool:
        """Whether `mean` can take rows."""

    @abstractmethod
    def scores(self, answer: Any, batch: Any, rows: Tensor | None = None) -> Tensor:
        """One value a sample, the lower the better."""

    @abstractmethod
    def constant_score(self, batches: list[tuple[Any, Any, Tensor | None]], first: float | None = None) -> float:
        """The mean score of the best constant prediction over (answer, batch, rows) triples.

        `first`: what this was when it was asked for the first time, for tasks that cannot know it.
        """


class Supervised(Task):
    """Batches `(input, target)` and `loss(output, target)`, mean-reduced."""

    def __init__(self, loss: Loss, score: Callable[[Any, Any], Tensor] | None = None) -> None:
        if getattr(loss, "reduction", "mean") == "sum":
            raise InputError("the loss sums over samples; accepted: a mean over the batch (reduction='mean')")
        self.loss = loss
        self.score = score

    def inputs(self, batch: Any) -> Any:
        """The first half of the pair."""
        return pair(batch)[0]

    def size(self, batch: Any) -> int:
        """The first dimension of the first input tensor."""
        return first_tensor(pair(batch)[0]).shape[0]

    def run(self, model: nn.Module, batch: Any) -> Any:
        """`model(input)`, `model(*input)` or `model(**input)`."""
        inputs = pair(batch)[0]
        with blamed("the model", "pass batches that it can be run on"):
            return call(model, inputs)

    def mean(self, answer: Any, batch: Any, rows: Tensor | None = None) -> Tensor:
        """The user's loss, on the rows alone where asked."""
        target = pair(batch)[1]
        with blamed("the loss", "pass one that takes (output, target)"):
            return self.loss(answer, target) if rows is None else self.loss(answer[rows], target[rows])

    def splits(self, answer: Any, batch: Any) -> bool:
        """Where output and target are tensors with a row a sample."""
        n, target = self.size(batch), pair(batch)[1]
        tensors = [answer, target]
        return n > 1 and all(torch.is_tensor(t) and t.dim() > 0 and t.shape[0] == n for t in tensors)

    def scores(self, answer: Any, batch: Any, rows: Tensor | None = None) -> Tensor:
        """Half the Brier score for classes, the squared error for regression, else the loss itself.

        One value a sample; one for the whole batch where output or target is no tensor with a row a sample.
        """
        target = pair(batch)[1]
        if rows is not None:
            answer, target = answer[rows], target[rows]
        kind = self._kind(answer, target)
        if self.score is not None:
            return self.score(answer, target).double()
        if kind == "classes":
            return half_brier(answer, target)
        if kind == "regression":
            return (answer.double() - target.double()).square().flatten(1).mean(1)
        if not in_rows(answer, target):
            return self.loss(answer, target).double().reshape(1)
        return torch.stack([self.loss(answer[i : i + 1], target[i : i + 1]) for i in range(len(answer))]).double()

    def constant_score(self, batches: list[tuple[Any, Any, Tensor | None]], first: float | None = None) -> float:
        """Class frequencies or means where those are best; else found by gradient descent on the loss.

        Where outputs or targets are no tensors, what the model scored when first asked.
        """
        if not all(in_rows(answer, pair(batch)[1]) for answer, batch, _ in batches):
            now = torch.cat([self.scores(*item) for item in batches]).mean()
            return float(now) if first is None else first
        answers = torch.cat([answer if rows is None else answer[rows] for answer, _, rows in batches]).detach()
        targets = torch.cat([pair(b)[1] if rows is None else pair(b)[1][rows] for _, b, rows in batches])
        kind = self._kind(answers, targets)
        if self.score is None and kind == "classes":
            shares = one_hot(answers, targets).movedim(1, -1)[targets >= 0].mean(0)
            return float((1 - shares.square().sum()) / 2)
        if self.score is None and kind == "regression":
            return float((targets.double() - targets.double().mean(0)).square().mean())
        constant = best_constant(self.loss, answers, targets)
        pairs = [(constant, (None, targets), None)]
        return float(self.scores(*pairs[0]).mean())

    def _kind(self, answer: Any, target: Any) -> str:
        if not (torch.is_tensor(answer) and torch.is_tensor(target)):
            return "other"
        if not target.is_floating_point():
            return "classes" if answer.dim() >= 2 and answer.dim() == target.dim() + 1 else "other"
        name = getattr(self.loss, "__name__", type(self.loss).__name__).lower()
        regression = any(part in name for part in ("mse", "l1", "huber"))
        return "regression" if regression and answer.shape == target.shape else "other"


class Objective(Task):
    """`fn(model, batch) -> mean loss` for every kind of batch that is not `(input, target)`.

    `size(batch)`: the number of samples behind that mean (default: the first dimension of the first tensor found in
    the batch). `score(model, batch)`: one value a sample, for the rules that compare sizes; left out, the loss of
    each batch. `baseline`: the score of the best constant prediction; left out, that of the model when first seen.
    `inputs(batch)`: what the model is called with, needed to find sites (default: the batch itself, or its first
    half if it is a pair).
    """

    def __init__(
        self,
        fn: Callable[[nn.Module, Any], Tensor],
        size: Callable[[Any], int] | None = None,
        score: Callable[[nn.Module, Any], Tensor] | None = None,
        baseline: float | None = None,
        inputs: Callable[[Any], Any] | None = None,
    ) -> None:
        self.fn = fn
        self.score = score
        self.baseline = baseline
        self._size = size
        self._inputs = inputs

    def inputs(self, batch: Any) -> Any:
        """As `inputs` says, else the batch or its first half."""
        if self._inputs is not None:
            return self._inputs(batch)
        return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch

    def size(self, batch: Any) -> int:
        """As `size` says, else the first dimension of the first tensor in the batch."""
        return self._size(batch) if self._size is not None else first_tensor(batch).shape[0]

    def run(self, model: nn.Module, batch: Any) -> Any:
        """The mean loss, and the model, for scores that are asked for later."""
        with blamed("the objective's fn", "pass one that takes (model, batch) and batches for it"):
            return self.fn(model, batch), model

    def mean(self, answer: Any, batch: Any, rows: Tensor | None = None) -> Tensor:
        """The loss that `fn` gave."""
        return answer[0]

    def splits(self, answer: Any, batch: Any) -> bool:
        """Never: whole batches alternate between the folds."""
        return False

    def scores(self, answer: Any, batch: Any, rows: Tensor | None = None) -> Tensor:
        """As `score` says, else the batch's mean loss."""
        if self.score is None:
            return answer[0].double().reshape(1)
        with torch.no_grad(), blamed("the objective's score", "pass one that takes (model, batch)"):
            return self.score(answer[1], batch).double().flatten()

    def constant_score(self, batches: list[tuple[Any, Any, Tensor | None]], first: float | None = None) -> float:
        """As `baseline` says, else what the model scored when first asked."""
        known = first if self.baseline is None else self.baseline
        if known is not None:
            return known
        return float(torch.cat([self.scores(answer, batch) for answer, batch, _ in batches]).mean())


def as_task(loss: Any) -> Task:
    """The task behind what a user passes as `loss`."""
    if isinstance(loss, Task):
        return loss
    if isinstance(loss, type):
        raise InputError(f"loss is the class {loss.__name__}; pass an instance, {loss.__name__}()")
    if not callable(loss):
        raise InputError(
            f"loss is {reprlib.repr(loss)}; accepted: a function loss(output, target) -> scalar tensor, or "
            "auxin.Objective(fn)"
        )
    return Supervised(loss)


@contextmanager
def blamed(whose: str, advice: str) -> Iterator[None]:
    """What the user's code raises, as an error that names it; memory that ran out is nobody's fault."""
    try:
        yield
    except (AuxinError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InputError(f"{whose} raised {type(error).__name__}: {error}; {advice}. Nothing was changed") from error


def pair(batch: Any) -> tuple[Any, Any]:
    """A batch as (input, target), or the error that says what is accepted."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise InputError(
        f"a batch is a {type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, (tuple, list)) else ''}; "
        "accepted: pairs (input, target). For any other batch pass loss=auxin.Objective(fn)"
    )


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)`; a tuple or list is spread as arguments, a mapping as keywords."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def in_rows(answer: Any, target: Any) -> bool:
    """Whether output and target are tensors of as many rows."""
    both = torch.is_tensor(answer) and torch.is_tensor(target)
    return both and min(answer.dim(), target.dim()) > 0 and len(answer) == len(target)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (tuple, list)) else []


def first_tensor(value: Any) -> Tensor:
    """The first tensor with at least one dimension."""
    for tensor in tensors_in(value):
        if tensor.dim() > 0:
            return tensor
    raise InputError(f"found no tensor in a {type(value).__name__}; pass auxin.Objective(fn, size=...) for that")


def one_hot(answer: Tensor, target: Tensor) -> Tensor:
    """Class targets (n, ...) as (n, classes, ...), in float64."""
    return F.one_hot(target.clamp(min=0).long(), answer.shape[1]).movedim(-1, 1).double()


def half_brier(answer: Tensor, target: Tensor) -> Tensor:
    """Half the Brier score of each sample, (n,): positions with a class (padding has a negative one) are averaged."""
    error = (answer.double().softmax(1) - one_hot(answer, target)).square().sum(1) / 2
    error, seen = error.reshape(len(answer), -1), (target >= 0).reshape(len(answer), -1)
    return (error * seen).sum(1) / seen.sum(1).clamp(min=1)


def best_constant(loss: Loss, answers: Tensor, targets: Tensor) -> Tensor:
    """The one output, repeated, that costs least; found with L-BFGS from the mean answer."""
    constant = answers.mean(0, keepdim=True).clone().requires_grad_()
    optimizer = torch.optim.LBFGS([constant], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(constant.expand(answers.shape), targets)
        value.backward()
        return value

    advice = "no best constant prediction was found; pass auxin.Objective(fn, score=..., baseline=...)"
    try:
        with torch.enable_grad():
            optimizer.step(closure)
    except (ArithmeticError, RuntimeError) as error:  # a line search that ran into NaN or infinity
        raise AuxinError(advice) from error
    if not bool(torch.isfinite(constant).all()):
        raise AuxinError(advice)
    return constant.detach().expand(answers.shape)
