"""The price of a training before there is one: seconds and money of each phase on a cluster, and which are sparse.

The devices' rates come from the settings, the communication from the planner's cost model: buckets, schedules and links
are those that a job on this cluster would have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hvd_ext.compression.topk import TopK
from hvd_ext.errors import HvdExtError
from hvd_ext.planning import models
from hvd_ext.planning.models.convolutional import Convolutions
from hvd_ext.planning.models.layer import Layer
from hvd_ext.planning.scaling import Row, on_cluster
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.topology.read import read
from hvd_ext.topology.tree import SHARED_MEMORY, Link, Node, Tree, leaf, replace_hosts

from .schedule import Steps
from .settings import Network, Phase, Settings, SettingsError
from .training import check

# PCIe of the third generation with 16 lanes carries about 12 GB/s (assumed, as in hvd_ext/topology/presets.py).
PCIE = Link(5e-6, 1 / 12e9)


@dataclass(frozen=True, slots=True)
class PhasePrice:
    """The predicted times of a phase; the parts of a step follow one another.

    Args:
        phase: of the settings.
        kind: "topk" or "dense".
        algorithms: of the buckets, each once.
        steps: of the whole phase.
        devices: of the cluster, one for each rank.
        device_rate: pictures for which one device makes gradients in a second.
        computation_s: of a step: forward and backward pass.
        communication_s: what of the communication is not hidden behind the computation.
        update_s: the update of the weights.
        input_s: what of the input is not hidden behind all of these.
    """

    phase: Phase
    kind: str
    algorithms: tuple[str, ...]
    steps: int
    devices: int
    device_rate: float
    computation_s: float
    communication_s: float
    update_s: float
    input_s: float

    @property
    def step_s(self) -> float:
        """The time of a step."""
        return self.computation_s + self.communication_s + self.update_s + self.input_s

    @property
    def seconds(self) -> float:
        """The time of the phase, without validation."""
        return self.steps * self.step_s

    @property
    def rate(self) -> float:
        """Pictures that all devices train in a second."""
        return self.phase.batch / self.step_s

    @property
    def linear(self) -> float:
        """The share of linear scaling: the rate over that of all devices alone, as in CommLib's Table 4."""
        return self.rate / (self.devices * self.device_rate)

    def as_json(self) -> dict[str, Any]:
        """Give the values that JSON can hold."""
        derived = {"step_s": self.step_s, "seconds": self.seconds, "rate": self.rate, "linear": self.linear}
        return {**asdict(self), "phase": self.phase.model_dump(mode="json"), **derived}


def predict(settings: Settings, tree: Tree, pictures: int, *, host_memory: bool = False) -> list[PhasePrice]:
    """Predict the time of each phase on a cluster.

    Args:
        settings: of the training; phases with compression "auto" are those of kinds().
        tree: the cluster; each rank has a device.
        pictures: the number of training pictures.
        host_memory: price the links inside hosts not as those of the tree, between devices, but as the engine uses them
            today: results go from host to device over PCIe, and the ranks of a host add in shared memory.

    Raises:
        SettingsError: there are no rates for a size of pictures, the settings do not fit the cluster, or an algorithm
            cannot run on it.
    """
    check(settings, tree.size)
    in_epoch = Steps(settings, pictures).in_epoch
    found = kinds(settings, tree, host_memory=host_memory)
    return [
        _price(settings, phase, kind, phase.epochs * steps, tree, host_memory)
        for phase, kind, steps in zip(settings.phases, found, in_epoch, strict=True)
    ]


def kinds(settings: Settings, tree: Tree, *, host_memory: bool = False) -> tuple[str, ...]:
    """Decide which phases are sparse: those with compression "auto" where it makes the step enough shorter.

    The last phase is dense unless it says "topk", and so is each one after a dense one, because a training changes from
    sparse to dense once.

    Args:
        settings: of the training; rates are needed only where a phase has "auto".
        tree: the cluster, the same on all ranks.
        host_memory: as for predict().

    Returns:
        "topk" or "dense" for each phase.

    Raises:
        SettingsError: as for predict().
    """
    asked = [phase.compression for phase in settings.phases]
    sparse = len(asked) - asked[::-1].index("topk") if "topk" in asked else 0
    for phase in settings.phases[sparse:-1]:
        if phase.compression == "dense":
            break
        dense_s, topk_s = (_price(settings, phase, kind, 1, tree, host_memory).step_s for kind in ("dense", "topk"))
        if topk_s > (1 - settings.price.smallest_gain) * dense_s:
            break
        sparse += 1
    return ("topk",) * sparse + ("dense",) * (len(asked) - sparse)


