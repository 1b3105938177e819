# SPDX-License-Identifier: Apache-2.0
"""Train a network whose weights are sparse, 90 % zeros from the first step on, beside dense and masked weights.

``python examples/training/sparse_network.py --out pictures`` trains a dense network a little, prunes it, and goes on
with what is left: as sparse layers, as dense layers whose weights are multiplied by a mask, and with all weights.

``--set 0.3`` begins with sparse weights at random places and moves 30 % of them after each epoch, the smallest ones, to
others: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity inspired by
network science", Nature Communications 2018. The classes of the data are those of a random network of which only a
tenth of the inputs matter.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch.nn.functional import cross_entropy

import sparsetir
import torch
from sparsetir.bench import MissingPackageError
from sparsetir.bench.training import measure
from sparsetir.bench.training.measure import TrainingRun
from sparsetir.torch import SparseLinear, sparsify_
from sparsetir.workloads.plot import aligned, losses
from torch import Tensor, nn

CLASSES, WARM, KNOWN = 10, 2, 0.1  # epochs before pruning, the share of inputs that matter
SURE = 3  # epochs in which the losses of moved weights are compared
OURS, MASKED, FIXED, DENSE = "ours, sparse", "masked dense", "ours, fixed places", "dense"
Data = tuple[Tensor, Tensor]


# ------------------------------------------------------------------ the network and its data


def network(features: int, hidden: int) -> nn.Sequential:
    """Three layers, of which the last one stays dense."""
    torch.manual_seed(0)
    wide = (nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    return nn.Sequential(*wide, nn.Linear(hidden, CLASSES))


def sparse(model: nn.Sequential, density: float) -> nn.Sequential:
    """Return the network with the largest weights of all layers but the last one."""
    made = sparsify_(copy.deepcopy(model), density, skip=["4"])
    assert isinstance(made, nn.Sequential)
    return made


def data(features: int, rows: int) -> Data:
    """Return inputs and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, features, generator=generator)
    seen = x[:, : max(1, round(KNOWN * features))]
    inner = torch.tanh(seen @ torch.randn(seen.shape[1], 16, generator=generator))
    return x, (inner @ torch.randn(16, CLASSES, generator=generator)).argmax(dim=1)


class Masked(nn.Linear):
    """A dense layer some of whose weights are kept at zero, as sparse training is done without sparse kernels."""

    mask: Tensor

    def __init__(self, layer: SparseLinear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        dense = torch.from_numpy(layer.weight.toarray())
        self.register_buffer("mask", places(layer))
        with torch.no_grad():
            self.weight.copy_(dense)
            assert layer.bias is not None
            self.bias.copy_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)

    @torch.no_grad()
    def follow(self, layer: SparseLinear, optimizer: torch.optim.Optimizer) -> None:
        """Take the places of another layer; what is new begins at zero."""
        mask = places(layer)
        stays = mask * self.mask
        self.mask.copy_(mask)
        for held in (self.weight, *optimizer.state[self.weight].values()):
            if held.shape == mask.shape:
                held.mul_(stays)


def places(layer: SparseLinear) -> Tensor:
    """1 where a layer has weights."""
    mask = torch.zeros(layer.out_features, layer.in_features)
    columns, rows = layer.graph.edge_index
    mask[rows, columns] = 1
    return mask


def masked(model: nn.Sequential) -> nn.Sequential:
    """Return the same network with dense layers and masks."""
    return nn.Sequential(*(Masked(m) if isinstance(m, SparseLinear) else copy.deepcopy(m) for m in model))


# ------------------------------------------------------------------ training


class Training:
    """A network that is trained on batches with Adam; `after` is called with it at the end of an epoch."""

    def __init__(
        self, model: nn.Sequential, train: Data, test: Data, batch: int, after: Callable | None = None
    ) -> None:
        self.model, self.train, self.test, self.batch, self.after = model, train, test, batch, after
        self.optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        self.losses: list[float] = []

    def epoch(self) -> None:
        """All batches once; the mean of their losses is noted."""
        total = 0.0
        for x, y in zip(*(part.split(self.batch) for part in self.train), strict=True):
            loss = cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += float(loss.detach()) * len(x)
        self.losses.append(total / len(self.train[0]))
        if self.after is not None:
            self.after(self)

    def accuracy(self) -> float:
        """Return the share of right classes among inputs that were not seen."""
        x, y = self.test
        with torch.no_grad():
            return float((self.model(x).argmax(dim=1) == y).float().mean())


def moving(fraction: float) -> Callable[[Training], None]:
    """SET: the smallest weights of each sparse layer go, as many come elsewhere."""

    def move(training: Training) -> None:
        for layer in training.model:
            if isinstance(layer, SparseLinear):
                layer.drop_and_grow(fraction, optimizer=training.optimizer)

    return move


def following(leader: nn.Sequential) -> Callable[[Training], None]:
    """Masks that are moved as the sparse layers of another network were."""

    def follow(training: Training) -> None:
        for layer, led in zip(training.model, leader, strict=True):
            if isinstance(layer, Masked):
                layer.follow(led, training.optimizer)

    return follow


