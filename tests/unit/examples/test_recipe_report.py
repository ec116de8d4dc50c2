"""The report of the DAWNBench recipe: its clock, rows, files and views."""

from __future__ import annotations

import csv
import datetime
import fcntl
import io
import json
import os
import queue
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import psutil
import pytest
from resnet50 import clock as clocks, dawnbench, plots, report, rows, settings, training, views
from resnet50.schedule import Steps
from rich.console import Console

import hvd_ext as hvd
from hvd_ext import state
from tests.unit.drawing import printed

KINDS = ("topk", "dense", "dense", "dense")
CHANGES = ("data.source=synthetic", "target=0.5", "entry.hardware=one machine")
PLACE = {"hardware": "one machine", "framework": "TensorFlow", "ranks": 1, "versions": {}}
OPEN: list[clocks.Clock] = []  # a test leaves no thread behind
PICTURES = 96  # four steps of an epoch, and eight of the last one


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"rank": 0, "size": 1, "local_size": 1, "cross_size": 1, "is_homogeneous": True}.items():
        monkeypatch.setattr(hvd, name, lambda value=value: value)
    yield
    while OPEN:
        OPEN.pop().close()
    for owner in ("the clock of the recipe", "the report of the recipe"):
        state.unregister(owner)
    state.forget_unclaimed()


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows of the plots that a test has asked for; one test draws."""
    found: list[Any] = []
    monkeypatch.setattr(report.plots, "draw", lambda settings, rows, path: found.append(list(rows)))
    return found


DRAW = plots.draw


def chosen(*changes: str) -> settings.Settings:
    return settings.read("smoke", [*CHANGES, *changes])


def row(epoch: int, **others: Any) -> dict[str, Any]:
    """A row of the smoke preset: 10 s for an epoch, of which there are 2, 1, 1 and 1 in the phases."""
    wanted = chosen()
    phase = wanted.phase_of(epoch)
    one = wanted.phases[phase]
    begun = {"epoch": epoch, "phase": phase, "pixels": one.pixels, "batch": one.batch, "compression": KINDS[phase]}
    spent = {"images": 96, "seconds": 10.0, "images_per_s": 12.0, "hours": (20 + 10 * (epoch + 1)) / 3600}
    right = {"top1": epoch / 10, "top5": epoch / 5, "loss": 2.5, "learning_rate": 0.1 * epoch, "momentum": 0.9}
    return {**begun, **spent, "wall_hours": (25 + 12 * (epoch + 1)) / 3600, **right, **others}


ROWS = [row(epoch) for epoch in range(5)]


class Time:
    """A clock that stands until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(clocks.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(clocks.time, "time", lambda: 7000.0)
        monkeypatch.setattr(clocks.psutil.Process, "create_time", lambda _: 6970.0)


def test_a_clock_counts_from_the_begin_of_the_program_and_leaves_out_what_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Time(monkeypatch)
    clock = clocks.Clock()
    assert (clock.counted_s, clock.wall_s, clock.counts) == (30, 30, True)
    time.now += 10
    clock.stop()
    time.now += 5
    clock.stop()  # the first one counts
    assert (clock.counted_s, clock.wall_s, clock.counts) == (40, 45, False)
    time.now += 5
    clock.go_on()
    clock.go_on()
    time.now += 1
    assert (clock.counted_s, clock.wall_s) == (41, 51)


def test_a_job_that_goes_on_counts_on_and_counts_what_a_killed_job_has_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    time = Time(monkeypatch)
    path = tmp_path / "clock.json"
    first = clocks.Clock()
    time.now += 10
    saved = state.collect()  # 40 s
    time.now += 7
    first.note(path)  # 47 s; then it is killed
    state.unregister("the clock of the recipe")
    second = clocks.Clock()
    assert second.counted_s == 30  # its own start
    second.keep(path)
    assert second.counted_s == 30 + 47
    state.restore(saved, {owner: lambda found=found: [found] for owner, found in saved.items()})
    assert (second.counted_s, second.wall_s) == (30 + 47, 30 + 47)
    second.close()
    path.write_text("{}")
    state.unregister("the clock of the recipe")
    third = clocks.Clock()
    third.keep(path)
    state.restore(saved)
    assert third.counted_s == 30 + 40
    third.close()


def test_a_clock_notes_the_time_by_itself_whatever_happens_to_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clocks, "NOTE_S", 0.001)
    notes: queue.Queue[bytes] = queue.Queue()

    def write_whole(path: Path, data: bytes) -> None:
        notes.put(data)
        raise OSError("the disk is full")  # the next one is tried all the same

    monkeypatch.setattr(clocks, "write_whole", write_whole)
    clock = clocks.Clock()
    clock.keep(tmp_path / "clock.json")
    for _ in range(2):
        assert set(json.loads(notes.get(timeout=30))) == {"counted_s", "wall_s"}
    clock.close()