def layers(network: Network, pixels: int) -> list[Layer]:
    """List the layers of `network.build` with the sizes of their tensors, in the order of the model's variables.

    Args:
        network: the settings.
        pixels: the side of the pictures.
    """
    net = Convolutions(pixels)
    small = network.stem == "small"
    net.conv("conv1", 32 if small else 64, 3 if small else 7, 2, bias=False)
    net.norm("conv1_bn")
    if not small:
        net.pool()
    for stage, (blocks, width) in enumerate(zip(network.blocks, network.widths, strict=True)):
        for block in range(blocks):
            name, inputs, stride = f"conv{stage + 2}_{block + 1}", net.channels, 2 if stage and not block else 1
            for number, kernel, step in ((1, 1, 1), (2, 3, stride)):
                net.conv(f"{name}_{number}", width, kernel, step, bias=False)
                net.norm(f"{name}_{number}_bn")
            net.conv(f"{name}_3", 4 * width, 1, bias=False)
            shortcut = stride > 1 or inputs != 4 * width
            if shortcut:
                net.conv(f"{name}_0", 4 * width, 1, bias=False, of=inputs)
            net.norm(f"{name}_3_bn")
            if shortcut:
                net.norm(f"{name}_0_bn")
    net.dense("predictions", net.channels, network.classes)
    return net.layers


def rate_of(settings: Settings, pixels: int) -> float:
    """Give the pictures for which one device makes gradients in a second.

    Between two sizes that the settings have, the time of a picture is a line over its area.

    Args:
        settings: of the training.
        pixels: the side of the pictures.

    Raises:
        SettingsError: the settings have no rate at this size, and not one on both sides of it.
    """
    rates = sorted(settings.price.rates.items())
    if not rates or not rates[0][0] <= pixels <= rates[-1][0]:
        known = f"there are {', '.join(str(side) for side, _ in rates)}" if rates else "there are none"
        raise SettingsError(
            f"price.rates: must have {pixels} pixels, or a size on both sides of it; {known}; --calibrate measures them"
        )
    areas, times = [side**2 for side, _ in rates], [1 / rate for _, rate in rates]
    return float(1 / np.interp(pixels**2, areas, times))


def through_host_memory(tree: Tree) -> Tree:
    """Give a cluster the links inside hosts that a job assumes for shared memory, 2 GB/s for each rank."""

    def changed(host: Node) -> Node:
        ranks = tuple(leaf(rank) for rank in host.ranks)
        return Node(host.name, SHARED_MEMORY, ranks, port=host.port, cores=host.cores)

    return replace_hosts(tree, changed)


def _price(settings: Settings, phase: Phase, kind: str, steps: int, tree: Tree, host_memory: bool) -> PhasePrice:
    rate, price = rate_of(settings, phase.pixels), settings.price
    batch = phase.batch / tree.size
    row = _row(settings, phase, kind, through_host_memory(tree) if host_memory else tree, batch / rate)
    communication_s = row.exposed_s
    if host_memory:
        # Gradients leave the device as they are made; results come back together, when all of them are there.
        communication_s += PCIE.alpha_s + sum(one.nbytes for one in row.times.tensors) * PCIE.beta_s_per_byte
    without_s = batch / rate + communication_s + price.update
    input_s = max(0.0, batch / price.input_rate - without_s) if price.input_rate else 0.0
    return PhasePrice(
        phase, kind, row.used, steps, tree.size, rate, batch / rate, communication_s, price.update, input_s
    )


def _row(settings: Settings, phase: Phase, kind: str, tree: Tree, computation_s: float) -> Row:
    times = models.step_times(layers(settings.network, phase.pixels), computation_s)
    times = _last_in_turn(times, settings.price.ranks_per_core)
    try:
        # The tensors of the price have no shapes; `min_elements` leaves vectors out too. It has no warm-up.
        given = {**settings.topk, "vectors": True, "warmup": None}
        topk = TopK(**given) if kind == "topk" else None
        return on_cluster(
            tree, times, "auto", settings.algorithm, codec=topk, sparse_algorithm=settings.sparse_algorithm
        )
    except (HvdExtError, TypeError) as error:
        raise SettingsError(f"{kind}: {error}") from error


