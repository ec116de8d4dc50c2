"""The plan of a convergence study, a YAML file: models, settings, seeds; and which of its runs are done.

    hosts: [2, 2]
    rate: 100mbit
    seeds: [1, 2, 3]
    models:
      cnn: {learning_rate: 0.2, epochs: 20, batch: 32, train: 15000}
      vgg: {optimizer: lars, lars: {weight_decay: 1.0e-4}, learning_rate: 4.0, epochs: 20, batch: 32}
    settings:
      dense: {}
      hitopk: {algorithm: hitopk, topk: {density: 0.01}}
      hitopk-warmed: {algorithm: hitopk, topk: {density: 0.01}, warmup: 0.3}
      hitopk-first: {algorithm: hitopk, topk: {density: 0.01}, until: 0.8}

A run is a model, a setting and a seed; without a seed it measures the time of a step. Each run writes one file when it
ends. A file counts only if it was made with what the plan says now.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.studies.convergence.models import DATA_OF
from hvd_ext.errors import InvalidError
from hvd_ext.options.gradients import GradientOptions

BENCHMARK = "convergence, one run"


class Lars(BaseModel):
    """Settings of `hvd_ext.optimizers.LARS` beside the learning rate, the momentum and Nesterov's.

    Args:
        trust_coefficient: the factor of the trust ratios.
        weight_decay: inside of the norms.
        max_trust: the greatest trust ratio; None: there is no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    trust_coefficient: float = Field(default=0.001, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_trust: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Recipe(BaseModel):
    """How a model is trained in all settings.

    Args:
        optimizer: "sgd" or "lars".
        lars: with optimizer "lars", its further settings; None for its defaults.
        learning_rate: for all ranks together; it rises for a tenth of the steps and falls as a cosine.
        momentum: of the optimizer.
        nesterov: of the optimizer.
        epochs: passes over the training examples.
        batch: examples of a rank's batch.
        train: the number of training examples; 0 for all.
        curve: the number of test examples after each epoch; the last epoch is tested with all.
        width: of the model; 0 for its own.
        length: characters of an example of text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    optimizer: Literal["sgd", "lars"] = "sgd"
    lars: Lars | None = None
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False
    epochs: int = Field(ge=1)
    batch: int = Field(ge=1)
    train: int = Field(default=0, ge=0)
    curve: int = Field(default=2000, ge=1)
    width: int = Field(default=0, ge=0)
    length: int = Field(default=64, ge=2)

    @model_validator(mode="after")
    def _of_its_optimizer(self) -> Recipe:
        if self.lars is not None and self.optimizer != "lars":
            raise ValueError(f"optimizer {self.optimizer!r} has no settings of lars; say optimizer: lars")
        return self


class Setting(BaseModel):
    """How gradients are reduced.

    Args:
        algorithm: of `DistributedOptimizer`.
        topk: keywords of `hvd_ext.TopK`; empty for dense gradients, or another codec.
        codec: another compression, as on a command line ("sign", "quantized:4", "fp16", "lowrank:4", "auto"), after the
            dense steps of a warm-up.
        warmup: the share of all steps that belong to the warm-up, 0 to 1; of local steps, those before their start.
        warmup_densities: of these steps, falling; empty for those of `hvd_ext.Warmup`, [1.0] for dense steps.
        until: the share of all steps after which gradients are sent whole (`hvd_ext.TopK(until=...)`); 0 for never.
        peer: what trains instead of hvd_ext: "pytorch" (DistributedDataParallel over gloo), or one of its communication
            hooks, "pytorch:fp16", "pytorch:powersgd=4" (of rank 4) or "pytorch:local=16" (steps); only the model "cnn".
        local: keywords of `hvd_ext.LocalSteps`; empty for none. Codecs are then those of outer steps.
        epochs: a factor for those of the model: a setting with faster steps may take more of them and still be sooner.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: str = "auto"
    topk: dict[str, Any] = Field(default_factory=dict)
    codec: str = ""
    warmup: float = Field(default=0.0, ge=0, le=1)
    warmup_densities: list[float] = Field(default_factory=list)
    until: float = Field(default=0.0, ge=0, lt=1)
    peer: str = Field(default="", pattern=r"^(|pytorch(:fp16|:powersgd=[1-9]\d*|:local=[1-9]\d*)?)$")
    local: dict[str, Any] = Field(default_factory=dict)
    epochs: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    def compression(self) -> Any:
        """Give the compression that `codec` names; None for none."""
        texts = {"compression": self.codec} if self.codec else {}
        try:
            return GradientOptions.from_texts("setting", texts).compression
        except InvalidError as error:
            raise ValueError(f"codec {self.codec!r}: {error}") from error

    @model_validator(mode="after")
    def _compressed(self) -> Setting:
        for name, share in (("warmup", self.warmup), ("until", self.until)):
            if share and not self.topk and not ((self.codec or self.local) and name == "warmup"):
                raise ValueError(f"a {'setting with a codec' if self.codec else 'dense setting'} has no {name}")
            if name in self.topk:
                raise ValueError(f"say {name} beside topk, as a share of the steps")
        if "start" in self.local:
            raise ValueError("say warmup beside local, as a share of the steps, for start")
        if self.codec and (self.topk or self.warmup_densities):
            raise ValueError(f"codec {self.codec!r}: must be without topk and warmup_densities")
        self.compression()
        if self.until and self.warmup >= self.until:
            raise ValueError("the warmup must end before until")
        if self.peer and (self.topk or self.codec or self.local):
            raise ValueError(f"peer {self.peer!r} takes no topk, codec and local")
        return self


class Study(BaseModel):
    """A study.

    Args:
        hosts: ranks on each host.
        rate: of each host's link where times are measured.
        seeds: of weights and of the order of examples; each is a run.
        steps: how many are timed at least; their median is the time of a step.
        models: by name, "cnn", "vgg", "transformer".
        settings: by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: tuple[int, ...] = Field(min_length=1)
    rate: str = "100mbit"
    seeds: tuple[int, ...] = Field(min_length=1)
    steps: int = Field(default=12, ge=3)
    models: dict[str, Recipe] = Field(min_length=1)
    settings: dict[str, Setting] = Field(min_length=1)

    @model_validator(mode="after")
    def _known(self) -> Study:
        for model in self.models:
            if model not in DATA_OF:
                raise ValueError(f"model {model!r}: there is none of this name; there are {', '.join(DATA_OF)}")
        if set(self.models) != {"cnn"} and any(setting.peer for setting in self.settings.values()):
            raise ValueError("settings with a peer: it trains the model cnn only")
        for name in self.settings:
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"setting {name!r}: must be of letters, digits, - and _, because files are named so")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError("seeds: each must be there once, and at least 0")
        return self


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Args:
        model: its name.
        setting: its name.
        seed: None for a run that measures the time of a step and learns nothing.
    """

    model: str
    setting: str
    seed: int | None

    @property
    def name(self) -> str:
        """The run's name, and its file's."""
        return f"{self.model}_{self.setting}_{'time' if self.seed is None else f'seed{self.seed}'}"


def read(path: Path) -> Study:
    """Read a plan; refuse a file that cannot be read or breaks a rule."""
    try:
        return Study.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidError(f"study ({path}): it cannot be read: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"]) or "the top level"
        raise InvalidError(f"study ({path}): {place}: {fault['msg']}") from error


