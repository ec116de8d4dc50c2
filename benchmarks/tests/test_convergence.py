"""The convergence study without jobs: its plan, what is missing, data and models, what the runs say together."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from typer.testing import CliRunner

import hvd_ext
from benchmarks.studies.__main__ import app
from benchmarks.studies.convergence import data as data_sets, jobs, plan as studies, results as told, times
from benchmarks.studies.convergence.models import build
from benchmarks.studies.convergence.worker import Task, optimizer, order, timed_rounds
from hvd_ext.bench import results
from hvd_ext.bench.sampling import EVENTS, emit
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import JobError

PLAN = """
hosts: [2, 1]
seeds: [3, 4]
steps: 3
models:
  cnn: {learning_rate: 0.1, epochs: 2, batch: 4}
  transformer: {learning_rate: 0.5, epochs: 1, batch: 2, length: 8}
settings:
  dense: {}
  hitopk: {algorithm: hitopk, topk: {density: 0.01}, warmup: 0.5}
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def outcome(study: studies.Study, run: studies.Run, accuracy: float = 0.5, **more: Any) -> dict[str, Any]:
    curve = [{"steps": 10 * (epoch + 1), "loss": 1.0, "accuracy": accuracy * (epoch + 1) / 2} for epoch in range(2)]
    learned = {"accuracy": accuracy, "tested": 100, "curve": curve, "equal": True}
    timed: dict[str, Any] = {"step_seconds": [1.0, 1.0, 1.0], "warm_step_seconds": []}
    if run.setting != "dense":
        timed = {"step_seconds": [0.1, 0.1, 0.1], "warm_step_seconds": [[0.5, 0.6, 0.4], [0.3, 0.3, 0.3]]}
    heads = {"benchmark": studies.BENCHMARK, "facts": studies.facts(study, run), "digest": "d", "parameters": 7}
    about = {key: value for key, value in results.begin_run("").items() if key in ("date", "machine", "versions")}
    return {**heads, **about, **(timed if run.seed is None else learned), **more}


def finish(folder: Path, study: studies.Study, run: studies.Run, **more: Any) -> None:
    results.save(folder / f"{run.name}.json", outcome(study, run, **more))


def finish_all(folder: Path, study: studies.Study) -> None:
    for run in studies.runs_of(study):
        accuracy = {3: 0.50, 4: 0.54}.get(run.seed or 0, 0.0) + (0.01 if run.setting == "dense" else 0.0)
        finish(folder, study, run, accuracy=accuracy)


