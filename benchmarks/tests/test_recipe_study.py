"""The study of the small recipe: which trainings there are, and what they say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.studies.__main__ import app
from benchmarks.studies.recipe import jobs, results as told
from benchmarks.studies.recipe.ways import SEEDS, WAYS, Run, known, runs
from hvd_ext.cluster.rehearsal import ClusterError
from hvd_ext.errors import InvalidError

RUNNER = CliRunner()
TRACED_S, LATER_S = 9.0, 0.5  # what the first epoch of a phase, and a later one, take beside their steps
SENT_S = 2.0  # what the last step with sparse gradients takes more, because it sends all that was held back


def kept(folder: Path, run: Run, step_s: float, last: float, pictures: int) -> None:
    """Keep a training with these times of a step and this top-5 share at its end, as the example does."""
    settings = run.settings(folder / ("few" if run.kind == "time" else "all"))
    known.keep(settings, folder / run.name)
    rows: list[dict[str, Any]] = []
    for epoch in range(settings.epochs):
        number = settings.phase_of(epoch)
        phase = settings.phases[number]
        steps = pictures // phase.batch
        beside, sent = beside_s(settings, epoch)
        taken = steps * step_s + sent
        row = {"epoch": epoch, "phase": number, "pixels": phase.pixels, "batch": phase.batch}
        row |= {"compression": "topk" if phase.compression == "topk" else "dense", "images": steps * phase.batch}
        row |= {"seconds": beside + taken, "images_per_s": steps * phase.batch / taken}
        rows.append({**row, "top5": last * (epoch + 1) / settings.epochs})
    (folder / run.name / "report.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")


def beside_s(settings: known.Settings, epoch: int) -> tuple[float, float]:
    """What an epoch takes beside its steps, and its last step more than the others."""
    number, after = settings.phase_of(epoch), min(epoch + 1, settings.epochs - 1)
    changes = [settings.phases[settings.phase_of(one)].compression for one in (epoch, after)] == ["topk", "dense"]
    return TRACED_S if epoch == settings.begins[number] else LATER_S, SENT_S if changes else 0.0


def way(name: str) -> Any:
    return next(one for one in WAYS if one.name == name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, step_s, last in (("dense", 0.5, 0.8), ("split", 0.25, 0.82), ("horovod", 1.0, 0.8)):
        kept(tmp_path, Run(way(name), "time"), step_s, 0.1, 640)
        for seed in SEEDS:
            kept(tmp_path, Run(way(name), "seed", seed), 0.01, last + 0.01 * (seed - 2), 3200)
    kept(tmp_path, Run(way("dense"), "whole"), 0.5, 0.8, 3200)
    return tmp_path


def table_of(study: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Give the cells of the report by way and heading."""
    return {line[0]: dict(zip(told.HEADINGS, line, strict=True)) for line in told.lines_of(study)}


def test_every_way_is_timed_and_has_settings_of_its_own() -> None:
    everything = runs()
    assert len({run.name for run in everything}) == len(everything)
    assert {run.way.name for run in everything if run.kind == "time"} == {one.name for one in WAYS}
    for run in everything:
        settings = run.settings(Path("pictures"))
        assert settings.seed == run.seed
        assert (settings.epochs == run.way.timed_epochs * len(settings.phases)) == (run.kind == "time")
    assert {one.name for one in WAYS if one.timed_epochs == 2} == {"horovod", "horovod-fused", "dense"}
    assert [run.name for run in runs(("2", "whole"), ("dense",))] == ["dense_seed2", "dense_whole"]


def test_a_training_counts_only_if_it_is_whole_and_has_the_settings_of_the_study(folder: Path) -> None:
    run = Run(way("dense"), "seed", 1)
    assert len(jobs.rows(folder, run)) == run.settings(folder).epochs
    report = folder / run.name / "report.json"
    rows = json.loads(report.read_text())["rows"]
    report.write_text(json.dumps({"rows": rows[:-1]}))
    assert jobs.rows(folder, run) == []
    report.write_text(json.dumps({"rows": rows}))
    path = folder / run.name / "settings.yaml"
    path.write_text(path.read_text().replace("smoothing: 0.1", "smoothing: 0.2"))
    assert jobs.rows(folder, run) == []


def test_times_are_composed_of_timed_steps_and_the_target_follows_from_dense(folder: Path) -> None:
    found = told.collected(folder)
    named = {row["way"]: row for row in found["rows"]}
    for name, step_s in (("dense", 0.5), ("split", 0.25)):
        settings = Run(way(name), "seed").settings(folder)
        assert [one["step_seconds"] for one in named[name]["phases"]] == pytest.approx([step_s] * len(settings.phases))
        assert len(named[name]["epoch_seconds"]) == settings.epochs
        for epoch, seconds in enumerate(named[name]["epoch_seconds"]):
            steps = 3200 // settings.phases[settings.phase_of(epoch)].batch
            assert seconds == pytest.approx(sum(beside_s(settings, epoch)) + steps * step_s)
    dense = named["dense"]
    assert dense["whole_epoch_seconds"] == pytest.approx(dense["epoch_seconds"])

    lines = table_of(found)
    assert lines["dense"]["top-5 at the end"].startswith("80.0 +- ")
    assert lines["dense"]["epochs to target"] == "28"  # 0.795 of 0.8 on a line over 28 epochs
    assert lines["dense"]["x composed"] == "1.00"
    assert lines["split"]["epochs to target"] == "28"
    assert lines["split"]["sparse phases"] == str(settings.phases[0].pixels)
    assert 1 < float(lines["split"]["x dense"]) < float(lines["split"]["x Horovod"])
    assert lines["horovod"]["x Horovod"] == "1.00"
    assert "| split |" in told.markdown(found)


