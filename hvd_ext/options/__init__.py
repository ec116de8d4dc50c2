"""The options of a job: one frozen value, filled from arguments or from environment variables."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from hvd_ext.compression.codec import is_whole
from hvd_ext.errors import InvalidError
from hvd_ext.options import environment
from hvd_ext.simulation.modes import Mode

if TYPE_CHECKING:
    from hvd_ext.topology.tree import Tree

MIB = 1 << 20

# Editors offer these names; a test compares them with the existing schedules.
Algorithm = Literal[
    "auto",
    "binary_tree",
    "blueconnect",
    "flexreduce",
    "halving_doubling",
    "recursive_doubling",
    "ring",
    "torus2d",
    "tree",
    "two_level",
]
SparseAlgorithm = Literal["gtopk", "hitopk", "naive_allgather"]
# Whose gradients a step waits for (docs/stragglers.md); "auto" is a quorum that the job chooses.
Sync = Literal[Mode, "auto"]
SYNCS: tuple[str, ...] = get_args(Sync)


class ReduceOp(enum.IntEnum):
    """How the values of all ranks are combined; the engine uses the same numbers (tf_ops/kernels/reduce.h)."""

    Sum = 0
    Average = 1
    Min = 2
    Max = 3
    Product = 4


class SetOfRanks:
    """Base class of `hvd_ext.ProcessSet`, which this room cannot import; it tells our sets from Horovod's."""


class Compression(enum.Enum):
    """The dtype in which float32 values are sent; each member's value is its name, "" for float32 itself.

    Sums are taken in float32, and values are rounded to nearest before they are sent. float16 has a significand of 11
    bits and a maximum of 65504; a rank's own value beyond that becomes infinite, and a sum does not, because it is sent
    divided by a power of two from the number of its terms on. bfloat16 has a significand of 8 bits and float32's range.
    """

    none = ""
    fp16 = "float16"
    bf16 = "bfloat16"

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Round a tensor to this dtype, for programs that call Horovod's compressors themselves.

        Args:
            tensor: a tensor; a tensor of integers is returned unchanged.

        Returns:
            The tensor in this dtype, and its former dtype for `decompress` (None for `Compression.none`).
        """
        if self is Compression.none:
            return tensor, None
        return _as(tensor, self.value, tensor.dtype), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Cast a tensor back to the dtype that it had before `compress`.

        Args:
            tensor: the first result of `compress`, possibly reduced.
            ctx: the second result of `compress`.

        Returns:
            The tensor in its former dtype.
        """
        return tensor if ctx is None else _as(tensor, ctx, ctx)


Sum = ReduceOp.Sum
Average = ReduceOp.Average
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