@pytest.mark.parametrize(
    ("name", "models", "optimizer"),
    [
        ("convergence", {"cnn", "vgg", "transformer"}, "sgd"),
        ("convergence_lars", {"cnn", "vgg"}, "lars"),
        ("convergence_sending", {"cnn"}, "sgd"),
        ("sending_times", {"cnn", "vgg", "transformer"}, "sgd"),
    ],
)
def test_the_plans_of_the_repository_are_whole(name: str, models: set[str], optimizer: str):
    study = studies.read(ROOT / "benchmarks" / f"{name}.yaml")
    assert set(study.models) == models
    assert {recipe.optimizer for recipe in study.models.values()} == {optimizer}
    assert len(study.seeds) >= 3 or name.endswith("_times")
    assert sum(study.hosts) >= 4
    assert len(study.hosts) >= 2
    for setting in study.settings.values():
        hvd_ext.TopK(**setting.topk)
        assert not setting.local or hvd_ext.LocalSteps(**setting.local)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cnn:", "lenet:", "lenet.*cnn, vgg, transformer"),
        ("epochs: 2", "epochs: 0", "models.cnn.epochs"),
        ("epochs: 2", "epochs: 2, rate: 1", "models.cnn.rate"),
        ("epochs: 2", "epochs: 2, optimizer: adam", "models.cnn.optimizer"),
        ("epochs: 2", "epochs: 2, optimizer: lars, lars: {weight_decay: -1}", "models.cnn.lars.weight_decay"),
        ("epochs: 2", "epochs: 2, lars: {}", "models.cnn: .*optimizer 'sgd' has no settings of lars"),
        ("[3, 4]", "[3, 3]", "once"),
        ("  dense: {}", "  dense: {warmup: 0.5}", "dense setting"),
        ("  dense: {}", "  dense: {until: 0.5}", "dense setting has no until"),
        ("{density: 0.01}", "{density: 0.01, warmup: 4}", "beside topk"),
        ("{density: 0.01}", "{density: 0.01, until: 400}", "say until beside topk"),
        ("warmup: 0.5", "warmup: 0.5, until: 0.5", "warmup must end before until"),
        ("warmup: 0.5", "until: 1.0", "settings.hitopk.until"),
        ("  dense: {}", "  dense: {local: {every: 2, start: 3}}", "say warmup beside local"),
        ("  dense: {}", "  dense: {codec: 'quantized:3'}", "codec 'quantized:3': Quantized, bits"),
        ("  dense: {}", "  dense: {peer: 'jax'}", "settings.dense.peer"),
        ("  dense: {}", "  dense: {peer: 'pytorch'}", "it trains the model cnn only"),
        ("  dense: {}", "  dense: {peer: 'pytorch', local: {every: 2}}", "takes no topk, codec and local"),
        ("  dense:", "  den/se:", "letters"),
        ("hosts: [2, 1]", "hosts: [", "cannot be read"),
    ],
)
def test_a_wrong_plan_is_refused_in_words(plan: Path, old: str, new: str, words: str):
    plan.write_text(PLAN.replace(old, new))
    with pytest.raises(InvalidError, match=words):
        studies.read(plan)


def test_a_run_without_until_and_with_sgd_has_the_facts_that_it_had_before_there_was_a_choice(plan: Path):
    def facts(text: str) -> dict[str, Any]:
        plan.write_text(text)
        return studies.facts(studies.read(plan), studies.Run("cnn", "hitopk", 3))

    assert not {"until", "optimizer", "lars"} & {*facts(PLAN)["how"], *facts(PLAN)["recipe"]}
    lars = PLAN.replace("epochs: 2", "epochs: 2, optimizer: lars, lars: {weight_decay: 0.25}")
    changed = facts(lars.replace("warmup: 0.5", "warmup: 0.5, until: 0.75"))
    assert changed["how"]["until"] == 0.75
    assert (changed["recipe"]["optimizer"], changed["recipe"]["lars"]["weight_decay"]) == ("lars", 0.25)


def test_times_come_first_and_then_all_of_the_first_seed(plan: Path):
    names = [run.name for run in studies.runs_of(studies.read(plan))]
    assert names[:2] == ["cnn_dense_time", "cnn_hitopk_time"]
    assert names[4:8] == ["cnn_dense_seed3", "cnn_hitopk_seed3", "transformer_dense_seed3", "transformer_hitopk_seed3"]
    assert len(names) == 12
    chosen = studies.runs_of(studies.read(plan), ["cnn"], ["hitopk"])
    assert [run.name for run in chosen] == ["cnn_hitopk_time", "cnn_hitopk_seed3", "cnn_hitopk_seed4"]
    with pytest.raises(InvalidError, match="'ring'.*dense, hitopk"):
        studies.runs_of(studies.read(plan), settings=["ring"])


def test_a_run_counts_only_while_the_plan_says_the_same(plan: Path, tmp_path: Path):
    study = studies.read(plan)
    first, *rest = studies.runs_of(study, ["cnn"], ["dense"])
    finish(tmp_path, study, rest[0])
    assert studies.missing(tmp_path, study, [first, *rest]) == [first, rest[1]]
    plan.write_text(PLAN.replace("learning_rate: 0.1", "learning_rate: 0.2"))
    assert len(studies.missing(tmp_path, studies.read(plan), rest)) == 2
    (tmp_path / f"{rest[0].name}.json").write_text("{")
    assert len(studies.missing(tmp_path, study, rest)) == 2


