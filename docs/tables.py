"""The parts of pages, and of the engine's interface, that come from the code; `python -m docs.tables` writes them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

DEMO = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "demo.json"
# a refused pair -> what the page says, where the error has only a few words to look for
_ONE_KEYWORD = "both are values of one keyword; `TopK(wire=...)` says how the values of a sparse bucket travel"
LONGER = {
    frozenset({"compression", "top-k"}): _ONE_KEYWORD,
    frozenset({"compression", "top-k until"}): _ONE_KEYWORD,
    frozenset({"backward_passes_per_step", "tape"}): (
        "must be 1, because a tape does not accumulate gradients; add the gradients of several plain tapes, or wrap "
        "the optimizer instead of the tape"
    ),
    frozenset({"accumulation", "Keras 2"}): (
        "tf_keras has no gradient_accumulation_steps; use backward_passes_per_step"
    ),
    frozenset({"LARS, LAMB", "Keras 2"}): "they are optimizers of Keras 3, which tf_keras does not take",
    frozenset({"clipping", "global_clipnorm"}): "Keras takes only one of clipnorm, clipvalue and global_clipnorm",
}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Gives a Markdown table; bars inside cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def settings() -> str:
    """Gives the table of environment variables, from `hvd_ext.options.SETTINGS`."""
    from hvd_ext import options

    rows = [[f"`{s.name}`", s.type.__name__, f"`{s.default}`", s.meaning] for s in options.SETTINGS]
    return markdown(["Variable", "Type", "Default", "Meaning"], rows)


def bucketers() -> str:
    """Gives the table of the ways to divide gradients into buckets, from their cards, the simplest first."""
    from hvd_ext.planning import buckets

    cards = [buckets.get(name).card for name in buckets.SIMPLEST_FIRST]
    return markdown(["Name", "Idea", "Source"], [[f"`{card.name}`", card.idea, card.source] for card in cards])


def algorithms() -> str:
    """Gives the table of algorithms, from the cards in the registry: those of whole buffers first."""
    from hvd_ext.planning import registry

    cards = [registry.card(name) for name in (*registry.names(), *registry.sparse_names())]
    names = {card.name: f"`{card.name}`" + (" (with `TopK`)" if card.sparse else "") for card in cards}
    rows = [[names[card.name], card.idea, card.rounds, card.bytes, card.limits, card.source] for card in cards]
    return markdown(["Name", "Idea", "Rounds", "Bytes a rank sends", "Limits", "Source"], rows)


def migration() -> str:
    """Gives the table of Horovod's names and ours, from `docs.horovod`."""
    from docs import horovod as names

    return names.table()


def pairs() -> str:
    """Gives the table of features, what each does not go with, and below it the words for each refused pair."""
    from hvd_ext.options import compatibility

    rows, notes = [], []
    for feature, how in compatibility.FEATURES.items():
        against = [other for other in compatibility.FEATURES if compatibility.words(feature, other)]
        beside_xla = [other for other in against if "XLA" not in (feature, other)]
        rows.append([feature, how, "all" if feature == "XLA" else ", ".join([*beside_xla, "XLA"])])
    for pair in compatibility.pairs():
        if pair.words and "XLA" not in (pair.first, pair.second):
            words = LONGER.get(frozenset({pair.first, pair.second}), pair.words)
            notes.append(f"- {pair.first} and {pair.second}: {words}.")
    notes += [f"- XLA and anything: {compatibility.XLA}.", "", *compatibility.REMARKS]
    return "\n".join([markdown(["Feature", "Asked for by", "Refused with"], rows), "", *notes])


def api() -> str:
    """Gives every public name with its docstring, from `hvd_ext` and what it imports."""
    from docs import api as names

    return names.page()


def topology() -> str:
    """Gives the table of a topology file's keys, from `hvd_ext.topology.read`."""
    from hvd_ext.topology import read

    rows = [[f"`{name}`", place, takes, meaning] for name, place, takes, meaning in read.table()]
    return markdown(["Key", "Of", "Takes", "Meaning"], rows)