class Job:
    """A job that trains as the smoke preset says."""

    def __init__(self, folder: Path, saved: dict[str, Any] | None = None, *changes: str) -> None:
        self.settings = chosen(*changes)
        for owner in ("the clock of the recipe", "the report of the recipe"):
            state.unregister(owner)
        self.clock = clocks.Clock()
        OPEN.append(self.clock)
        self.steps = Steps(self.settings, PICTURES)
        self.report = report.Report(self.settings, KINDS, self.steps, folder, self.clock)
        self.saved: dict[str, Any] = {}
        if saved:
            state.restore(saved)

    def train(self, begin: int = 0, stop: tuple[int, int] | None = None) -> None:
        """Call what Keras calls from an epoch on; stop behind a step of an epoch, where a checkpoint is saved."""
        for epoch in range(begin, self.settings.epochs):
            self.report.on_epoch_begin(epoch)
            for batch in range(self.steps.in_epoch[self.settings.phase_of(epoch)]):
                self.report.on_train_batch_end(batch)
                if stop == (epoch, batch + 1):
                    self.saved = state.collect()
                    break
            self.clock.stop()  # as the validation does
            self.report.on_epoch_end(epoch, {"top1": epoch / 10, "top5": epoch / 5, "train-32_cache_hits": 1.0})
            if self.saved:
                break
            self.clock.go_on()
        self.report.close()


def test_keras_calls_what_the_report_needs(tmp_path: Path) -> None:
    job = Job(tmp_path)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.ones((4, 2), np.float32)
    model.fit(x, x[:, :1], 1, epochs=2, verbose=0, callbacks=[job.report])
    assert [(one["epoch"], one["images"]) for one in job.report.rows] == [(0, 96), (1, 96)]
    assert job.report.rows[1]["loss"] < job.report.rows[0]["loss"]
    assert job.report.rows[0]["learning_rate"] == 1  # what the settings say of the end of the epoch


def test_a_training_in_two_jobs_has_a_row_for_each_epoch_and_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], drawn: list[Any]
) -> None:
    first = Job(tmp_path)
    first.train(stop=(1, 3))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("epoch 1 of 5: 16 pixels, batch 24, top-k: top-1 0.0%, top-5 0.0%, ")
    assert [one["epoch"] for one in json.loads((tmp_path / "report.json").read_text())["rows"]] == [0]
    _, done, trained_s = first.saved["the report of the recipe"]["epoch"]
    assert done == 3
    second = Job(tmp_path, first.saved, "entry.author=Somebody")
    assert second.clock.counted_s > first.saved["the clock of the recipe"]["seconds"][0]
    second.train(begin=1)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "goes on after 1 epochs:"
    assert [line.split(":")[0] for line in said[1:6]] == [f"epoch {number} of 5" for number in range(1, 6)]
    assert "top-5 of 50.0%: reached after" in "\n".join(said)
    found = json.loads((tmp_path / "report.json").read_text())
    assert [one["epoch"] for one in found["rows"]] == [0, 1, 2, 3, 4]
    assert [one["images"] for one in found["rows"]] == [96] * 5
    assert found["rows"][1]["seconds"] >= trained_s  # the steps of the first job are in it
    hours = [one["hours"] for one in found["rows"]]
    assert hours == sorted(hours)
    assert all(one["wall_hours"] > one["hours"] > 0 for one in found["rows"])
    assert found["target_hours"] == found["rows"][3]["hours"]
    assert found["hours"] == pytest.approx(found["start_hours"] + sum(one["seconds"] for one in found["phases"]) / 3600)
    read = list(csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text())))
    assert [float(one["top5"]) for one in read] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert read[0]["cache_hits"] == "1.0"
    assert json.loads((tmp_path / "dawnbench.json").read_text())["author"] == "Somebody"
    assert len((tmp_path / "dawnbench.tsv").read_text().splitlines()) == 6
    assert [len(rows) for rows in drawn] == [1, 5]
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2
    assert list(tmp_path.glob("*.part")) == []