def runs_of(study: Study, models: Sequence[str] = (), settings: Sequence[str] = ()) -> list[Run]:
    """List the runs of a study, or of some models and settings of it; refuse a name that the study does not have.

    The times of steps come first, then the runs that learn: first all settings with the first seed, because they tell
    most.
    """
    for what, names, known in (("model", models, study.models), ("setting", settings, study.settings)):
        for name in names:
            if name not in known:
                raise InvalidError(f"{what} ({name!r}): the study has none of this name; it has {', '.join(known)}")
    return [
        Run(model, setting, seed)
        for seed in (None, *study.seeds)
        for model in study.models
        for setting in study.settings
        if (not models or model in models) and (not settings or setting in settings)
    ]


def facts(study: Study, run: Run) -> dict[str, Any]:
    """Give all that decides what a run finds, as JSON; a finished run counts if its facts are equal."""
    how = study.settings[run.setting].model_dump()
    recipe = study.models[run.model].model_dump()
    # as in the files of runs that were made before there was one
    for name in ("until", "local", "peer"):
        if not how[name]:
            del how[name]
    if recipe["optimizer"] == "sgd":
        del recipe["optimizer"], recipe["lars"]
    about = {
        "model": run.model,
        "setting": run.setting,
        "seed": run.seed,
        "hosts": list(study.hosts),
        "recipe": recipe,
        "how": how,
    }
    return about if run.seed is not None else {**about, "rate": study.rate, "steps": study.steps}


def finished(folder: Path, study: Study, run: Run) -> dict[str, Any] | None:
    """Give the content of a run's file in a folder; None if there is no file, or one of other facts."""
    try:
        found = json.loads((folder / f"{run.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = isinstance(found, dict) and found.get("benchmark") == BENCHMARK and found.get("facts") == facts(study, run)
    return found if same else None


def missing(folder: Path, study: Study, runs: Iterable[Run]) -> list[Run]:
    """Give the runs that are still to be done, in their order."""
    return [run for run in runs if finished(folder, study, run) is None]