def trainings(args: argparse.Namespace) -> dict[str, Callable[[], Training]]:
    """Each way to train, from the same weights."""
    x, y = data(args.features, args.rows + args.rows // 4)
    train, test = (x[: args.rows], y[: args.rows]), (x[args.rows :], y[args.rows :])
    make = lambda model, after=None: Training(model, train, test, args.batch, after)  # noqa: E731
    dense = network(args.features, args.hidden)
    if not args.set:
        warm = make(dense)
        for _ in range(WARM):
            warm.epoch()
    first = sparse(dense, args.density)
    if not args.set:
        return {
            OURS: lambda: make(copy.deepcopy(first)),
            MASKED: lambda: make(masked(first)),
            DENSE: lambda: make(copy.deepcopy(dense)),
        }
    for layer in first:
        if isinstance(layer, SparseLinear):
            layer.regrow(SparseLinear(layer.in_features, layer.out_features, density=args.density).weight)
            layer.reset_parameters()
    led = copy.deepcopy(first)
    return {
        OURS: lambda: make(led, moving(args.set)),
        MASKED: lambda: make(masked(first), following(led)),
        FIXED: lambda: make(copy.deepcopy(first)),
        DENSE: lambda: make(copy.deepcopy(dense)),
    }


# ------------------------------------------------------------------ the table


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--density", type=float, default=0.1, help="share of the weights that there are (default: 0.1)")
    add("--set", type=float, default=0.0, metavar="SHARE", help="move that share of the weights after each epoch")
    add("--features", type=int, default=512, help="inputs (default: 512)")
    add("--hidden", type=int, default=2048, help="width of both hidden layers (default: 2048)")
    add("--rows", type=int, default=2048, help="inputs to train on (default: 2048)")
    add("--batch", type=int, default=128)
    add("--epochs", type=int, default=10)
    add("--threads", type=int, default=2, help="of torch and of kernels (default: 2)")
    add("--out", type=Path, help="folder for a picture of the losses")
    add("--no-memory", action="store_true", help="leave out the peaks, for which every way is trained in a process")
    add("--memory", metavar="WAY", help="print the bytes that a way adds to this process")
    return parser.parse_args(argv)


def memory(args: argparse.Namespace) -> int:
    """Bytes that one way adds to this process."""
    small = argparse.Namespace(**{**vars(args), "features": 32, "hidden": 64, "rows": 2 * args.batch})

    def train(make: Callable[[], Training]) -> None:
        training = make()
        for _ in range(2):
            training.epoch()

    chosen = trainings(args)[args.memory]
    return measure.added(lambda: chosen, train, lambda: train(trainings(small)[args.memory]))


def with_memory(runs: dict[str, TrainingRun], args: argparse.Namespace) -> dict[str, TrainingRun]:
    """Return the runs with the peak memory of each."""
    names = ("density", "set", "features", "hidden", "rows", "batch", "threads")
    options = [f"--{name}={getattr(args, name)}" for name in names]
    return {way: replace(run, peak=measure.apart(__file__, "--memory", way, *options)) for way, run in runs.items()}


def main(argv: Sequence[str] | None = None) -> dict[str, TrainingRun]:
    """Print the table."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    sparsetir.set_num_threads(args.threads)
    if args.memory:
        print(memory(args))
        return {}
    sizes = f"{args.features}-{args.hidden}-{args.hidden}-{CLASSES}"
    title = f"{sizes}, {args.density:.0%} of the weights" + (f", {args.set:.0%} of them moved" if args.set else "")
    print(f"{title}; batches of {args.batch} of {args.rows} inputs, {args.epochs} epochs, {args.threads} threads\n")

    begun = {way: make() for way, make in trainings(args).items()}
    for training in begun.values():
        training.epoch()
    runs = measure.side_by_side(begun, args.epochs)
    if not args.no_memory:
        runs = with_memory(runs, args)
    print("\n".join(aligned([["", *measure.HEAD], *measure.cells(runs, OURS)])))

    # Adam divides by small gradients: rounding that differs grows where weights begin at zero again and again.
    same = SURE if args.set else None
    off = measure.difference({way: replace(runs[way], losses=runs[way].losses[:same]) for way in (OURS, MASKED)})
    epochs = f" of the first {SURE} epochs" if args.set else ""
    print(f"\nlargest difference of the losses{epochs} of sparse and masked weights: {off:.1e}")
    if off > measure.CLOSE:
        raise AssertionError(f"the losses differ by {off:.1e}, expected at most {measure.CLOSE:.0e}")
    if args.out is not None:
        draw(runs, title, args.out / ("moved.png" if args.set else "pruned.png"))
    return runs


def draw(runs: dict[str, TrainingRun], title: str, path: Path) -> None:
    """Plot the losses of all."""
    try:
        print(f"wrote {losses({way: run.losses for way, run in runs.items()}, path, title=title)}")
    except MissingPackageError as error:
        print(f"no picture: {error}")


if __name__ == "__main__":
    main()
