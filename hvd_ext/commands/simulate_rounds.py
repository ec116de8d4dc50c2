"""`python -m hvd_ext simulate --sync`: what steps gain that do not wait for all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from hvd_ext.commands.app import figures_table
from hvd_ext.planning import scaling
from hvd_ext.planning.scaling import Row
from hvd_ext.simulation.skew import Gain, Skew, gains


def gains_of(rows: Sequence[Row], modes: Sequence[str], skew: str, staleness: int) -> list[Gain]:
    """Play the rounds of each number of ranks.

    Full steps have the buckets that are best, which hide behind back-propagation. Rounds that do not wait begin after
    it, and have the whole gradient in one bucket.

    Raises:
        InvalidError: a mode, or the skew, is none.
    """
    read, made = Skew.read(skew), []
    for ranks in dict.fromkeys(row.ranks for row in rows):
        mine = [row for row in rows if row.ranks == ranks]
        best = scaling.best(mine)
        single = scaling.best([row for row in mine if row.bucketer == "single"])
        made += gains(ranks, best.alone_s, best.iteration_s - best.alone_s, single.exposed_s, read, modes, staleness)
    return made


def table_of(made: Sequence[Gain], skew: str) -> Table:
    """Make the table; the shortest step of each number of ranks is bold."""
    headings = ("ranks", "sync", "step, ms", "x full", "waited, ms", "on time", "late by 0, 1, ... rounds, %")
    table = figures_table(f"steps that do not wait for all ranks, {skew}", headings, ("sync",))
    for ranks in dict.fromkeys(gain.ranks for gain in made):
        mine = [gain for gain in made if gain.ranks == ranks]
        fastest = min(mine, key=lambda gain: gain.step_s)
        for gain in mine:
            late = " ".join(f"{100 * share:.0f}" for share in gain.staleness)
            cells = [f"{gain.step_s * 1e3:.4g}", f"{gain.speedup:.2f}", f"{gain.waited_s * 1e3:.4g}"]
            words = [str(ranks), gain.mode, *cells, f"{gain.active:.1f}", late]
            table.add_row(*words, style="bold" if gain is fastest else None)
        table.add_section()
    return table


def as_json(gain: Gain) -> dict[str, object]:
    """Write a gain as a row of the command's file."""
    return {
        "ranks": gain.ranks,
        "sync": gain.mode,
        "iteration_seconds": gain.step_s,
        "speedup_over_full": gain.speedup,
        "waited_seconds": gain.waited_s,
        "active_ranks": gain.active,
        "staleness_shares": list(gain.staleness),
        "mean_staleness": gain.mean_staleness,
    }
