"""Is a width enough? It is when half of it would do.

The best half of a site's neurons is kept, the consumer refitted on them, and held-out samples are scored with and
without the rest. What trained neurons are missed for says much; what untrained ones promise says little.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from auxin.collect import Fold, Measurement
from auxin.layers import rule_for
from auxin.layers.base import has_bias
from auxin.linalg import restrict, select_greedy
from auxin.statistics import Sums
from auxin.structure import Site
from auxin.surgery import scratch


@dataclass(frozen=True)
class Slack:
    """What leaving out the worse half of a site costs: the mean rise of the score and its standard error.

    `score` is the held-out score with the whole site, `constant` that of the best constant prediction.
    """

    site: str
    width: int
    rise: float
    error: float
    score: float
    constant: float

    def too_narrow(self, rho: float = 0.01, errors: float = 2.0) -> bool:
        """Whether half the width costs more than rho of what the model has learned, and more than noise."""
        return self.rise > max(rho * (self.constant - self.score), errors * self.error)


def measure_slack(
    measurement: Measurement,
    sums: Mapping[tuple[str, Fold], Sums],
    sites: Sequence[Site],
    constant: float | None = None,
) -> list[Slack]:
    """The slack of each site, on the held-out fold; `constant`: the constant score of an earlier look."""
    task, found = measurement.task, []
    whole = measurement.answers(measurement.model, "held_out")
    constant = task.constant_score(whole, constant)
    scores = torch.cat([task.scores(*answer) for answer in whole])
    for site in sites:
        grams = {name: sums[name, "estimate"].mean("b1_b1") for name in site.consumers}
        kept = best_neurons(measurement.model, site, grams, site.width // 2)
        halved = restricted_copy(measurement.model, site, grams, kept)
        rises = torch.cat([task.scores(*answer) for answer in measurement.answers(halved, "held_out")]) - scores
        error = float(rises.std() / len(rises) ** 0.5) if len(rises) > 1 else 0.0
        found.append(Slack(site.name, site.width, float(rises.mean()), error, float(scores.mean()), constant))
    return found


def best_neurons(model: nn.Module, site: Site, grams: Mapping[str, Tensor], count: int) -> Tensor:
    """The `count` neurons without which the consumers lose least: greedy on G, averaged over offsets."""
    everyone = torch.arange(site.width)
    joint, weights = torch.zeros(()), []
    for reading in site.readings:
        module, gram = model.get_submodule(reading.consumer), centred_gram(model, reading.consumer, grams)
        columns = rule_for(module).neuron_columns(module, reading, everyone).to(gram.device)
        blocks = torch.stack([gram[column][:, column] for column in columns.T])
        joint = joint + blocks.mean(0)
        rows = rule_for(module).weight_rows(module).to(gram)
        weights.append(rows[:, columns].transpose(1, 2).flatten(0, 1))
    return select_greedy(joint, torch.cat(weights), count).sort().values


def centred_gram(model: nn.Module, consumer: str, grams: Mapping[str, Tensor]) -> Tensor:
    """E[b1 b1^T] less the means, where a bias can take them up."""
    gram = grams[consumer]
    if not has_bias(model.get_submodule(consumer)):
        return gram
    return gram - torch.outer(gram[-1], gram[-1]) / gram[-1, -1]


def restricted_copy(model: nn.Module, site: Site, grams: Mapping[str, Tensor], kept: Tensor) -> nn.Module:
    """A copy whose consumers read the kept neurons alone, refitted to do what they did with all of them."""
    copy = scratch(model)
    for reading in site.readings:
        module = copy.get_submodule(reading.consumer)
        rule, gram = rule_for(module), grams[reading.consumer]
        columns = rule.neuron_columns(module, reading, kept).flatten().to(gram.device)
        if has_bias(module):
            columns = torch.cat([columns, columns.new_tensor([len(gram) - 1])])
        rows = rule.weight_rows(module).to(gram)
        refitted = torch.zeros_like(rows)
        refitted[:, columns] = restrict(gram, rows, columns)
        with torch.no_grad():
            for name, value in rule.update(module, refitted).items():
                module.get_parameter(name).copy_(value)
    return copy


def widths_doubled(sites: Sequence[Site], narrow: set[str], tied: bool, largest: int | None) -> dict[str, int]:
    """How many neurons double the narrow sites, or all of them where one is narrow and they are tied."""
    numbers = {}
    for site in sites:
        room = site.width if largest is None else min(site.width, largest - site.width)
        wanted = max(1, room) if site.width == 0 else room
        if wanted > 0 and narrow and (tied or site.name in narrow):
            numbers[site.name] = -(-wanted // site.group) * site.group
    return numbers
