"""The TensorFlow ops of tf_ops/ops, which are loaded at their first use; their errors, and the names of calls.

Those that communicate run on the CPU: tensors of a GPU go through host memory, but for channels whose tensors lie on
the GPU (`Channel.device`). The exact selection, norms, and the updates of LARS and LAMB run on a GPU too, where the
library of its kernels was built. XLA compiles none of them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvd_ext import errors
from hvd_ext.engine import libraries, native, versions
from hvd_ext.errors import InvalidError, NativeLibraryError
from hvd_ext.job import runtime
from hvd_ext.options import compatibility

# These ops are ordered by their names or their channel. Without this list TensorFlow would run them one after another.
_INDEPENDENT = (
    "HvdExt>BeginStep",
    "HvdExt>BeginTopKStep",
    "HvdExt>EndStep",
    "HvdExt>Submit",
    "HvdExt>Collect",
    "HvdExt>ReduceStep",
    "HvdExt>Allreduce",
    "HvdExt>Allgather",
    "HvdExt>Broadcast",
    "HvdExt>Reducescatter",
    "HvdExt>Alltoall",
)
HOST = "CPU:0"
# These have kernels for GPUs too.
_ANYWHERE = (
    "hvd_ext_together",
    "hvd_ext_submit",
    "hvd_ext_collect",
    "hvd_ext_reduce_step",
    "hvd_ext_top_k",
    "hvd_ext_squared_norms",
    "hvd_ext_block_squares",
    "hvd_ext_apply_lars",
    "hvd_ext_lamb_updates",
    "hvd_ext_apply_updates",
)
_DECORATION = re.compile(r"^\{\{[^}]*\}\}\s*|\s*\[Op:HvdExt>\w+\].*$", re.DOTALL)


Function = TypeVar("Function", bound=Callable[..., Any])


def plain(function: Function) -> Function:
    """Keep AutoGraph from rewriting a function that a user calls while tracing, and everything that it calls.

    Unlike TensorFlow's decorator this one keeps the function's signature for type checkers.
    """
    return tf.autograph.experimental.do_not_convert(function)


class _OnHost:
    """The functions of a library of ops, which run on the host, but those named `anywhere` on the caller's device."""

    def __init__(self, module: Any, anywhere: Sequence[str]) -> None:
        self._module, self._anywhere = module, anywhere

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self._module, name)
        if name in self._anywhere:
            return plain

        @functools.wraps(plain)
        def on_host(*args: Any, **kwargs: Any) -> Any:
            with tf.device(HOST):
                return plain(*args, **kwargs)

        setattr(self, name, on_host)
        return on_host


@libraries.once
def library() -> Any:
    """Load the ops; those that communicate run on the CPU. `NativeLibraryError` if they do not fit this TensorFlow."""
    versions.check("tensorflow", tf.__version__)
    native.load()
    if not native.OPS.exists():
        raise NativeLibraryError(
            f"the TensorFlow ops ({native.OPS}) are missing: they were not built; {native.REBUILD_HINT}"
        )
    built_for = libraries.read_record().get("tensorflow", "")
    if built_for and built_for != tf.__version__:
        raise NativeLibraryError(
            f"the TensorFlow ops ({native.OPS}) were built for TensorFlow {built_for}, and this is {tf.__version__}; "
            f"{native.REBUILD_HINT}"
        )
    try:
        module = tf.load_op_library(str(native.OPS))
    except (tf.errors.OpError, OSError) as error:
        raise NativeLibraryError(
            f"the TensorFlow ops ({native.OPS}) do not load into TensorFlow {tf.__version__}: {error}; "
            f"{native.REBUILD_HINT}"
        ) from None
    _keep_independent()
    _register_gradients()
    return _OnHost(module, _ANYWHERE)


def refuse_xla(label: str) -> None:
    """Raise `InvalidError` if XLA will compile the graph under construction, or one around it; eager calls pass."""
    if not tf.executing_eagerly() and under_xla():
        raise InvalidError(f"{label}: {compatibility.XLA}")


def under_xla() -> bool:
    """Say whether XLA will compile the graph under construction, or a graph around it."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        if context is not None and context.IsXLAContext():
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def begin_step(channel: int) -> tf.Operation | None:
    """Begin a step of a channel; see the op's text in tf_ops/ops/gradient.cc."""
    return library().hvd_ext_begin_step(channel=channel)