def _last_in_turn(times: StepTimes, ranks_per_core: float) -> StepTimes:
    """Give the times of the last of the ranks that share a core: they compute in turns, each at its full speed."""

    def late(at_s: float) -> float:
        return times.computed_s - (times.computed_s - at_s) / ranks_per_core

    return replace(times, ready_s=tuple(map(late, times.ready_s)), forward_s=late(times.forward_s))


def dry_run(
    settings: Settings,
    topology: Path,
    console: Console,
    *,
    price_per_hour: float | None = None,
    host_memory: bool = False,
    json_file: Path | None = None,
) -> None:
    """Print the price of a training on a cluster; on CommLib's also the paper's figures and our prediction of them.

    Args:
        settings: of the training; it has `data.synthetic` pictures.
        topology: the cluster, a YAML file.
        console: where to print.
        price_per_hour: of one host; None for no money.
        host_memory: as for predict().
        json_file: where to write the prices as JSON; None for nowhere.

    Raises:
        SettingsError: as for predict(), or a file cannot be read or written.
    """
    tree = cluster(topology)
    pictures, hosts = settings.data.synthetic, len(tree.hosts())
    prices = predict(settings, tree, pictures, host_memory=host_memory)
    per_second = None if price_per_hour is None else hosts * price_per_hour / 3600
    inside = ", hosts in shared memory at 2 GB/s" if host_memory else ""
    console.print(table(prices, f"{pictures:,} pictures on {tree.describe()}{inside}, by the cost model", per_second))
    if json_file is not None:
        _write(json_file, prices, per_second)


def cluster(topology: Path) -> Tree:
    """Read a topology file; its errors are those of settings."""
    try:
        return read(topology)
    except HvdExtError as error:
        raise SettingsError(str(error)) from error


def table(prices: Sequence[PhasePrice], title: str, per_second: float | None = None) -> Table:
    """Make the table of a training: a row for each phase, with the seconds of its parts.

    Args:
        prices: from predict().
        title: of the table.
        per_second: the money that the cluster costs in a second; None for no money.
    """
    shown = [part for part in ("computation", "communication", "update", "input") if _any(prices, part)]
    seconds = sum(one.seconds for one in prices)
    made = Table(title=title, title_justify="left", show_footer=True)
    made.add_column("phase", "all", no_wrap=True)
    for name, footer in (
        ("steps", f"{sum(one.steps for one in prices):,}"),
        ("step, ms", ""),
        *((f"{part}, s", f"{sum(_part_s(one, part) for one in prices):,.1f}") for part in shown),
        ("all, s", f"{seconds:,.1f}"),
        ("pictures/s", ""),
        ("of linear", ""),
        *((("money", f"{seconds * per_second:,.2f}"),) if per_second is not None else ()),
    ):
        made.add_column(name, footer, justify="right", no_wrap=True)
    for one in prices:
        made.add_row(
            f"{one.phase.epochs} x {one.phase.pixels}, {one.kind}",
            f"{one.steps:,}",
            f"{one.step_s * 1e3:.1f}",
            *(f"{_part_s(one, part):,.1f}" for part in shown),
            f"{one.seconds:,.1f}",
            f"{one.rate:,.0f}",
            f"{one.linear:.0%}",
            *([f"{one.seconds * per_second:,.2f}"] if per_second is not None else []),
        )
    return made


def _part_s(one: PhasePrice, part: str) -> float:
    return float(one.steps * getattr(one, f"{part}_s"))


def _any(prices: Sequence[PhasePrice], part: str) -> bool:
    return part in ("computation", "communication") or any(getattr(one, f"{part}_s") for one in prices)


def _write(path: Path, prices: Sequence[PhasePrice], per_second: float | None) -> None:
    seconds = sum(one.seconds for one in prices)
    money = {} if per_second is None else {"money": seconds * per_second}
    found = {"phases": [one.as_json() for one in prices], "seconds": seconds, **money}
    try:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--json {path}: it cannot be written: {error.strerror or error}") from error
