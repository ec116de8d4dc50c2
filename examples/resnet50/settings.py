"""The settings of a training: a YAML file, checked; a command line changes it, and it stays beside the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from images.manifest import write_whole
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PRESETS = Path(__file__).resolve().parent / "presets"
REPORTED = {"target", "entry"}  # settings that a training which goes on may change
Points = tuple[tuple[float, float], ...]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SettingsError(ValueError):
    """Settings that cannot be read, break a rule, or are not those of the training that goes on."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Network(_Part):
    """A residual network of bottleneck blocks (He et al. 2016), v1.5.

    Args:
        classes: the number of its outputs.
        blocks: of each stage.
        widths: the filters of the blocks' inner convolutions, for each stage; outputs have four times as many.
        stem: "imagenet" begins with a convolution of 7 x 7 and a pooling, which divide the side by 4; "small" with one
            of 3 x 3, which divides it by 2.
    """

    classes: int = Field(default=1000, ge=2)
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    stem: Literal["imagenet", "small"] = "imagenet"

    @model_validator(mode="after")
    def _stages(self) -> Network:
        if not self.blocks or len(self.blocks) != len(self.widths) or min(*self.blocks, *self.widths) < 1:
            raise ValueError("blocks and widths: must be as many, at least one, and each at least 1")
        return self