def test_prices_of_dense_stand_beside_its_steps_and_its_whole_training(folder: Path) -> None:
    assert told.price_lines(told.collected(folder)) == []  # nobody has measured the links
    inside, hosts = "link: {alpha_s: 8.0e-6, beta_s_per_byte: 4.0e-11}", ("ranks: [0, 1]", "ranks: [2, 3]")
    children = [f"- {{{inside}, {ranks}}}" for ranks in hosts]
    text = "\n".join(["link: {alpha_s: 0.0, beta_s_per_byte: 8.7e-8}", "children:", *children])
    (folder / jobs.LINKS).write_text(text, encoding="utf-8")
    found = told.collected(folder)
    *steps, training = [dict(zip(told.PRICES, line, strict=True)) for line in told.price_lines(found)]
    assert {line["way"] for line in (*steps, training)} == {"dense"}
    (dense,) = (row for row in found["rows"] if row["way"] == "dense")
    assert len(steps) == len(dense["phases"])
    assert {line["measured"] for line in steps} == {"500 ms"}
    assert training["time of"] == "the training, 28 epochs"
    assert 0.5 < float(training["predicted / measured"]) < 2


def test_a_way_that_never_reaches_the_target_says_so(folder: Path) -> None:
    for seed in SEEDS:
        kept(folder, Run(way("split"), "seed", seed), 0.01, 0.7, 3200)
    lines = table_of(told.collected(folder))
    assert lines["split"]["epochs to target"] == "never"
    assert lines["split"]["x dense"] == ""


def test_a_way_that_is_timed_alone_has_the_curves_of_the_way_that_learns_the_same(folder: Path) -> None:
    kept(folder, Run(way("horovod-fused"), "time"), 0.75, 0.1, 640)
    found = told.collected(folder)
    lines = table_of(found)
    assert lines["horovod-fused"]["top-5 at the end"] == lines["horovod"]["top-5 at the end"]
    assert lines["horovod-fused"]["x Horovod"] == "1.00"  # the faster one is what the others are compared with
    assert float(lines["horovod"]["x Horovod"]) < 1
    assert float(lines["dense"]["x Horovod"]) == pytest.approx(1.5, abs=0.06)


def test_trainings_of_another_machine_are_refused(folder: Path) -> None:
    for name, cores in (("dense_time", 2), ("split_time", 4)):
        about = {"machine": {"processor": "one", "cores": cores}, "versions": {"keras": "3"}}
        (folder / name / jobs.ABOUT).write_text(json.dumps(about))
    with pytest.raises(InvalidError, match="split_time: was trained with cores 4, and others with 2; take its folder"):
        told.collected(folder)


def test_other_pictures_than_those_of_the_folder_are_refused(tmp_path: Path) -> None:
    assert jobs.train([], tmp_path / "study", tmp_path / "all", tmp_path / "few", lambda run, line: None) == []
    with pytest.raises(InvalidError, match=r"--few \(.*other\): trainings in .*study have .*few; take it"):
        jobs.train([], tmp_path / "study", tmp_path / "all", tmp_path / "other", lambda run, line: None)


def test_a_failure_does_not_end_the_others_and_a_timed_run_begins_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [Run(way("auto"), "time"), Run(way("auto"), "seed", 1)]
    left = folder / "auto_time" / "left"
    left.parent.mkdir()
    left.write_text("of a training that was stopped")
    begun = []

    def fail(run: Run, *others: Any) -> None:
        begun.append(run.name)
        raise ClusterError("there is no ip command")

    monkeypatch.setattr(jobs, "_do", fail)
    failures = jobs.train(chosen, folder, folder / "all", folder / "few", lambda run, line: None)
    assert begun == ["auto_time", "auto_seed1"]
    assert failures == [f"{name}: there is no ip command" for name in begun]
    assert not left.exists()


def test_other_gradients_in_the_timed_training_are_refused(folder: Path) -> None:
    run = Run(way("split"), "time")
    report = folder / run.name / "report.json"
    report.write_text(report.read_text().replace('"topk"', '"dense"'))
    with pytest.raises(InvalidError, match="split: gradients of the timed training"):
        told.collected(folder)


def test_the_command_names_what_is_missing_draws_what_is_there_and_refuses_an_unknown_way(folder: Path) -> None:
    pytest.importorskip("matplotlib")

    def command(*options: str) -> Any:
        few = ["--pictures", str(folder / "all"), "--few", str(folder / "few")]
        return RUNNER.invoke(app, ["recipe", str(folder), *few, *options])

    named = command("--missing", "--ways", "dense,auto")
    assert named.exit_code == 0, named.output
    assert named.output.split()[:4] == ["auto_time", "auto_seed1", "auto_seed2", "auto_seed3"]
    drawn = command("--json", str(folder / "recipe.json"), "--plot", str(folder / "recipe.png"), "--ways", "dense")
    assert drawn.exit_code == 0, drawn.output
    assert (folder / "recipe.png").stat().st_size > 10_000
    assert json.loads((folder / "recipe.json").read_text())["benchmark"] == told.BENCHMARK
    refused = command("--ways", "dence", "--missing")
    assert refused.exit_code == 1
    assert "ways ('dence'): the study has none of this name" in refused.output + str(refused.stderr)