TRANSPORTS = ("auto", "tcp", "mpi")
PROBES = ("auto", "refresh", "off")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a job, equal on all ranks except for cache, the two stall times, shared_memory, interfaces,
    tcp_congestion and quiet.

    Args:
        algorithm: "auto", or the name of an allreduce algorithm ("ring", "two_level", "flexreduce").
        bucket_nbytes: the approximate size in bytes of the buckets in which gradients are sent together.
        buckets: how the gradients of a step are divided into buckets: "auto" for the way with the shortest predicted
            step; a bucketer's name ("by_size", "wfbp", "single", "mgwfbp", "optimal"); or the path of a layout's file,
            which is used as it is.
        replan_every: the ranks plan their buckets again, from measured times, after 20 and 200 update steps, after
            every so many, and 20 steps after a switch; 0 for never.
        op: `Average` or `Sum`.
        compression: how float32 gradients are sent: `Compression.none`, `.fp16` or `.bf16`.
        topology: None to detect the hosts, the path of a YAML file, or a `Tree`.
        probe: without a topology, "auto" measures the links when a job of several ranks starts and something is left to
            choose, unless a job on the same hosts has done so before and they are not much faster now; "refresh"
            measures in any case; "off" assumes the links.
        cache: the folder where rank 0 keeps what was measured; empty for `hvd_ext` in the user's cache folder.
        stall_warn_s: seconds after which a rank that stays away is named on stderr; 0 for never.
        stall_fatal_s: seconds after which waiting for a rank becomes a `CommunicationError`; 0 for never.
        window: how many segments of one bucket or call may be in flight at once.
        shared_memory: whether ranks of one host read each other's memory; if False, they exchange messages through MPI.
        transport: what carries data between hosts: "tcp", connections of our own; "mpi"; or "auto", whichever is faster
            at the start of the job.
        interfaces: the network interfaces that "tcp" uses, by name or as networks ("eth0,10.0.0.0/24"); empty for those
            that Open MPI is told to use (btl_tcp_if_include), else for all that are up.
        tcp_congestion: the congestion control of the connections of "tcp", as Linux names it; empty for the system's,
            and so it is where the system does not have it. "reno" divides a link evenly among the ranks of a host;
            "cubic" and "bbr" suit long delays.
        gpu_buckets: whether ranks keep buckets in the memory of their GPUs (docs/gpu.md). Not yet used on a GPU.
        trace: the folder for a trace of every bucket, on all ranks or on none; None for no trace.
        quiet: rank 0 does not print what runs (version, ranks, hosts, algorithm, buckets). Warnings stay.
        explain: rank 0 prints a table of the buckets, and of the reasons for them, whenever they were planned.

    Raises:
        InvalidError: a value breaks the rule named in the message.
    """

    algorithm: Algorithm = "auto"
    bucket_nbytes: int = 8 * MIB
    buckets: str | Path = "auto"
    replan_every: int = 2000
    op: ReduceOp = Average
    compression: Compression = Compression.none
    topology: str | Path | Tree | None = None
    probe: str = "auto"
    cache: str = ""
    stall_warn_s: float = 60.0
    stall_fatal_s: float = 0.0
    window: int = 4
    shared_memory: bool = True
    transport: str = "auto"
    interfaces: str = ""
    tcp_congestion: str = "reno"
    gpu_buckets: bool = False
    trace: str | Path | None = None
    quiet: bool = False
    explain: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, str) or not self.algorithm:
            raise InvalidError(f"algorithm ({self.algorithm!r}): must be 'auto' or the name of an algorithm")
        if not is_whole(self.bucket_nbytes) or self.bucket_nbytes < 1:
            raise InvalidError(f"bucket_nbytes ({self.bucket_nbytes!r}): must be a whole number of bytes, at least 1")
        object.__setattr__(self, "buckets", _checked_buckets(self.buckets))
        if not is_whole(self.replan_every) or self.replan_every < 0:
            raise InvalidError(f"replan_every ({self.replan_every!r}): must be a whole number of steps, 0 for never")
        object.__setattr__(self, "op", check_op(self.op))
        object.__setattr__(self, "compression", check_compression(self.compression))
        for field in ("stall_warn_s", "stall_fatal_s"):
            seconds = getattr(self, field)
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
                raise InvalidError(f"{field} ({seconds!r}): must be a number of seconds, 0 for never")
        if not is_whole(self.window) or not 1 <= self.window <= 1024:
            raise InvalidError(f"window ({self.window!r}): must be a whole number from 1 to 1024")
        for field, known in (("probe", PROBES), ("transport", TRANSPORTS)):
            if getattr(self, field) not in known:
                raise InvalidError(f"{field} ({getattr(self, field)!r}): must be one of {', '.join(known)}")
        if not isinstance(self.interfaces, str) or " " in self.interfaces:
            raise InvalidError(
                f"interfaces ({self.interfaces!r}): must be names of network interfaces, or networks such as "
                "10.0.0.0/24, with commas between them"
            )
        if not isinstance(self.tcp_congestion, str) or not re.fullmatch(r"[a-z0-9_]{0,15}", self.tcp_congestion):
            raise InvalidError(f"tcp_congestion ({self.tcp_congestion!r}): must be a name such as 'cubic', or empty")
        for field in ("shared_memory", "gpu_buckets", "quiet", "explain"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidError(f"{field} ({getattr(self, field)!r}): must be True or False")

    def replace(self, **changes: Any) -> Options:
        """Return a copy with some fields changed.

        Args:
            **changes: fields of this class; None leaves a field unchanged.

        Returns:
            The changed copy.

        Raises:
            InvalidError: a field is unknown, or a value breaks its rule.
        """
        known = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise InvalidError(f"option {name!r}: must be one of {', '.join(sorted(known))}")
        return dataclasses.replace(self, **{name: value for name, value in changes.items() if value is not None})


@dataclasses.dataclass(frozen=True)
class Setting:
    """One environment variable: the field of `Options` that it fills, and its meaning."""

    field: str
    meaning: str

    @property
    def name(self) -> str:
        """The variable's name."""
        return f"HVD_EXT_{self.field.upper()}"

    @property
    def type(self) -> type:
        """The type of its value: of the field's default, or str."""
        default = getattr(Options, self.field)
        return str if default is None else type(default)

    @property
    def default(self) -> str:
        """The text that says the same as no variable."""
        default = getattr(Options, self.field)
        return default or "" if self.type is str else f"{default:.0f}"