def test_files_that_are_written_anew_elsewhere_say_where_the_training_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(tmp_path, None, 'entry.hardware=""').train()
    before = json.loads((tmp_path / "dawnbench.json").read_text())
    assert before["misc"]["ranks"] == 1
    monkeypatch.setattr(hvd, "size", lambda: 3)
    monkeypatch.setattr(hvd, "local_size", lambda: 3)
    again = Job(tmp_path, None, 'entry.hardware=""', "entry.author=Somebody")
    again.report.close()
    found = json.loads((tmp_path / "dawnbench.json").read_text())
    assert found["author"] == "Somebody"
    assert (found["hardware"], found["misc"]["ranks"]) == (before["hardware"], 1)
    again.train(begin=4)
    found = json.loads((tmp_path / "dawnbench.json").read_text())
    assert found["misc"]["ranks"] == 3 and found["hardware"].startswith("1 host x 3 ranks: ")


def test_the_time_of_saving_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    clock = Job(tmp_path).clock
    began = clock.counted_s

    def save(*arguments: Any) -> None:
        time.now += 30

    monkeypatch.setattr(hvd.callbacks.Checkpoint, "save", save)
    checkpoint = training.Checkpoint(tmp_path / "checkpoints", clock)
    checkpoint.save(0, 3, "SIGTERM")
    time.now += 2
    assert clock.counted_s - began == pytest.approx(2)
    clock.stop()  # as at the end of an epoch
    checkpoint.save(1)
    assert not clock.counts


def test_the_options_of_a_job_are_those_of_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_EXT_TOPOLOGY", "of-the-cluster.yaml")
    monkeypatch.setenv("HVD_EXT_ALGORITHM", "ring")
    found = training.options(chosen("algorithm=two_level"), None)
    assert (str(found.topology), found.algorithm) == ("of-the-cluster.yaml", "two_level")
    assert training.options(chosen(), tmp_path / "given.yaml").topology == tmp_path / "given.yaml"


def test_a_model_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    training.save(model, tmp_path / "model.keras")
    before = (tmp_path / "model.keras").read_bytes()

    class Torn:
        def save(self, path: Path) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(settings.SettingsError, match=r"model\.keras: cannot be written: .*No space left on device"):
        training.save(Torn(), tmp_path / "model.keras")
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]
    assert (tmp_path / "model.keras").read_bytes() == before


def test_an_epoch_that_was_trained_again_has_one_row_and_steps_that_an_earlier_job_did_are_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_before = [row(epoch) for epoch in range(3)]  # the job was killed before the checkpoint of the last two
    (tmp_path / "report.json").write_text(json.dumps({"rows": rows_before}))
    job = Job(tmp_path, {"the report of the recipe": {"epoch": np.array([1.0, 3.0, 5.0])}})
    time = Time(monkeypatch)
    job.report.on_epoch_begin(1)
    assert [one["epoch"] for one in job.report.rows] == [0]
    for batch in range(4):
        job.report.on_train_batch_end(batch)
        time.now += 2
    job.report.on_epoch_end(1, {})
    last = job.report.rows[-1]
    assert (last["epoch"], last["images"], last["seconds"]) == (1, 96, 5 + 4 * 2)
    assert last["images_per_s"] == pytest.approx(96 / 13)  # only one step was measured, and that was the first