def papers() -> str:
    """Gives the table of our predictions beside the papers' figures, from `docs.papers`."""
    from docs import papers as figures

    return markdown(figures.HEAD, figures.table())


def speedups() -> str:
    """Gives the speed-ups of GoogleNet on MG-WFBP's simulated cluster (Fig. 9), from `docs.papers`."""
    from docs import papers as figures

    head = ["Bucketer", *(f"{nodes} nodes" for nodes in figures.NODES)]
    return markdown(head, [[f"`{name}`", *cells] for name, cells in figures.figure_9().items()])


def demo() -> str:
    """Gives the table of the demo's trainings, and what it was measured on, from `benchmarks/results/demo.json`."""
    result = json.loads(DEMO.read_text(encoding="utf-8"))
    machine, versions = result["run"]["machine"], result["run"]["versions"]
    first = result["rows"][0]
    rows = []
    for row in result["rows"]:
        step, seconds = row["step_ms"], row["seconds_to_target"]
        times = first["step_ms"]["median"] / step["median"]
        rows.append(
            [
                row["name"],
                f"{step['median']:.0f} ms ({step['low']:.0f} to {step['high']:.0f})",
                f"{times:.1f}",
                "never" if seconds is None else f"{seconds:.1f} s",
                f"{row['accuracy']:.1%}",
            ]
        )
    head = ["Training with", "A step, median (middle half)", f"Steps per second, {first['name']} = 1"]
    head += [f"{result['target']:.0%} accuracy after", "Accuracy at the end"]
    load = f"{machine['cores']} cores, load before {machine['load_before']}"
    packages = ("horovod", "tensorflow-cpu", "tensorflow", "keras")
    named = [f"{name} {versions[name]}" for name in packages if name in versions]
    measured = (
        f"A convolutional network of {result['parameters'] / 1e6:.1f} million parameters on {result['place']}, all "
        f"rehearsed on one machine ({machine['processor']}, {load}). {', '.join(named)}. {result['run']['date']}. "
        "The first step, in which TensorFlow traces, is not counted."
    )
    return f"{markdown(head, rows)}\n\n{measured}"


def engine_options() -> str:
    """Gives the fields of the options that the engine gets, from `hvd_ext.options.reduction`."""
    from hvd_ext.options import reduction

    return "\n".join(f"HVD_EXT_FIELD({kind}, {name})" for name, kind in reduction.ENGINE_TYPES.items())


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"demo": demo},
    "docs/algorithms.md": {"algorithms": algorithms},
    "docs/api.md": {"api": api},
    "docs/buckets.md": {"bucketers": bucketers},
    "docs/settings.md": {"settings": settings},
    "docs/migration.md": {"migration": migration, "pairs": pairs},
    "docs/topology.md": {"topology": topology},
    "docs/simulator.md": {"papers": papers, "speedups": speedups},
    "tf_ops/engine/spec.def": {"options": engine_options},
}


def rewritten(text: str, page: str) -> str:
    """Puts today's tables between the marks `<!-- name -->` and `<!-- /name -->` of a page, which may be comments in C.

    Args:
        text: the page.
        page: its path in the repository, a key of `PAGES`.

    Returns:
        The page with fresh tables.

    Raises:
        ValueError: the page lacks the marks of a table, or has them twice.
    """
    for name, table in PAGES[page].items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?((?:// )?<!-- /{name} -->)", re.DOTALL)
        parts = pattern.findall(text)
        if len(parts) != 1:
            raise ValueError(
                f"{page}: the marks <!-- {name} --> and <!-- /{name} --> must be there once, seen {len(parts)}"
            )
        begin, end = parts[0]
        body = f"{begin}{table()}\n{end}"
        text = pattern.sub(lambda _, body=body: body, text)
    return text


def main() -> None:
    """Rewrites the tables of the pages in the current folder."""
    for name in PAGES:
        page = Path(name)
        if not page.is_file():
            sys.exit(f"{page.absolute()}: no such file; run this in the root of the source tree")
        page.write_text(rewritten(page.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main()