SETTINGS: tuple[Setting, ...] = (
    Setting("algorithm", "allreduce algorithm: auto, or a name that `plan` lists"),
    Setting("bucket_nbytes", "approximate size in bytes of the buckets of gradients"),
    Setting(
        "buckets",
        "division of gradients into buckets: auto, by_size, wfbp, single, mgwfbp, optimal, or a layout's file",
    ),
    Setting(
        "replan_every",
        "steps after which buckets are planned again from measured times, besides steps 20 and 200; 0: never",
    ),
    Setting("topology", "YAML file of the topology; empty: the hosts are detected"),
    Setting(
        "probe",
        "without a topology: auto measures the links of a set of hosts, and again if they are much faster; refresh: in "
        "any case; off: never",
    ),
    Setting("cache", "folder where rank 0 keeps the measured links; empty: hvd_ext in the user's cache folder"),
    Setting("stall_warn_s", "seconds after which a missing rank is named; 0: never"),
    Setting("stall_fatal_s", "seconds after which waiting for a rank fails; 0: never"),
    Setting("shared_memory", "1: ranks of a host read each other's memory; 0: they use MPI"),
    Setting("transport", "what carries data between hosts: tcp, connections of our own; mpi; auto: the faster one"),
    Setting(
        "interfaces",
        "network interfaces that tcp uses, as in eth0,10.0.0.0/24; empty: Open MPI's btl_tcp_if_include, or all",
    ),
    Setting("tcp_congestion", "the congestion control of tcp, such as cubic; empty: the system's; else reno"),
    Setting("gpu_buckets", "1: buckets lie in the memory of the ranks' GPUs; not yet used on a GPU"),
    Setting("trace", "folder for a trace of every bucket, which the command `trace` reads; empty: no trace"),
    Setting("quiet", "1: rank 0 does not print what runs (ranks, hosts, algorithm, buckets)"),
    Setting("explain", "1: rank 0 prints a table of the buckets whenever they are planned"),
)


# Horovod's variables: those that are heeded fill the same fields, unless one of our variables does.
HOROVOD_VARIABLES = environment.VARIABLES