def test_the_command_says_what_is_missing_and_shows_what_is_done(plan: Path, tmp_path: Path):
    study = studies.read(plan)
    folder = tmp_path / "runs"
    folder.mkdir()
    command = ["convergence", str(plan), "--folder", str(folder)]
    shown = CliRunner().invoke(app, [*command, "--missing", "--models", "cnn", "--seeds", "3,time"])
    assert shown.output.split("\n")[:4] == [
        "cnn_dense_time",
        "cnn_hitopk_time",
        "cnn_dense_seed3",
        "cnn_hitopk_seed3",
    ]
    assert "4 of 4 runs are missing" in shown.output
    finish_all(folder, study)
    shown = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "all.json")])
    assert shown.exit_code == 0
    assert "53.00" in shown.output
    assert json.loads((tmp_path / "all.json").read_text())["benchmark"] == told.BENCHMARK


def test_ranks_share_the_examples_of_each_step():
    parts = [order(seed=1, epoch=0, count=26, rank=rank, size=3, batch=4) for rank in range(3)]
    assert [len(part) for part in parts] == [8, 8, 8]
    assert len(set(np.concatenate(parts).tolist())) == 24
    assert not np.array_equal(parts[0], order(1, 1, 26, 0, 3, 4))
    assert not np.array_equal(parts[0], order(2, 0, 26, 0, 3, 4))


def test_texts_are_cut_into_windows_and_whole_topics_are_kept_for_testing():
    topics = {f"topic{place:02}": chr(ord("a") + place) * 40 for place in range(11)} | {"topic05": "é" * 40}
    found = data_sets.text(8, topics)
    assert found.train.inputs.shape == found.train.labels.shape == (45, 8)
    assert np.array_equal(found.train.inputs.ravel()[1:], found.train.labels.ravel()[:-1])
    assert found.train.inputs.max() == data_sets.VOCABULARY - 1
    assert {chr(code) for code in found.test.inputs.ravel()} == {"a", "\n", "k"}
    assert len(found.train.first(5).inputs) == 5
    assert len(found.train.first(0).inputs) == 45


def test_images_are_halved_and_a_set_that_is_not_whole_is_refused(tmp_path: Path):
    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    recipe = {"train": 2, "test": 1, "pixels": 4}
    (tmp_path / "manifest.json").write_text(json.dumps({"recipe": recipe, "class_names": ["a_x", "b_x"]}))
    for split, name, number in (("train", "a_x", 0), ("train", "b_x", 1), ("test", "a_x", 0)):
        path = tmp_path / split / name / f"{number:05}.jpg"
        path.parent.mkdir(parents=True)
        image.fromarray(np.full((4, 4, 3), 40 * (number + 1), np.uint8)).save(path, quality=100)
    found = data_sets.images(tmp_path)
    assert found.train.inputs.shape == (2, 2, 2, 3)
    assert found.train.labels.tolist() == [[0, 0], [1, 0]]
    assert abs(int(found.train.inputs[1].mean()) - 80) <= 1
    data_sets.save(tmp_path / "set.npz", found)
    again = data_sets.load(tmp_path / "set.npz")
    assert again.digest == found.digest
    assert np.array_equal(again.test.inputs, found.test.inputs)
    path.unlink()
    with pytest.raises(InvalidError, match="must have 1 of test; there are 0"):
        data_sets.images(tmp_path)
    with pytest.raises(InvalidError, match="make_images.py"):
        data_sets.images(tmp_path / "none")


class FakeJob:
    """A job that does what a test says: events, and files of runs that it finishes."""

    def __init__(self, folder: Path, study: studies.Study, task: Task, breaks: str) -> None:
        self.log, self._status = folder / "log", 0
        for name in task.runs:
            emit(folder / EVENTS, "run", name=name)
            if name == breaks:
                self._status = 1
                return
            run = next(run for run in studies.runs_of(study) if run.name == name)
            finish(Path(task.folder), study, run)
            emit(folder / EVENTS, "done", name=name)

    def status(self) -> int:
        return self._status

    def wait(self, timeout_s: float) -> None:
        if self._status:
            raise JobError("job failed with status 1")