class Phase(_Part):
    """Epochs that are trained alike.

    Args:
        epochs: how many.
        pixels: the side of the pictures that the network sees.
        batch: pictures of a step, of all ranks together.
        smallest_crop: the least share of a picture's area that a random crop has.
        compression: "topk" or "dense"; "auto" leaves it to the price.
        kept: the side of the decoded pictures that the cache keeps; 0 for a quarter more than `pixels`.
        rectangular: validate with the pictures' own aspect ratios.
    """

    epochs: int = Field(ge=1)
    pixels: int = Field(ge=8)
    batch: int = Field(ge=1)
    smallest_crop: float = Field(default=0.08, gt=0, le=1)
    compression: Literal["topk", "dense", "auto"] = "dense"
    kept: int = Field(default=0, ge=0)
    rectangular: bool = False

    @property
    def side(self) -> int:
        """The side of the kept pictures."""
        return self.kept or 8 * -(-5 * self.pixels // 32)


class Optimizer(_Part):
    """LARS, or SGD with momentum.

    Args:
        name: "lars" or "sgd".
        rate: (epoch, learning rate) points, joined by straight lines.
        momentum: (epoch, momentum) points.
        nesterov: whether the momentum is Nesterov's.
        weight_decay: of all variables but biases and those of normalisation.
        trust_coefficient: of LARS.
        min_trust: the least trust ratio of LARS.
        max_trust: the greatest.
        parallel: whether the ranks divide the norms among themselves.
    """

    name: Literal["lars", "sgd"] = "lars"
    rate: Points
    momentum: Points = ((0, 0.9),)
    nesterov: bool = True
    weight_decay: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    trust_coefficient: float = Field(default=8e-4, gt=0, allow_inf_nan=False)
    min_trust: float = Field(default=1e-5, ge=0)
    max_trust: float = Field(default=1.0, gt=0)
    parallel: Literal["auto"] | bool = "auto"

    @model_validator(mode="after")
    def _points(self) -> Optimizer:
        for name, points in (("rate", self.rate), ("momentum", self.momentum)):
            epochs = [epoch for epoch, _ in points]
            if not points or epochs != sorted(set(epochs)) or epochs[0] < 0:
                raise ValueError(f"{name}: must have points with rising epochs from 0 on")
            if min(value for _, value in points) < 0:
                raise ValueError(f"{name}: must be at least 0")
        if max(value for _, value in self.momentum) >= 1:
            raise ValueError("momentum: must be below 1")
        if self.name == "sgd" and len({value for _, value in self.momentum}) > 1:
            raise ValueError("momentum: that of sgd cannot change; give one point, or take lars")
        return self


class Data(_Part):
    """The pictures.

    Args:
        source: a folder with TFRecord files (train-*, validation-*) or with class folders (train/CLASS/FILE and
            validation, val or test), as make_images.py makes them; "synthetic" is noise in memory, which measures
            training without input.
        synthetic: the number of pictures of an epoch of noise.
        first_label: the label of the first class in TFRecord files.
        memory: of a host for decoded pictures, as `hvd_ext.DataCache` takes it; null for none.
        disk: a folder on a disk of each host where decoded pictures stay for later jobs; null for none.
    """

    source: str = ""
    synthetic: int = Field(default=1_281_167, ge=1)
    first_label: int = 1
    memory: str | int | None = "50%"
    disk: str | None = None


class Entry(_Part):
    """What an entry to DAWNBench says beside its figures; it changes nothing about the training.

    Args:
        author: who enters it.
        author_email: where the author can be reached.
        framework: empty for the versions of hvd_ext and TensorFlow.
        code_url: where the code is; empty leaves it out.
        model: empty for a name that follows from `network`.
        hardware: with the cloud's provider and instance type; empty for the hosts, ranks and devices that are there.
        hardware_tag: short, for the names of the files.
        cost_per_hour: of all hosts together, in USD; null leaves it out.
        log_url: where the log is; empty leaves it out.
        used_blacklist: whether the pictures of ImageNet's blacklist were taken out of the validation pictures.
    """

    author: str = ""
    author_email: str = ""
    framework: str = ""
    code_url: str = ""
    model: str = ""
    hardware: str = ""
    hardware_tag: str = ""
    cost_per_hour: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    log_url: str = ""
    used_blacklist: bool = False


class Price(_Part):
    """What the predicted times are made of, for one device.

    Args:
        rates: pictures for which one device makes gradients in a second, by the side of the pictures.
        update: the time of an update of the weights, seconds.
        ranks_per_core: how many ranks share a processor core; 1 where each has a device or cores of its own.
        input_rate: pictures that one device gets in a second; null where input never limits.
        smallest_gain: with `compression: auto` a phase is sparse if its step is predicted to be shorter by this share.
    """

    rates: dict[int, Positive] = Field(default_factory=dict)
    update: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    ranks_per_core: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    input_rate: Positive | None = None
    smallest_gain: float = Field(default=0.1, ge=0, lt=1)


class Settings(_Part):
    """All that decides what a training does.

    Args:
        network: what is trained.
        phases: in their order.
        optimizer: how.
        smoothing: the share of a label that the other classes get.
        mixed_precision: whether layers compute in float16.
        algorithm: of dense gradients, as `hvd_ext.init` takes it.
        sparse_algorithm: of sparse ones, as `hvd_ext.DistributedOptimizer` takes it.
        topk: keywords of `hvd_ext.TopK` in phases with compression "topk", which come first; `warmup` is a number of
            epochs, in which a quarter of the gradients is sent.
        data: the pictures.
        seed: of weights, order and crops.
        deterministic: whether TensorFlow's operations give the same bits in each run, which may take longer.
        price: how times are predicted.
        target: the top-5 share whose time is reported; null for none.
        entry: to DAWNBench.
    """

    network: Network = Network()
    phases: tuple[Phase, ...] = Field(min_length=1)
    optimizer: Optimizer
    smoothing: Share = 0.1
    mixed_precision: bool = True
    algorithm: str = "auto"
    sparse_algorithm: str = "hitopk"
    topk: dict[str, Any] = Field(default_factory=lambda: {"density": 0.01})
    data: Data = Data()
    seed: int = Field(default=1, ge=0)
    deterministic: bool = False
    price: Price = Price()
    target: float | None = Field(default=None, gt=0, le=1)
    entry: Entry = Entry()

    @model_validator(mode="after")
    def _whole(self) -> Settings:
        kinds = [phase.compression for phase in self.phases]
        if "topk" in kinds[1:] and any(kind == "dense" for kind in kinds[: len(kinds) - kinds[::-1].index("topk")]):
            raise ValueError("phases: those with topk must come before those that are dense")
        if "until" in self.topk:
            raise ValueError("topk: has no until here: it follows from the phases")
        for phase in self.phases:
            if phase.kept and phase.kept < phase.pixels:
                raise ValueError(f"phases: kept ({phase.kept}) must be at least pixels ({phase.pixels})")
        return self

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The epoch in which each phase begins, and the number of all epochs."""
        sums = [0]
        for phase in self.phases:
            sums.append(sums[-1] + phase.epochs)
        return tuple(sums)

    @property
    def epochs(self) -> int:
        """The number of all epochs."""
        return self.begins[-1]

    def phase_of(self, epoch: int) -> int:
        """Give the number of an epoch's phase; of the last one for those that come after it."""
        return next((number for number, end in enumerate(self.begins[1:]) if epoch < end), len(self.phases) - 1)


@dataclass(frozen=True)
class Change:
    """`KEY=VALUE` of a command line: the path of a value, with dots, and the value in YAML."""

    path: tuple[str, ...]
    value: Any

    @classmethod
    def read(cls, text: str) -> Change:
        """Read one; `phases.pixels=64` changes all phases, `phases.0.pixels=64` the first."""
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise SettingsError(f"--set ({text}): must be KEY=VALUE, such as phases.0.epochs=3")
        try:
            return cls(tuple(key.split(".")), yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise SettingsError(f"--set ({text}): the value must be YAML: {' '.join(str(error).split())}") from error

    def apply(self, to: Any, path: Sequence[str] | None = None) -> Any:
        """Give values with this one changed."""
        head, *rest = self.path if path is None else path
        if isinstance(to, list):
            if head.isdecimal() and int(head) < len(to):
                inner = self.apply(to[int(head)], rest) if rest else self.value
                return [*to[: int(head)], inner, *to[int(head) + 1 :]]
            if head.isdecimal() or not all(isinstance(one, dict) for one in to):
                raise SettingsError(f"--set ({'.'.join(self.path)}): there are {len(to)} of these, numbered from 0")
            return [self.apply(one, [head, *rest]) for one in to]
        if not isinstance(to, dict):
            raise SettingsError(f"--set ({'.'.join(self.path)}): there is nothing below a value")
        return {**to, head: self.apply(to.get(head, {}), rest) if rest else self.value}


def presets() -> list[str]:
    """List the names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read(name: str, changes: Sequence[str] = ()) -> Settings:
    """Read settings.

    Args:
        name: of a preset, or the path of a YAML file.
        changes: `KEY=VALUE`, one after the other.

    Raises:
        SettingsError: there is no such preset, the file cannot be read, or a value breaks its rule.
    """
    path = PRESETS / f"{name}.yaml" if name in presets() else Path(name)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        known = f"; there are the presets {', '.join(presets())}" if not path.exists() else ""
        raise SettingsError(f"settings ({name}): cannot be read: {' '.join(str(error).split())}{known}") from error
    for change in changes:
        values = Change.read(change).apply(values)
    return checked(values, name)


def checked(values: Any, name: str) -> Settings:
    """Make settings of plain values; refuse those that break a rule, in the words of the first fault."""
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        message = str(fault["msg"]).removeprefix("Value error, ")
        raise SettingsError(f"settings ({name}): {place + ': ' if place else ''}{message}") from error


def written(settings: Settings) -> str:
    """Give the settings as YAML, with every value."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def keep(settings: Settings, folder: Path) -> None:
    """Write the settings beside the results; refuse a folder of a training with others, but for those of `REPORTED`.

    Raises:
        SettingsError: the training in the folder has another value; it names the key.
    """
    path = folder / "settings.yaml"
    if path.exists():
        before = read(str(path))
        old_values, new_values = (one.model_dump(mode="json", exclude=REPORTED) for one in (before, settings))
        for key, (old, new) in _differences(old_values, new_values).items():
            raise SettingsError(
                f"{key} ({new}): the training in {folder} has {old}; take another folder, or go on with {key}={old}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, written(settings).encode())


def _differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in [*old, *(one for one in new if one not in old)]:
            found |= _differences(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        found = {}
        for place, pair in enumerate(zip(old, new, strict=True)):
            found |= _differences(*pair, f"{key}.{place}")
        return found
    return {} if old == new else {key: (old, new)}