def from_environment(environ: Mapping[str, str] | None = None) -> Options:
    """Read the options from our environment variables and from those of Horovod's that have a meaning here.

    If variables of both kinds set one option, ours takes precedence.

    Args:
        environ: the environment; None for the process's own. A variable that is unset or empty leaves the default.

    Returns:
        The options.

    Raises:
        InvalidError: a value is not of the setting's type or breaks its rule; the message names the variable.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for variable in HOROVOD_VARIABLES:
        text = environ.get(variable.name, "")
        if text and variable.read is not None:
            try:
                value = variable.read(text)
            except ValueError:
                rule = f"must be {variable.rule}"
                raise InvalidError(f"environment variable {variable.name} ({text!r}): {rule}") from None
            if value is not None:
                values[variable.field] = value
    for setting in SETTINGS:
        text = environ.get(setting.name, "")
        if text:
            values[setting.field] = _parsed(setting, text)
    return Options(**values)


def unread(given: Options, environ: Mapping[str, str]) -> list[str]:
    """List the variables whose options `Options` given to `init` leave at their defaults, and so say otherwise.

    Args:
        given: the options.
        environ: the environment.
    """
    found = []
    for name in (*(one.name for one in HOROVOD_VARIABLES), *(one.name for one in SETTINGS)):
        try:
            asked = from_environment({name: environ.get(name, "")})
        except InvalidError:
            continue
        changed = [one.name for one in dataclasses.fields(Options) if getattr(asked, one.name) != one.default]
        if any(getattr(given, one) == getattr(Options(), one) for one in changed):
            found.append(name)
    return found


def check_op(op: object) -> ReduceOp:
    """Check a reduction of gradients or of rows that a user gave.

    Args:
        op: `hvd_ext.Average` or `hvd_ext.Sum`.

    Returns:
        The same value, typed.

    Raises:
        InvalidError: `op` is anything else. Horovod's own constants are refused too: they are plain numbers with other
            meanings.
    """
    if op in (Average, Sum) and isinstance(op, ReduceOp):
        return op
    instead = "the others are for hvd_ext.allreduce" if isinstance(op, ReduceOp) else "pass one of these constants"
    raise InvalidError(f"op ({op!r}): must be hvd_ext.Average or hvd_ext.Sum; {getattr(op, 'instead', instead)}")


def check_compression(compression: object) -> Compression:
    """Check a compression that a user gave.

    Args:
        compression: a member of `hvd_ext.Compression`, Horovod's class for the same, or None for none.

    Returns:
        The member of `hvd_ext.Compression`.

    Raises:
        InvalidError: `compression` is anything else.
    """
    if isinstance(compression, Compression):
        return compression
    if type(compression).__name__ == "TopK":
        raise InvalidError(
            f"compression ({compression!r}): TopK keeps residuals for each optimizer; give it to "
            "hvd_ext.DistributedOptimizer"
        )
    known = {"NoneCompressor": Compression.none, "FP16Compressor": Compression.fp16}
    name = "NoneCompressor" if compression is None else getattr(compression, "__name__", "")
    if name not in known:
        names = ", ".join(f"Compression.{member.name}" for member in Compression)
        raise InvalidError(f"compression ({compression!r}): must be one of {names}")
    return known[name]


def is_file(buckets: str | Path) -> bool:
    """Whether a value of `Options.buckets` is the path of a layout's file."""
    from hvd_ext.planning import buckets as bucketers

    return str(buckets) != "auto" and str(buckets) not in bucketers.names()


def _checked_buckets(buckets: object) -> str:
    from hvd_ext.planning import buckets as bucketers

    if isinstance(buckets, (str, Path)) and str(buckets) and (not is_file(buckets) or Path(buckets).is_file()):
        return str(buckets)
    raise InvalidError(
        f"buckets ({buckets!r}): must be 'auto', one of {', '.join(bucketers.names())}, or the path of a layout's file"
    )


def _as(tensor: Any, dtype: Any, own: Any) -> Any:
    """Cast a tensor to `dtype` if `own` is a floating-point dtype."""
    import tensorflow as tf

    return tf.cast(tensor, dtype) if tf.as_dtype(own).is_floating else tensor


def _parsed(setting: Setting, text: str) -> Any:
    try:
        value = {"0": False, "1": True}[text] if setting.type is bool else setting.type(text)
        alone: dict[str, Any] = {setting.field: value}
        Options(**alone)
    except (ValueError, KeyError) as error:
        kind = {int: "a whole number", float: "a number", bool: "0 or 1"}.get(setting.type, "text")
        rule = str(error) if isinstance(error, InvalidError) else f"must be {kind}"
        raise InvalidError(f"environment variable {setting.name} ({text!r}): {rule}") from None
    return value