def test_a_speed_is_that_of_the_steps_behind_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    job = Job(tmp_path)
    job.report.on_epoch_begin(0)
    assert job.report._now().status == "first step"
    assert job.report._now().left_s is None
    for batch, seconds in enumerate((100, 2, 2, 2)):
        time.now += seconds
        job.report.on_train_batch_end(batch)
    now = job.report._now()
    assert (now.status, now.done, now.steps, now.images_per_s, now.counted_s) == ("trains", 4, 4, 12, 136)
    job.report.on_epoch_end(0, {})
    time.now += 50
    assert job.report.rows[0]["images_per_s"] == 12
    assert job.report.rows[0]["seconds"] == 106
    now = job.report._now()
    assert (now.status, now.epoch, now.done, now.counted_s) == ("validates and saves", 1, 0, 136)
    assert not (tmp_path / "dawnbench.tsv").exists()  # nothing was validated


def test_other_ranks_show_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hvd, "rank", lambda: 1)
    Job(tmp_path).train()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_file_that_cannot_be_written_is_named_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.csv").mkdir()
    job = Job(tmp_path)
    job.train()
    said = capsys.readouterr().out
    assert said.count("report: cannot be written, and training goes on: ") == 1
    assert f"report.csv.{os.getpid()}.part" in said
    assert len(job.report.rows) == 5


def test_a_report_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(settings.SettingsError, match="report.json: is no report of this recipe; take it away"):
        Job(tmp_path)


def test_phases_add_up_and_the_time_to_the_target_is_that_of_the_first_epoch_that_has_it() -> None:
    first, second, *_ = found = rows.phases([{**one, "cache_wait_s": 2.0, "cache_hits": 0.5} for one in ROWS])
    assert [one["epochs"] for one in found] == [2, 1, 1, 1]
    assert (first["seconds"], first["cache_wait_s"], first["cache_hits"]) == (20, 4, 0.5)
    assert (first["compression"], second["compression"]) == ("topk", "dense")
    mixed = rows.phases([row(0, images_per_s=10.0), row(1, images_per_s=40.0)])
    assert mixed[0]["images_per_s"] == pytest.approx(16)  # twice as many pictures in the sum of the times
    assert rows.reached(ROWS, 0.4) == ROWS[2]["hours"]
    assert rows.reached(ROWS, 0.9) is None
    assert rows.reached(ROWS, None) is None


def test_the_time_that_is_left_follows_from_areas_or_from_known_rates() -> None:
    wanted = chosen()
    in_epoch = Steps(wanted, PICTURES).in_epoch  # 4, 4, 4 and 8 steps
    areas = 96 * (1 + (20**2 + 28**2 + 32**2) / 16**2)
    assert rows.left(wanted, in_epoch, 1, 0, 10.0, 0) == pytest.approx(areas / 10)
    assert rows.left(wanted, in_epoch, 1, 3, 10.0, 0) == pytest.approx((areas - 72) / 10)
    known = chosen("price.rates={16: 100, 20: 50, 28: 25, 32: 20}")
    assert rows.left(known, in_epoch, 2, 0, 10.0, 0) == pytest.approx(96 * (2 + 4 + 5) / 10)
    assert rows.left(known, in_epoch, 5, 0, 10.0, 3) == 0


