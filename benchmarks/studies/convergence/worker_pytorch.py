"""One rank that trains the study's cnn with PyTorch, by DistributedDataParallel over gloo, with one of its hooks.

`LAUNCHER PYTHON -m benchmarks.studies.convergence.worker_pytorch TASK`, where PYTHON has the packages torch, numpy,
psutil, pydantic and pyyaml, and need not have those of hvd_ext.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.studies.convergence import data as data_sets
from benchmarks.studies.convergence.worker import (
    LAST_SHARE,
    RISE,
    TEST_BATCH,
    UNTIMED,
    Task,
    order,
    serve,
    step_seconds,
)

# PowerSGD and local steps begin after so many whole steps; PyTorch wants at least two of the first.
START = 10


class Cnn(nn.Module):
    """The cnn of `models.build`: the same shapes, the same distributions of first weights, logits [labels, classes]."""

    def __init__(self, labels: int, classes: int, width: int) -> None:
        super().__init__()
        self._shape = labels, classes
        self.first = _convolved(3, width, 5, 2)
        self.stages = nn.ModuleList()
        before = width
        for filters in (2 * width, 4 * width):
            self.stages.append(
                nn.ModuleList([_convolved(before, filters), _convolved(filters, filters), _convolved(filters, filters)])
            )
            before = filters
        self.last = nn.Linear(before, labels * classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Give the logits of images, uint8 [batch, side, side, 3]."""
        x = inputs.permute(0, 3, 1, 2).float() / 64 - 2
        x = self.first(nn.functional.pad(x, (1, 2, 1, 2))).relu()  # as "same" pads, with a stride of 2
        for one, two, three in self.stages:
            x = nn.functional.max_pool2d(one(x).relu(), 2)
            x = (x + three(two(x).relu())).relu()
        return self.last(x.mean((2, 3))).reshape(-1, *self._shape)