@pytest.mark.parametrize("breaks", ["", "cnn_hitopk_seed3"])
def test_after_a_failure_the_other_runs_go_on(plan: Path, tmp_path: Path, breaks: str):
    study = studies.read(plan)
    started: list[bool] = []

    def way(is_timed: bool) -> Any:
        def start(_: ExitStack, folder: Path, command: list[str]) -> Any:
            started.append(is_timed)
            return FakeJob(folder, study, Task.read(Path(command[-1])), breaks)

        return lambda _: start

    kinds: list[str] = []
    runs = studies.runs_of(study, ["cnn"])
    failures = jobs.train(
        study,
        runs,
        tmp_path,
        {"cnn": "x"},
        lambda kind, _: kinds.append(kind),
        starts={True: way(True), False: way(False)},
    )
    left = [run.name for run in studies.missing(tmp_path, study, runs)]
    assert left == [breaks] * bool(breaks)
    assert started == [True, False] + [False] * bool(breaks)
    assert kinds.count("done") == 6 - bool(breaks)
    assert [failure.split(":")[0] for failure in failures] == left


def test_the_runs_together_say_means_intervals_and_times(plan: Path, tmp_path: Path):
    study = studies.read(plan)
    finish_all(tmp_path, study)
    found = told.collected(tmp_path, study)
    dense, sparse = told.summary(found)[:2]
    assert dense["accuracy"] == pytest.approx(0.53)
    # two values: t = 12.706, s = 0.02 sqrt(2)
    assert dense["interval"] == pytest.approx(12.706 * 0.02)
    assert sparse["difference"] == pytest.approx(-0.01)
    assert sparse["difference_interval"] == pytest.approx(0, abs=1e-12)
    # 20 steps, half of them with two densities of the warm-up
    assert (dense["training_seconds"], sparse["training_seconds"]) == pytest.approx((20.0, 5.0))
    assert (dense["reached_seconds"], sparse["reached_seconds"]) == (20.0, None)
    assert told.interval([1.0]) is None


@pytest.mark.parametrize(("below", "reached"), [(0.0, 5.0), (0.004, None)])
def test_who_reaches_dense_or_comes_near_is_told_how_much_sooner(
    plan: Path, tmp_path: Path, below: float, reached: float | None
):
    finish_all(tmp_path, study := studies.read(plan))
    last = told.mean_curve(told.collected(tmp_path, study)["rows"][0])[-1][1]
    for seed in study.seeds:
        curve = [{"steps": steps, "loss": 1.0, "accuracy": last - below} for steps in (10, 20)]
        finish(tmp_path, study, studies.Run("cnn", "hitopk", seed), curve=curve)
    sparse = told.summary(told.collected(tmp_path, study))[1]
    assert (sparse["near_seconds"], sparse["near_sooner"]) == pytest.approx((4.0, 5.0))
    assert sparse["reached_sooner"] == reached


def test_times_at_several_rates_are_one_table_and_later_runs_replace_earlier_ones(plan: Path, tmp_path: Path):
    folders = []
    for number, (rate, step_s) in enumerate([("1gbit", 0.02), ("100mbit", 3.0), ("100mbit", 0.2)]):
        study = studies.read(plan).model_copy(update={"rate": rate})
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        for run in studies.runs_of(study, ["cnn"]):
            finish(folders[-1], study, run, **({"step_seconds": [step_s] * 3} if run.seed is None else {}))
    found = times.collected(folders)
    assert len(found["rows"]) == 4
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in times.markdown(found).splitlines()]
    assert table[0] == ["ranks", "model", "setting", "100mbit/s", "1gbit/s"]
    assert table[2:] == [["2 + 1", "cnn", setting, "200 ms", "20 ms"] for setting in ("dense", "hitopk")]
    with pytest.raises(InvalidError, match="must have runs of convergence --seeds time"):
        times.collected([tmp_path])