def test_an_entry_to_dawnbench_keeps_the_rules_of_its_repository() -> None:
    """The checks of tests/test_submissions.py in github.com/stanford-futuredata/dawn-bench-entries."""
    entry = json.loads(json.dumps(dawnbench.record(chosen(), KINDS, PLACE, ROWS)))
    for field in ("version", "author", "authorEmail", "framework", "model", "hardware", "timestamp"):
        assert entry[field]
    datetime.datetime.strptime(entry["timestamp"], "%Y-%m-%d")
    assert entry["version"] == "v1.0"
    lines = list(csv.DictReader(io.StringIO(dawnbench.tsv(ROWS)), delimiter="\t"))
    assert list(lines[0]) == ["epoch", "hours", "top1Accuracy", "top5Accuracy"]
    assert [int(line["epoch"]) for line in lines] == [1, 2, 3, 4, 5]
    assert [float(line["top5Accuracy"]) for line in lines] == [0, 20, 40, 60, 80]
    assert [float(line["hours"]) for line in lines] == pytest.approx([one["hours"] for one in ROWS], abs=1e-6)
    sizes = [(one["image_size"], one["batch_size"], one["gradients"]) for one in entry["misc"]["imageSize"]]
    assert sizes == [(16, 24, "topk"), (20, 24, "dense"), (28, 24, "dense"), (32, 12, "dense")]
    assert entry["misc"]["schedule"]["rate"] == [[0, 0], [2, 2], [5, 0.1]]
    assert (entry["misc"]["start_seconds"], entry["usedBlacklist"]) == (20, False)
    assert not {"codeURL", "costPerHour", "logFilename"} & set(entry)  # they are optional, and nothing is known


def test_what_an_entry_lacks_is_named_until_it_is_whole() -> None:
    missing = ["set entry.author", "set entry.author_email", "top-5 accuracy must reach 93%, the best is 80.0%"]
    assert dawnbench.lacks(dawnbench.record(chosen(), KINDS, PLACE, ROWS), ROWS) == missing
    nowhere = dawnbench.record(settings.read("smoke"), KINDS, {**PLACE, "hardware": ""}, ROWS)
    assert dawnbench.lacks(nowhere, [])[0] == "hardware is required"
    entry = {"author": "A Team", "author_email": "team@example.org", "hardware_tag": "16x8-v100"}
    links = {"code_url": "https://example.org/code", "log_url": "https://example.org/log", "cost_per_hour": 329.6}
    network = ("network.blocks=[3,4,6,3]", "network.widths=[64,128,256,512]", "network.stem=imagenet")
    whole = chosen(*(f"entry.{name}={value}" for name, value in (entry | links).items()), *network)
    record = dawnbench.record(whole, KINDS, PLACE, ROWS)
    assert dawnbench.lacks(record, [*ROWS, row(5, top5=0.931)]) == []
    assert [record[name] for name in ("codeURL", "logFilename", "costPerHour")] == list(links.values())
    assert (record["model"], dawnbench.name(whole)) == ("ResNet50-v1.5", "A-Team_ResNet50-v1.5_16x8-v100_tensorflow")