def begin_topk_step(density: tf.Tensor, channel: int, momentum: Sequence[tf.Tensor] = ()) -> tf.Operation | None:
    """Begin a step of a channel with top-k gradients; see the op's text in tf_ops/ops/gradient.cc."""
    return library().hvd_ext_begin_top_k_step(density, list(momentum), channel=channel)


def end_step(ok: tf.Tensor, channel: int) -> tf.Operation | None:
    """End a step of a channel with top-k gradients; see the op's text in tf_ops/ops/gradient.cc."""
    return library().hvd_ext_end_step(ok, channel=channel)


def submit(gradients: Sequence[tf.Tensor], channel: int, tensors: Sequence[int], device: str = HOST) -> tf.Tensor:
    """Hand gradients over to the engine; see the op's text in tf_ops/ops/gradient.cc."""
    with tf.device(device):
        return library().hvd_ext_submit(gradients, channel=channel, tensors=tensors)


def collect(
    tickets: Sequence[tf.Tensor],
    dtype: str,
    shapes: Sequence[Sequence[int]],
    channel: int,
    tensors: Sequence[int],
    device: str = HOST,
) -> list[tf.Tensor]:
    """Get reduced gradients back from the engine; see the op's text in tf_ops/ops/gradient.cc."""
    count, kind = len(tensors), tf.as_dtype(dtype)
    of_channel = {"channel": channel, "tensors": tensors}
    with tf.device(device):
        return list(library().hvd_ext_collect(tickets, N=count, T=kind, shapes=shapes, **of_channel))


def reduce_step(
    gradients: Sequence[tf.Tensor], channel: int, tensors: Sequence[int], device: str = HOST
) -> list[tf.Tensor]:
    """Reduce gradients in a step of their own; see the op's text in tf_ops/ops/gradient.cc."""
    with tf.device(device):
        return list(library().hvd_ext_reduce_step(gradients, channel=channel, tensors=tensors))


def together(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices], after: Sequence[tf.Operation] = ()
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Make gradients of a graph wait for each other; see the op's text in tf_ops/ops/gradient.cc.

    Returns:
        The same values, none of which is ready before all are. Eager tensors are ready, and are returned as they are.
        Slices keep the object that is their dense_shape, so that the graph knows their shape.
    """
    if not gradients or tf.executing_eagerly():
        return list(gradients)
    slices = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
    parts = [
        (gradient.values, gradient.indices) if sliced else (gradient,)
        for gradient, sliced in zip(gradients, slices, strict=True)
    ]
    tensors = [tensor for tensors in parts for tensor in tensors]
    # the outputs of one op are ready at once; a tensor from outside of the graph has no op
    if not after and len({id(getattr(tensor, "op", tensor)) for tensor in tensors}) == 1:
        return list(gradients)
    with tf.control_dependencies(after):
        ready = iter(library().hvd_ext_together(tensors))
    return [
        tf.IndexedSlices(next(ready), next(ready), gradient.dense_shape) if sliced else next(ready)
        for gradient, sliced in zip(gradients, slices, strict=True)
    ]


def allreduce(name: Any, tensor: tf.Tensor, op: int, wire: str, signature: Any = "", **attributes: Any) -> tf.Tensor:
    """Reduce over the ranks; see the op's text in tf_ops/ops/collective.cc."""
    return library().hvd_ext_allreduce(name, tensor, signature, reduce_op=op, wire=wire, **attributes)


def allgather(name: Any, tensor: tf.Tensor, signature: Any = "", **attributes: Any) -> tf.Tensor:
    """Join all ranks' tensors; see the op's text in tf_ops/ops/collective.cc."""
    return library().hvd_ext_allgather(name, tensor, signature, **attributes)


