"""A user's reduction: its checked op, factors and compression, and the calls that apply it to tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_ext.options import Average, Compression, ReduceOp, Sum, check_compression
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.collectives import backward, calls, dtypes
from hvd_ext.tensorflow.collectives.calls import Call


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A user's reduction: prescale multiplies the tensors before it, postscale the results."""

    call: Call
    op: ReduceOp
    compression: Compression
    prescale: float
    postscale: float

    @staticmethod
    def of(
        call: Call, op: Any, average: bool | None, compression: Any, prescale_factor: Any, postscale_factor: Any
    ) -> Reduction:
        """Check a user's arguments; `InvalidError` if an argument breaks its rule."""
        return Reduction(
            call,
            calls.chosen_op(call.kind, op, average),
            check_compression(compression),
            dtypes.factor(call.kind, "prescale_factor", prescale_factor),
            dtypes.factor(call.kind, "postscale_factor", postscale_factor),
        )

    def signature(self, label: str, *lines: Any) -> Any:
        """Make the signature of the call; see `calls.signature`."""
        return calls.signature(
            label, f"prescale_factor {self.prescale!r}", f"postscale_factor {self.postscale!r}", *lines
        )

    def full_signature(self, label: str, *lines: Any) -> Any:
        """Make the signature of a call whose op and compression the engine does not see."""
        return self.signature(label, f"op {self.op.name.lower()}", f"compression {self.compression.name}", *lines)

    def allreduced(self, tensor: tf.Tensor, algorithm: str | None = None, signature: Any = None) -> tf.Tensor:
        """Allreduce a tensor of the dtypes `dtypes.ALLREDUCED`; None: with a signature of the factors."""

        def run(call: Call, wide: tf.Tensor, op: ReduceOp, wire: str, **more: Any) -> tf.Tensor:
            return backward.summed(call.job, call.name, wide, op, algorithm, wire, counted=call.counted, **more)

        return self._applied(run, "allreduce", tensor, signature)

    def scattered(self, tensor: tf.Tensor, signature: Any = None) -> tf.Tensor:
        """Reduce a tensor of the dtypes `dtypes.REDUCED`, and return this rank's rows."""

        def run(call: Call, wide: tf.Tensor, op: ReduceOp, wire: str, **more: Any) -> tf.Tensor:
            more |= {"counted": call.counted, **backward.one_class(call.job.reduce_scatter)}
            signature = more.pop("signature")
            return ops.library().hvd_ext_reducescatter(call.name, wide, signature, reduce_op=int(op), wire=wire, **more)

        return self._applied(run, "reducescatter", tensor, signature)

    def _applied(self, run: Callable[..., tf.Tensor], label: str, tensor: tf.Tensor, signature: Any) -> tf.Tensor:
        """Reduce a tensor in a dtype of the engine; an average, or a sum with a factor, never leaves its range."""
        if signature is None:  # with the op, because an average of integers is a sum to the engine
            signature = self.signature(label, f"op {self.op.name.lower()}")
        size = self.call.job.engine.size
        plain = self.op != Average and self.prescale == self.postscale == 1.0
        wide, dtype = dtypes.widened(tensor, plain)
        wire = self.compression.value
        if tensor.dtype == tf.float16 and self.op in (Average, Sum):
            wide, dtype, wire = tf.cast(tensor, tf.float32), "float16", "float16"
        wide = dtypes.scaled(wide, self.prescale)
        op, after = self.op, self.postscale
        if wide.dtype.is_integer and op == Average and after != 1.0:  # so that integers are truncated only once
            op, after = Sum, after / size
        with ops.translated():
            if tensor.dtype == tf.int64 and (op == Average or (op == Sum and not plain)):
                parts = tf.truncatediv(wide, size)
                quotients = run(self.call, parts, Sum, wire, signature=signature, dtype=dtype)
                rest = dataclasses.replace(self.call, name=f"{self.call.name}/remainders")
                with tf.control_dependencies([quotients]):
                    remainders = run(rest, wide - parts * size, Sum, wire, signature=label, dtype=dtype)
                if op == Average:
                    result = dtypes.divided(quotients, remainders, size)
                else:
                    result = tf.cast(quotients, tf.float64) * size + tf.cast(remainders, tf.float64)
            else:
                result = run(self.call, wide, op, wire, signature=signature, dtype=dtype)
        return dtypes.narrowed(str(self.call), result, tensor.dtype, after)