def test_the_plot_has_all_figures_and_names_the_phases(seen: list[Any], tmp_path: Path) -> None:
    DRAW(chosen(), ROWS, tmp_path / "report.png")
    accuracy, speed, rate, momentum = seen[0].axes
    five, one, target = accuracy.lines
    assert list(five.get_ydata()) == pytest.approx([0, 20, 40, 60, 80])
    assert list(one.get_xdata()) == [row["hours"] for row in ROWS]
    assert set(target.get_ydata()) == {50}
    assert [text.get_text() for text in speed.texts] == ["16 px\ntop-k", "20 px\ndense", "28 px\ndense", "32 px\ndense"]
    assert (rate.get_ylabel(), momentum.get_ylabel()) == ("learning rate", "momentum")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    # nothing was validated, and the first phase is too narrow for its name
    bare = [row(0, seconds=1.0, hours=1.0), row(2, seconds=1.0, hours=10.0)]
    bare = [{name: one[name] for name in one if name not in ("top1", "top5")} for one in bare]
    DRAW(chosen("target=null"), bare, tmp_path / "report.png")
    assert not seen[1].axes[0].lines


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The path of a terminal of 90 columns and 12 lines."""
    monkeypatch.setenv("TERM", "xterm")  # rich draws nothing on one that is called dumb
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 90, 0, 0))
    yield os.ttyname(theirs)
    os.close(ours)
    os.close(theirs)


def now() -> views.Now:
    return views.Now(4, "dense", 3, 8, 1234.5, 3725.0, 59.6, "trains")


def test_a_display_is_for_a_terminal_that_can_show_it(
    monkeypatch: pytest.MonkeyPatch, terminal: str, tmp_path: Path
) -> None:
    assert views.size(terminal) == (90, 12)
    (tmp_path / "log").touch()
    assert [views.size(str(path)) for path in (tmp_path / "log", tmp_path / "none", "/dev/null")] == [None] * 3
    # the output of a rank ends where that of its launcher does, unless the launcher writes words of its own into it
    for words, end in ((["orterun"], "/proc/12345/fd/1"), (["mpirun", "--tag-output"], None)):
        parent = SimpleNamespace(name=lambda words=words: words[0], cmdline=lambda words=words: words, pid=12345)
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "parents", lambda _, parent=parent: [parent])
            patch.setattr(views, "size", lambda path: (90, 12))
            assert views.end_of(1) == end
    monkeypatch.setattr(views, "end_of", lambda number: terminal)
    for term, kind in (("xterm-256color", views.Screen), ("dumb", views.Lines)):
        monkeypatch.setenv("TERM", term)
        assert type(views.begin(chosen(), now)) is kind


SUMMARY = {
    **{"hours": 0.5, "start_hours": 0.1, "wall_hours": 0.6, "target": 0.5, "target_hours": None},
    **{"entry": "name", "entry_lacks": [], "phases": rows.phases(ROWS)},
}


def test_a_display_shows_the_present_and_the_newest_epochs_below_standard_error(terminal: str) -> None:
    text, before = io.StringIO(), sys.stderr
    console = Console(file=text, force_terminal=True, color_system=None, legacy_windows=False)
    shown = views.Screen(chosen(), console, now, terminal, True)
    shown.begin(ROWS[:4])
    for words in (
        "epoch 5 of 5, phase 4 of 4: 32 pixels, batch 12, dense; trains",
        *("3 of 8 steps", "1,234 images/s", "1:02:05 counted, about 0:01:00 left"),
    ):
        assert words in text.getvalue()
    print("a warning", file=sys.stderr)
    sys.stderr.write("its end")
    assert "a warning\n" in text.getvalue() and "its end" not in text.getvalue()
    for _ in range(20):
        shown.add(row(4, loss=0.125))
    lines = printed(shown._drawn(), width=90).splitlines()
    assert len(lines) < 12 and max(map(len, lines)) <= 90
    assert lines[-1].split() == ["5", "32", "12", "dense", "0.125", "40.0%", "80.0%", "12", "0:01:10", "0:01:25"]
    narrow = printed(views.epochs(ROWS, 60), width=60)
    assert "gradients" not in narrow and "…" not in narrow
    shown.end(SUMMARY)
    assert sys.stderr is before
    assert "its end\n" in text.getvalue()
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1  # the cursor is back
    assert "phases" in text.getvalue()[text.getvalue().rindex("\x1b[?25h") :]


def test_the_end_says_what_was_taken() -> None:
    text = io.StringIO()
    for change in ({}, {"target_hours": 0.25, "entry_lacks": ["a", "b"]}):
        views.show(Console(file=text, width=100), {**SUMMARY, **change})
    for words in (
        *("counted: 0.5000 h, of them 0.1000 h", "checkpoints: 0.6000 h", "top-5 of 50.0%: not reached"),
        "is whole: dawnbench.json and .tsv as ImageNet/train/name",
        *("top-5 of 50.0%: reached after 0.2500 h", "an entry to DAWNBench lacks: a; b"),
    ):
        assert words in text.getvalue()
    assert ["1", "16", "24", "top-k", "2", "20.0", "12"] in [line.split() for line in text.getvalue().splitlines()]
