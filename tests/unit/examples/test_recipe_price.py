"""The price of the recipe: the network's layers, rates between sizes, parts of a step, which phases are sparse."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import dawnbench_resnet50
import numpy as np
import pytest
from resnet50 import calibration, network, price, settings
from rich.console import Console
from typer.testing import CliRunner

import hvd_ext as hvd
from docs import papers
from hvd_ext.topology import presets
from hvd_ext.topology.tree import SHARED_MEMORY, Link
from tests.unit.data.caching import CLASSES, write_pictures

INSIDE, BETWEEN = Link(2e-6, 1 / 10e9), Link(30e-6, 8 / 1e8)
TREE = presets.cluster([2, 2], INSIDE, BETWEEN)
ROOT = Path(__file__).resolve().parents[3]
PAPER = ROOT / "benchmarks" / "paper_cluster.yaml"
PAGE = (ROOT / "docs" / "recipe.md").read_text()


def small(*changes: str) -> settings.Settings:
    """The preset with rates, and one schedule for dense gradients, because pricing all of them takes seconds."""
    return settings.read("small", ["price.rates={32: 400, 64: 100}", "algorithm=two_level", *changes])


def loose(**price_values: object) -> settings.Settings:
    """Settings with one phase of 40 pixels."""
    return small().model_copy(update={"price": settings.Price.model_validate(price_values)})


@pytest.mark.parametrize(
    "shape",
    [
        settings.read("small").network,
        settings.read("smoke").network,
        settings.Network(classes=7, blocks=(2, 1), widths=(16, 3)),
        settings.Network(classes=7, blocks=(1, 3), widths=(5, 3), stem="small"),
    ],
    ids=lambda shape: f"{shape.stem}-{'-'.join(map(str, shape.blocks))}",
)
def test_the_layers_have_the_tensors_of_the_keras_model_in_its_order(shape: settings.Network) -> None:
    listed = [tensor for layer in price.layers(shape, 64) for tensor in layer.tensors]
    variables = network.build(shape).trainable_variables
    assert listed == [(one.path, int(np.prod(one.shape))) for one in variables]


def test_parameters_and_multiply_adds_are_those_of_resnet_50() -> None:
    layers = price.layers(settings.Network(), 224)
    assert (sum(one.elements for one in layers), sum(len(one.tensors) for one in layers)) == (25_557_032, 161)
    # v1.5 has the stride in the 3 x 3 convolution: 4.1 G multiply-adds, 3.9 G in v1 (He et al. 2016, Table 1).
    convolutions = [one for one in layers if not one.name.endswith("_bn")]
    assert sum(one.forward_macs for one in convolutions) == pytest.approx(4.09e9, rel=0.005)


def test_between_two_sizes_the_time_of_a_picture_is_a_line_over_its_area() -> None:
    assert price.rate_of(small(), 32) == pytest.approx(400)
    middle = ((32**2 + 64**2) / 2) ** 0.5
    assert price.rate_of(small(), middle) == pytest.approx(1 / ((1 / 400 + 1 / 100) / 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rates", "pixels", "words"),
    [
        ({}, 32, "there are none; --calibrate measures them"),
        ({40: 9.0}, 32, "must have 32 pixels, or a size on both sides of it; there are 40"),
        ({16: 9.0, 28: 5.0}, 32, "there are 16, 28"),
    ],
)
def test_a_size_outside_of_the_given_ones_is_refused(rates: dict[int, float], pixels: int, words: str) -> None:
    with pytest.raises(settings.SettingsError, match=words):
        price.rate_of(loose(rates=rates), pixels)


def test_the_parts_add_up_and_phases_have_their_steps() -> None:
    split = ("phases.compression=dense", "phases.0.compression=topk", "price.update=0.003", "price.input_rate=25")
    found = price.predict(small(*split), TREE, 3200)
    assert [one.steps for one in found] == [13 * 50, 11 * 50, 3 * 50, 1 * 100]
    assert [one.kind for one in found] == ["topk", "dense", "dense", "dense"]
    for one in found:
        assert one.step_s == pytest.approx(max(one.phase.batch / 4 / 25, one.step_s - one.input_s))
        assert one.computation_s == pytest.approx(one.phase.batch / 4 / one.device_rate)
        assert one.seconds == pytest.approx(one.steps * one.phase.batch / one.rate)
        assert one.linear == pytest.approx(one.computation_s / one.step_s)
    assert found[0].input_s > 0 == found[-1].input_s
    assert {one.communication_s for one in price.predict(small(), presets.cluster([1], INSIDE, BETWEEN), 6400)} == {0.0}
    # A dense gradient of 1.9 million float32 has to pass a host's link of 12.5 MB/s at least once.
    assert found[1].communication_s + found[1].computation_s > 4 * 1.9e6 / 12.5e6 > found[0].communication_s


@pytest.mark.parametrize("compression", ["topk", "dense"])
def test_the_last_rank_on_a_shared_core_hides_less(compression: str) -> None:
    asked = f"phases.compression={compression}"
    turns = [price.predict(small(asked, f"price.ranks_per_core={ranks}"), TREE, 3200) for ranks in (1, 4)]
    for alone, four in zip(*turns, strict=True):
        assert alone.computation_s == four.computation_s
        assert alone.communication_s < four.communication_s
        assert four.step_s - alone.step_s <= 0.75 * alone.computation_s  # three of four computed before the last began


@pytest.mark.parametrize(
    ("compression", "gain", "expected"),
    [
        ("dense dense dense dense", 0.1, "dddd"),
        ("auto auto auto auto", 0.1, "tttd"),  # the last one is dense
        ("auto auto auto auto", 0.97, "dddd"),
        ("auto dense auto auto", 0.1, "tddd"),  # sparse ones come first
        ("auto topk auto dense", 0.9, "ttdd"),  # what comes before a sparse one is sparse
        ("topk topk topk topk", 0.9, "tttt"),
    ],
)
def test_auto_is_sparse_where_the_step_is_enough_shorter(compression: str, gain: float, expected: str) -> None:
    asked = [f"phases.{number}.compression={kind}" for number, kind in enumerate(compression.split())]
    found = price.kinds(small(*asked, f"price.smallest_gain={gain}"), TREE)
    assert "".join(kind[0] for kind in found) == expected
    given = settings.read("small", ["price={}", "phases.compression=dense", "phases.0.compression=topk"])
    assert price.kinds(given, TREE) == ("topk", "dense", "dense", "dense")  # nothing is chosen, so no rates are needed


def test_the_gain_decides_at_its_exact_value() -> None:
    asked = small("phases.compression=auto")
    (dense_s, *_), (topk_s, *_) = (
        [one.step_s for one in price.predict(small(f"phases.compression={kind}"), TREE, 6400)]
        for kind in ("dense", "topk")
    )
    gain = 1 - topk_s / dense_s
    for limit, kind in ((gain - 1e-6, "topk"), (gain + 1e-6, "dense")):
        changed = asked.model_copy(update={"price": asked.price.model_copy(update={"smallest_gain": limit})})
        assert price.kinds(changed, TREE)[0] == kind


def test_through_host_memory_only_the_links_inside_hosts_change() -> None:
    racks = presets.cluster([2] * 4, INSIDE, BETWEEN, racks=2)
    found = price.through_host_memory(racks)
    assert {host.link for rack in found.root.children for host in rack.children} == {SHARED_MEMORY}
    assert (found.root.link, [rack.link for rack in found.root.children]) == (racks.root.link, [BETWEEN] * 2)
    dense = small("phases.compression=dense", "price.rates={32: 400e6, 64: 100e6}")  # nothing hides communication
    prices = {through: price.predict(dense, TREE, 6400, host_memory=through)[0] for through in (False, True)}
    nbytes = 4 * sum(layer.elements for layer in price.layers(dense.network, 32))
    copied_s = price.PCIE.alpha_s + nbytes * price.PCIE.beta_s_per_byte
    assert prices[True].communication_s > prices[False].communication_s + copied_s


def test_a_dry_run_of_the_original_prints_phases_and_money_as_the_page_has_them(tmp_path: Path) -> None:
    console, path = Console(width=200, record=True, file=io.StringIO()), tmp_path / "price.json"
    original = settings.read("dawnbench")
    price.dry_run(original, PAPER, console, price_per_hour=36.0, json_file=path)
    shown, found = console.export_text(), json.loads(path.read_text())
    assert found["money"] == pytest.approx(found["seconds"] * 16 * 36 / 3600)
    assert f"{found['money']:.2f}" in shown and f"{found['seconds']:.1f}" in shown
    figures = [figure.cells() for figure in papers.table_4()]
    # the table of the page
    through = price.predict(original, price.cluster(PAPER), 1_281_167, host_memory=True)
    for number, ours in enumerate(found["phases"]):
        cells = [*(cell.removesuffix(" samples/s") for cell in figures[number][2:4]), f"{ours['rate']:,.0f}"]
        assert f"| {' | '.join([*cells, f'{through[number].rate:,.0f}'])} |" in PAGE
    seconds = (found["seconds"], sum(one.seconds for one in through))
    assert f"| {figures[-1][3]} | {seconds[0]:.1f} s | {seconds[1]:.1f} s |" in PAGE


def test_what_was_measured_becomes_settings(tmp_path: Path) -> None:
    measured = [calibration.Measured(32, 24, 0.05, 0.0625, 0.01), calibration.Measured(40, 12, 0.05, 0.07, 0.01)]
    path = tmp_path / "measured.yaml"
    text = (settings.PRESETS / "small.yaml").read_text()
    path.write_text(text + calibration.text(measured, 2.0) + "\n")
    found = settings.read(str(path)).price
    assert found.ranks_per_core == 2 and "ranks_per_core" not in calibration.text(measured, 1.0)
    assert found.rates == {32: pytest.approx(24 / 0.0525, rel=1e-3), 40: 200.0} and found.update == 0.01
    assert "0.80 of its speed" in path.read_text()


@pytest.mark.parametrize("on", ["noise", "pictures"])
def test_a_device_is_measured_once_for_each_size(on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARM", "TURNS", "MOST_STEPS"):
        monkeypatch.setattr(calibration, name, 1)
    update = calibration._update

    def quick(*arguments: Any) -> calibration.Run:  # on a busy machine one real update may take longer than one step
        assert update(*arguments)(1) > 0
        return lambda steps: 1e-6 * steps

    monkeypatch.setattr(calibration, "_update", quick)
    hvd.init()
    tiny = {"blocks": (1,), "widths": (2,), "stem": "small"}
    phases = [{"epochs": 1, "pixels": 16, "batch": batch} for batch in (8, 16)]
    values: dict[str, Any] = {"network": tiny, "phases": phases, "optimizer": {"rate": [[0, 0.1]]}}
    values["mixed_precision"] = False
    if on == "pictures":
        for split in ("train", "val"):
            write_pictures(tmp_path / split, 24)
        values["data"] = {"source": str(tmp_path), "memory": "1MB"}
        values["network"] |= {"classes": len(CLASSES)}
    lines: list[str] = []
    (one,) = calibration.calibrate(settings.checked(values, "tiny"), 2, lines.append)
    assert (one.pixels, one.batch, one.update_s) == (16, 4, pytest.approx(1e-6)) and len(lines) == 2
    assert one.plain_s > 1e-5 and one.ours_s > 1e-5
    assert one.rate == pytest.approx(4 / (one.ours_s - 1e-6))
    if on == "pictures":  # they were decoded once, and a second measurement may open their cache again
        calibration.calibrate(settings.checked(values, "tiny"), 2, lines.append)
    with pytest.raises(settings.SettingsError, match="3 ranks cannot divide it evenly"):
        calibration.calibrate(settings.checked(values, "tiny"), 3, lines.append)


def test_the_command_prints_the_price_and_needs_a_cluster(tmp_path: Path) -> None:
    path, kept = tmp_path / "cluster.yaml", tmp_path / "price.json"
    hosts = "".join(
        f"  - {{name: host{n}, link: {{alpha_s: 1.0e-6, gbit_per_s: 100}}, ranks: [{n}, {n + 1}]}}\n" for n in (0, 2)
    )
    path.write_text("name: two\nlink: {alpha_s: 1.0e-4, gbit_per_s: 1}\nchildren:\n" + hosts, encoding="utf-8")
    words = ["smoke", "--dry-run", "--set", "price.rates={16: 900, 32: 300}", "--price-per-hour", "2"]
    run = CliRunner().invoke
    done = run(dawnbench_resnet50.app, [*words, "--topology", str(path), "--json", str(kept)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "2 x 16, topk" in done.output and "money" in done.output
    assert "CommLib" not in done.output  # the paper's figures are of another cluster
    assert len(json.loads(kept.read_text())["phases"]) == 4
    for wrong, said in (
        (words, "--topology FILE"),
        ([*words, "--topology", str(tmp_path / "none.yaml")], "none.yaml"),
        ([*words, "--topology", str(path), "--set", "price.rates={}"], "--calibrate measures them"),
    ):
        refused = run(dawnbench_resnet50.app, wrong)
        assert refused.exit_code == 2
        assert said in refused.output


def test_make_recipe_has_words_that_the_command_takes() -> None:
    (words,) = re.findall(r"dawnbench_resnet50\.py (small .*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    given = shlex.split(words)
    changes = [value for word, value in itertools.pairwise(given) if word == "--set"]
    chosen = settings.read(given[0], changes)
    assert price.kinds(chosen, presets.cluster([4], INSIDE, BETWEEN))[-1] == "dense"
