"""`python -m hvd_ext probe`: measures the links of a job, and writes the topology file that describes them."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.table import Table

from hvd_ext import options
from hvd_ext.commands import figures
from hvd_ext.commands.app import App, figures_table, say, table_console, writing
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.job import consensus, log, network, process, runtime
from hvd_ext.topology import write
from hvd_ext.topology.fit import Curve, line, typical

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hvd_ext.job.runtime import Runtime

# Whole allreduces: from the smallest size on, four times as large each, as long as a call takes less than this.
SMALLEST_NBYTES, LARGEST_NBYTES, LONGEST_S = 16 << 10, 64 << 20, 0.4
SAMPLES = 5

app = App()


@dataclasses.dataclass(frozen=True)
class Allreduce:
    """An allreduce of one size."""

    nbytes: int
    algorithm: str
    price_s: float
    seconds: float


@app.command()
def probe(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="write the topology file here; printed by default"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="plot times over the size, as a PNG file")
    ] = None,
) -> None:
    """Measure the links between the ranks of a job: mpirun -np 4 python -m hvd_ext probe.

    It measures latency and rate between hosts and inside them, the port of each host, the uplinks of racks, and what
    processors need for messages, additions and selections. Then it times whole allreduces and sets the planner's prices
    beside them. The topology file is for HVD_EXT_TOPOLOGY and for the command plan; jobs on the same hosts use what was
    measured without it.
    """
    try:
        if plot is not None:
            figures.check()
        settings = dataclasses.replace(
            options.from_environment(), topology=None, probe="refresh", algorithm="auto", quiet=True
        )
        process.init(settings)
        job = runtime.current()
        if job.engine.size == 1:
            raise InvalidError(
                "probe: a job of one rank has no links; start it as mpirun -np 4 python -m hvd_ext probe"
            )
        assert job.network is not None
        if job.network.source != network.MEASURED:
            raise HvdExtError("probe: the links could not be measured; the warning says why")
        times = _allreduces(job)
        if job.engine.rank == 0:
            _report(job, times, output, plot)
        process.shutdown()
    except HvdExtError as error:
        log.write(log.line(str(error)))
        raise typer.Exit(1) from error


def _report(job: Runtime, times: Sequence[Allreduce], output: Path | None, plot: Path | None) -> None:
    assert job.network is not None
    console = table_console()
    console.print(table_of(job))
    console.print(allreduce_table(times))
    remark = f"measured by python -m hvd_ext probe on {job.tree.describe()}, {time.strftime('%Y-%m-%d')}"
    text = write.text(job.tree, remark)
    if output is None:
        print(text, end="")
    else:
        with writing(str(output)):
            output.write_text(text, encoding="utf-8")
        say(console, [f"{output}: the topology file"])
    if plot is not None:
        draw(plot, times, job.network.curves, job.tree.describe())
        say(console, [f"{plot}: times over the size"])


def _allreduces(job: Runtime) -> list[Allreduce]:
    """Time whole allreduces on NumPy arrays; all ranks get the same answer."""
    from hvd_ext.job.probe.stand import steps_of
    from hvd_ext.options import Sum
    from hvd_ext.planning import planner
    from hvd_ext.planning.layout import layout
    from hvd_ext.planning.tensors import Tensor

    measured: list[Allreduce] = []
    nbytes = SMALLEST_NBYTES
    while nbytes <= LARGEST_NBYTES and (not measured or 4 * measured[-1].seconds <= LONGEST_S):
        laid_out = layout(job.tree, [Tensor("buffer", (nbytes // 4,), "float32")], Sum)
        (bucket,) = laid_out.buckets
        channel = job.open("probe", laid_out)
        buffer, result = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
        step = job.engine.prepare(channel, [buffer], [result])
        samples, steps = [], steps_of(nbytes)
        for _ in range(1 + SAMPLES):
            job.engine.exchange("probe", b"")
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            samples.append((time.perf_counter() - begin) / steps)
        job.engine.close_channel(channel)
        seen = consensus.exchange(job.engine, "probe", functools.partial(list, samples[1:]))
        seconds = typical([max(values) for values in zip(*seen, strict=True)])
        name = bucket.plan.algorithm
        measured.append(Allreduce(nbytes, name, planner.price(job.tree, name, nbytes).seconds, seconds))
        nbytes *= 4
    return measured


def table_of(job: Runtime) -> Table:
    """Make the table of what was measured."""
    assert job.network is not None
    tree, one_host = job.tree, len(job.tree.hosts()) == 1
    title = f"{tree.describe()}, measured in {job.network.seconds:.2g} s"
    table = figures_table(title, ("what", "rate", "time"), ("what",))

    def add(name: str, beta_s_per_byte: float, seconds: float | None, of: str = "") -> None:
        rate = network.rate(dataclasses.replace(tree.root.link, beta_s_per_byte=beta_s_per_byte))
        table.add_row(name, rate if beta_s_per_byte else "-", "-" if seconds is None else f"{seconds * 1e6:.3g} us{of}")

    for node in (node for nodes in reversed(tree.levels()) for node in nodes if len(node.children) > 1):
        among = f" of {node.name}" if node is not tree.root else ""
        name = f"in {node.name}" if node.height == 1 else f"between {'racks' if node.height > 2 else 'hosts'}{among}"
        name += f" ({node.medium})" if node.medium else ""
        add(name, node.link.beta_s_per_byte, node.link.alpha_s, " latency")
        for child in node.children:
            if child.port is not None:
                add(f"the port of {child.name}", child.port.beta_s_per_byte, child.port.alpha_s, " latency")
    add("a rank hands a buffer over and gets it back", tree.handover.beta_s_per_byte, tree.handover.alpha_s)
    add("a message of a rank" + ("" if one_host else " to or from another host"), 0.0, tree.message_s)
    add("an addition takes longer than a copy by", tree.gamma_s_per_byte, None)
    add("a selection", tree.selection_s_per_byte or 0.0, None)
    return table


def allreduce_table(times: Sequence[Allreduce]) -> Table:
    """Make the table of whole allreduces."""
    fitted = line([(call.nbytes, call.seconds) for call in times])
    title = f"allreduce: {fitted.alpha_s * 1e3:.3g} ms + {fitted.beta_s_per_byte * 1e9:.4g} ns a byte"
    headings = ("bytes", "algorithm", "price, ms", "measured, ms", "price / measured")
    table = figures_table(title, headings, ("algorithm",))
    for call in times:
        row = [f"{call.nbytes:,}", call.algorithm, f"{call.price_s * 1e3:.4g}", f"{call.seconds * 1e3:.4g}"]
        table.add_row(*row, f"{call.price_s / call.seconds:.2f}")
    return table


def draw(path: Path, times: Sequence[Allreduce], curves: Sequence[Curve], cluster: str) -> None:
    """Plot times over the size with their lines, as Fig. 5 (b) of MG-WFBP (arXiv 1912.09268) does.

    Raises:
        InvalidError: matplotlib is missing, or the file cannot be written.
    """
    points = tuple((float(call.nbytes), call.seconds) for call in times)
    shown = [Curve("allreduce", points, line(points)), *curves]
    figure, axes = figures.panels(len(shown), 3, 4.6, 3.6, 1.6)
    figure.suptitle(cluster, fontsize=10)
    for axis, curve in zip(axes, shown, strict=True):
        _draw_panel(axis, curve, times if curve.name == "allreduce" else ())
    with writing(str(path)):
        figures.finish(figure, [], path)


def _draw_panel(axes: Axes, curve: Curve, priced: Sequence[Allreduce]) -> None:
    sizes, seconds = (np.array(values) for values in zip(*curve.points, strict=True))
    ways = np.geomspace(sizes.min(), sizes.max(), 100)
    axes.loglog(sizes, seconds * 1e3, "o", color="#0072B2", label="measured")
    along_s = curve.link.alpha_s + ways * curve.link.beta_s_per_byte
    axes.loglog(ways, along_s * 1e3, color="#D55E00", label="the line of the title")
    if priced:
        prices = [call.price_s * 1e3 for call in priced]
        axes.loglog([call.nbytes for call in priced], prices, "x", color="#009E73", label="the planner's price")
    fitted = f"{curve.link.alpha_s * 1e6:.3g} us + {curve.link.beta_s_per_byte * 1e9:.4g} ns a byte"
    axes.set_title(f"{curve.name}: {fitted}", fontsize=9)
    axes.set_xlabel("bytes")
    axes.set_ylabel("ms")
    axes.grid(True, alpha=0.3)