def test_runs_of_different_data_are_not_put_together(plan: Path, tmp_path: Path):
    study = studies.read(plan)
    finish_all(tmp_path, study)
    finish(tmp_path, study, studies.Run("cnn", "hitopk", 3), digest="other")
    with pytest.raises(InvalidError, match="different data"):
        told.collected(tmp_path, study)


@pytest.mark.parametrize(("model", "normalised"), [("cnn", True), ("vgg", False)])
def test_images_become_logits_with_and_without_batch_normalisation(model: str, normalised: bool):
    built = build(model, (16, 16, 3), 3, 5, width=2)
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    assert built.predict_on_batch(images).shape == (2, 3, 5)
    assert any(isinstance(layer, keras.layers.BatchNormalization) for layer in built.layers) is normalised


def test_the_transformer_does_not_see_what_it_must_predict():
    built = build("transformer", (6,), 6, 9, width=8)
    characters = np.arange(12, dtype=np.int32).reshape(2, 6)
    changed = characters.copy()
    changed[:, 4] = 7
    before, after = (built.predict_on_batch(text) for text in (characters, changed))
    assert before.shape == (2, 6, 9)
    assert np.allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert not np.allclose(before[:, 4:], after[:, 4:], atol=1e-3)


def test_the_first_weights_depend_on_the_seed_alone():
    weights = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        weights.append(np.concatenate([np.ravel(part) for part in build("vgg", (16, 16, 3), 3, 5, 2).get_weights()]))
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


def test_local_steps_and_a_compression_are_those_of_the_setting():
    recipe = {"learning_rate": 0.5, "momentum": 0.75, "nesterov": True}
    how = {"algorithm": "auto", "topk": {}, "warmup": 0, "codec": "fp16", "local": {"every": 4, "outer": None}}
    options = optimizer({"recipe": recipe, "how": how, "seed": 1}, 100)._hvd_ext.reducer.options
    assert options.compression is hvd_ext.Compression.fp16
    assert options.local_steps == hvd_ext.LocalSteps(4, outer=None)


def test_fast_steps_are_timed_more_often():
    assert [timed_rounds(9, 1, step_s) for step_s in (0.01, 0.25, 2.0)] == [60, 20, 9]
    assert [timed_rounds(9, interval, 0.01) for interval in (16, 64, 100)] == [12, 3, 3]
    assert timed_rounds(9, 16, 2.0) == 3
    assert timed_rounds(80, 1, 0.01) == 80


def test_a_peer_needs_its_python(plan: Path, tmp_path: Path):
    plan.write_text(
        PLAN.replace("  dense: {}", "  dense: {peer: pytorch}").replace("  transformer:", "#  transformer:")
    )
    study = studies.read(plan)
    with pytest.raises(InvalidError, match="cnn_dense_time.*give --pytorch, a Python that has PyTorch"):
        jobs.train(study, studies.runs_of(study, settings=["dense"]), tmp_path, {}, lambda kind, event: None)


@pytest.mark.parametrize("name", ["", "sgd", "lars"])
def test_the_optimizer_is_that_of_the_recipe(name: str):
    topk = {} if name == "sgd" else {"density": 0.01, "momentum_correction": True}
    recipe = {"learning_rate": 0.5, "momentum": 0.75, "nesterov": True}
    if name:
        recipe |= {"optimizer": name, "lars": {"weight_decay": 0.25} if name == "lars" else None}
    how = {"algorithm": "hitopk" if topk else "auto", "topk": topk, "warmup": 0}
    made = optimizer({"recipe": recipe, "how": how, "seed": 1}, 100)
    assert type(made).__name__ == ("LARS" if name == "lars" else "SGD")
    assert (float(made.momentum), made.nesterov) == (0.75, True)
    assert name != "lars" or made.weight_decay == 0.25
    assert (made._hvd_ext.reducer.momentum is not None) == bool(topk)


def test_the_parts_of_a_class_are_its_labels():
    names = ["disc_dots_red", "disc_grid_lime", "star_dots_lime"]
    assert data_sets.parts_of(names).tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