def alltoall(
    name: Any, tensor: tf.Tensor, splits: tf.Tensor, has_splits: bool, signature: Any = "", **attributes: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Give each rank rows of every rank; see the op's text in tf_ops/ops/collective.cc."""
    result, received = library().hvd_ext_alltoall(name, tensor, signature, splits, has_splits=has_splits, **attributes)
    return result, received


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Translate exceptions of our eager ops by `errors.TENSORFLOW_CODES`; a running graph raises TensorFlow's own."""
    try:
        yield
    except tf.errors.OpError as error:
        text = error.message or ""
        code = errors.TENSORFLOW_CODES.get(error.error_code)
        if code is None or "HvdExt>" not in text:
            raise
        message = _DECORATION.sub("", text)
        raised = error
    else:
        return
    try:
        errors.raise_for(code, message)
    except errors.HvdExtError as translation:
        raise translation from raised


def only_if(
    condition: Any, work: Callable[[], None], otherwise: Callable[[], None] = lambda: None
) -> tf.Operation | None:
    """Do something if a condition holds; eagerly, or in the graph that is being traced.

    Returns:
        In a graph the operation that does it.
    """
    if tf.executing_eagerly():
        (work if bool(condition) else otherwise)()
        return None

    def done(assign: Callable[[], None]) -> tf.Tensor:
        assign()
        return tf.constant(True)

    return tf.cond(condition, functools.partial(done, work), functools.partial(done, otherwise)).op


def in_order(exchange: Callable[[], tf.Operation | None]) -> tf.Operation | None:
    """Make an operation with a Python function that exchanges something with the other ranks.

    TensorFlow runs the Python functions of a graph in any order, and all ranks need one order.

    Args:
        exchange: makes the operation, in the graph that is being traced, or does its work eagerly and returns None.
    """
    last = memory_of_graph().setdefault("last exchange", [])
    with tf.control_dependencies(last):
        made = exchange()
    last[:] = [] if made is None else [made]
    return made


def memory_of_graph() -> dict[Any, Any]:
    """Return a dictionary that lives as long as the graph under construction; in eager mode, a new dictionary."""
    return {} if tf.executing_eagerly() else _memory(tf.compat.v1.get_default_graph())


def memory_of_outermost_graph() -> dict[Any, Any]:
    """Return a dictionary that lives as long as the outermost function under construction; in eager mode, a new one."""
    return {} if tf.executing_eagerly() else _memory(_outermost_graph())


def call_name(kind: str, name: str | None, job: runtime.Runtime | None = None) -> str:
    """Name a call such that all ranks give it the same name, even if they trace at different times.

    Args:
        kind: the collective, such as "allreduce". Default names count the calls of a kind: in eager mode those of the
            job, else those of the outermost function.

    Returns:
        The name. Calls in one function run in no particular order, so the second call of a name there gets "#2", and
        so on.
    """
    job = runtime.current() if job is None else job
    job.engine.check_takes_part(kind if name is None else name)
    if tf.executing_eagerly():
        return f"{kind}.{job.count(kind)}" if name is None else name
    graph = _outermost_graph()
    # Each process set counts for itself: its members need not be in the same other sets.
    counts: dict[str, int] = _memory(graph).setdefault(f"counts {job.engine.generation}", {})
    if name is None:
        # TensorFlow appends a number to the names of some graphs, which may differ between processes.
        function = re.sub(r"_\d+$", "", getattr(graph, "name", "graph"))
        name = f"{function}/{kind}.{counts.get(kind, 0)}"
        counts[kind] = counts.get(kind, 0) + 1
        return name
    key = f"name {name}"
    counts[key] = counts.get(key, 0) + 1
    return name if counts[key] == 1 else f"{name}#{counts[key]}"


def _outermost_graph() -> Any:
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph


def _memory(graph: Any) -> dict[Any, Any]:
    # The dictionary is an attribute of the graph because its values refer to the graph: a table would never free it.
    memory: dict[Any, Any] | None = getattr(graph, "_hvd_ext", None)
    if memory is None:
        memory = graph._hvd_ext = {}
    return memory


def _register_gradients() -> None:
    def back(_operation: tf.Operation, *upstream: tf.Tensor) -> Sequence[tf.Tensor]:
        return upstream

    tf.RegisterGradient("HvdExt>Together")(back)
    tf.no_gradient("HvdExt>ReduceStep")


def _keep_independent() -> None:
    from tensorflow.python.framework import auto_control_deps as dependencies

    known = getattr(dependencies, "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS", None)
    if not isinstance(known, frozenset):
        raise NativeLibraryError(
            f"TensorFlow {tf.__version__}: it has no list of ops that run in any order (auto_control_deps); "
            "hvd_ext needs one of the versions that its README names"
        )
    dependencies.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS = known | set(_INDEPENDENT)
