"""The study of the recipe with real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.studies.recipe import jobs, ways
from hvd_ext.cluster.spec import Spec
from hvd_ext.cluster.tools import obstacle
from tests.mpi.benches import few_pictures

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(bool(obstacle()), reason=f"a rehearsed cluster: making namespaces {obstacle()}"),
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_pictures(tmp_path_factory.mktemp("pictures") / "set")


def test_the_study_trains_with_horovod_what_the_example_trains(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("horovod")
    smoke = yaml.safe_load((ways.known.PRESETS / "smoke.yaml").read_text(encoding="utf-8"))
    short = {**smoke, "phases": [{**smoke["phases"][0], "epochs": 1}, smoke["phases"][-1]], "deterministic": False}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(short), encoding="utf-8")
    monkeypatch.setattr(ways, "PRESET", str(tmp_path / "short.yaml"))
    monkeypatch.setattr(jobs, "CLUSTER", Spec((1, 1)))
    horovod = ways.Run(next(way for way in ways.WAYS if way.name == "horovod"), "seed")
    said: list[str] = []
    assert jobs.train([horovod], tmp_path, pictures, pictures, lambda run, line: said.append(line)) == []
    found = jobs.rows(tmp_path, horovod)
    assert [(row["pixels"], row["batch"], row["compression"]) for row in found] == [
        (16, 24, "dense"),
        (32, 12, "dense"),
    ]
    assert all(0 <= row["top1"] <= row["top5"] <= 1 for row in found)
    assert sum(line.startswith("epoch ") for line in said) == len(found)
    assert jobs.train([horovod], tmp_path, pictures, pictures, lambda run, line: pytest.fail("it is done")) == []