def _convolved(before: int, filters: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    padding = 1 if stride == 1 else 0
    convolution = nn.Conv2d(before, filters, kernel, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(filters, eps=1e-3, momentum=0.1))


class Trained:
    """A model of a run with its optimizer."""

    def __init__(self, facts: dict[str, Any], data: data_sets.Data, steps: int) -> None:
        """Make the model with the first weights of the run's seed, for a training of so many steps."""
        recipe = facts["recipe"]
        torch.manual_seed(facts["seed"] or 0)
        classes = int(max(data.train.labels.max(), data.test.labels.max())) + 1
        plain = Cnn(data.train.labels.shape[1], classes, recipe["width"] or 24)
        self.model = DistributedDataParallel(plain, broadcast_buffers=False)
        self.optimizer: Any = torch.optim.SGD(plain.parameters(), 0.0, recipe["momentum"], nesterov=recipe["nesterov"])
        self._rate, self._steps, self._taken = recipe["learning_rate"], steps, 0
        hook, _, value = facts["how"]["peer"].partition(":")[2].partition("=")
        if hook == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, int(value), start_powerSGD_iter=START)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif hook == "local":
            own = _ranks_of_host(facts["hosts"])
            local = post_localSGD_hook.PostLocalSGDState(None, own, START)
            self.model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
            averager = PeriodicModelAverager(period=int(value), warmup_steps=START)
            self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)

    def step(self, inputs: np.ndarray, labels: np.ndarray) -> float:
        """Take a step with a batch; returns its loss."""
        rise = max(1, round(RISE * self._steps))
        if self._taken < rise:
            rate = self._rate * self._taken / rise
        else:
            done = min(1.0, (self._taken - rise) / max(1, self._steps - rise))
            rate = self._rate * ((1 - LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2 + LAST_SHARE)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._taken += 1
        self.optimizer.zero_grad()
        logits = self.model(torch.from_numpy(inputs))
        wanted = torch.from_numpy(labels.astype(np.int64)).reshape(-1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def average(self, tensors: Any) -> None:
        """Give all ranks the mean of tensors."""
        for tensor in tensors:
            if tensor.is_floating_point():
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()

    def right(self, split: data_sets.Split) -> tuple[int, int]:
        """Test the model, each rank with its part of the examples: how many labels were right, and of how many."""
        rank, size = dist.get_rank(), dist.get_world_size()
        inputs, labels = split.inputs[rank::size], split.labels[rank::size]
        self.model.eval()
        count = 0
        with torch.no_grad():
            for begin in range(0, len(labels), TEST_BATCH):
                logits = self.model.module(torch.from_numpy(inputs[begin : begin + TEST_BATCH]))
                count += int((logits.argmax(-1).numpy() == labels[begin : begin + TEST_BATCH]).sum())
        self.model.train()
        found = torch.tensor([count, labels.size])
        dist.all_reduce(found)
        return int(found[0]), int(found[1])

    def about(self) -> dict[str, Any]:
        """Give the number of parameters, and whether all ranks have the same."""
        weights = np.concatenate([one.detach().numpy().ravel() for one in self.model.module.parameters()])
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, hashlib.sha256(weights.tobytes()).hexdigest())
        return {"parameters": int(weights.size), "equal": len(set(digests)) == 1}


def _ranks_of_host(hosts: list[int]) -> Any:
    first, own = 0, None
    for count in hosts:
        ranks = list(range(first, first + count))
        group = dist.new_group(ranks)  # all ranks make all groups
        own = group if dist.get_rank() in ranks else own
        first += count
    return own


def learn(facts: dict[str, Any], data: data_sets.Data, tell: Callable[..., None]) -> dict[str, Any]:
    """Train a model and test it; see `worker.learn`."""
    recipe, rank, size = facts["recipe"], dist.get_rank(), dist.get_world_size()
    train, test = data.train.first(recipe["train"]), data.test
    steps = len(train.labels) // (size * recipe["batch"])
    count = max(1, round(recipe["epochs"] * facts["how"]["epochs"]))
    trained = Trained(facts, data, steps * count)
    begin, epochs, found, total = time.perf_counter(), [], 0, 1
    for epoch in range(count):
        mine = order(facts["seed"], epoch, len(train.labels), rank, size, recipe["batch"]).reshape(steps, -1)
        loss = statistics.fmean(trained.step(train.inputs[places], train.labels[places]) for places in mine)
        trained.average(trained.model.module.buffers())
        if epoch == count - 1:
            trained.average(one.data for one in trained.model.module.parameters())
            found, total = trained.right(test)
        curve_found, curve_total = trained.right(test.first(recipe["curve"]))
        accuracy = curve_found / curve_total
        epochs.append({"steps": (epoch + 1) * steps, "loss": loss, "accuracy": accuracy})
        tell(epoch=epoch + 1, epochs=count, accuracy=found / total if epoch == count - 1 else accuracy)
    seconds = time.perf_counter() - begin
    return {"accuracy": found / total, "tested": total, "curve": epochs, "seconds": seconds, **trained.about()}


def timed(facts: dict[str, Any], data: data_sets.Data) -> dict[str, Any]:
    """Measure the time of a step; see `worker.timed`."""
    batch, every = facts["recipe"]["batch"], int(facts["how"]["peer"].partition("local=")[2] or 1)
    trained = Trained(facts, data, 1000)
    mine = order(0, 0, len(data.train.labels), dist.get_rank(), dist.get_world_size(), batch)[:batch]

    def gathered(value: Any) -> list[Any]:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, value)
        return of_ranks

    taken = step_seconds(
        lambda: trained.step(data.train.inputs[mine], data.train.labels[mine]),
        gathered,
        facts["steps"],
        every,
        UNTIMED + START,
    )
    median = statistics.median(taken)
    return {"step_seconds": taken, "step_seconds_median": median, "warm_step_seconds": [], **trained.about()}


def main(path: str) -> None:
    """Do all runs of the task in a file; a failure ends the whole job, because the launcher sees it."""
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    torch.set_num_threads(1)  # the ranks of a host share its cores
    task = Task.read(Path(path))
    meeting = f"file://{task.events}/pytorch"
    dist.init_process_group("gloo", meeting, datetime.timedelta(minutes=10), size, rank)
    serve(task, rank, learn, timed, {"torch": importlib.metadata.version("torch")})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
