"""A user's reduction: its checked op, factors and compression, and the calls that apply it to tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from hvd_ext.options import Compression, ReduceOp, check_compression
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.collectives import backward, calls, dtypes
from hvd_ext.tensorflow.collectives.calls import Call


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The arguments of a user's reduction, beside the tensors.

    Args:
        call: the name of the call and the ranks that take part.
        op: how the ranks' values are combined.
        compression: the format in which float32 is sent.
        prescale: multiplies the tensors before the reduction.
        postscale: multiplies the results.
    """

    call: Call
    op: ReduceOp
    compression: Compression
    prescale: float
    postscale: float

    @staticmethod
    def of(
        call: Call, op: Any, average: bool | None, compression: Any, prescale_factor: Any, postscale_factor: Any
    ) -> Reduction:
        """Check a user's arguments.

        Args:
            call: the call, from `calls.preparing`.
            op: a `ReduceOp`, or None for `Average`.
            average: Horovod's older argument for the op, or None.
            compression: a `Compression`, Horovod's class for the same, or None.
            prescale_factor: a finite number.
            postscale_factor: a finite number.

        Raises:
            InvalidError: an argument breaks its rule.
        """
        return Reduction(
            call,
            calls.chosen_op(call.kind, op, average),
            check_compression(compression),
            dtypes.factor(call.kind, "prescale_factor", prescale_factor),
            dtypes.factor(call.kind, "postscale_factor", postscale_factor),
        )

    def signature(self, label: str, *lines: Any) -> Any:
        """Make the signature of the call; see `calls.signature`.

        Args:
            label: the function that the user has called.
            *lines: further lines.
        """
        return calls.signature(
            label, f"prescale_factor {self.prescale!r}", f"postscale_factor {self.postscale!r}", *lines
        )

    def full_signature(self, label: str, *lines: Any) -> Any:
        """Make the signature of a call whose op and compression the engine does not see.

        Args:
            label: the function that the user has called.
            *lines: further lines.
        """
        return self.signature(label, f"op {self.op.name.lower()}", f"compression {self.compression.name}", *lines)

    def allreduced(self, tensor: tf.Tensor, algorithm: str | None = None, signature: Any = None) -> tf.Tensor:
        """Allreduce a tensor.

        Args:
            tensor: a tensor of one of the dtypes `dtypes.ALLREDUCED`.
            algorithm: the algorithm; None for the algorithm of the options.
            signature: the signature; None for one with the factors.
        """
        wide, dtype = dtypes.widened(tensor)
        op, after = dtypes.split_factors(wide, self.op, self.postscale, self.call.job.engine.size)
        with ops.translated():
            result = backward.summed(
                self.call.job,
                self.call.name,
                dtypes.scaled(wide, self.prescale),
                op,
                algorithm,
                self.compression.value,
                signature=self.signature("allreduce") if signature is None else signature,
                dtype=dtype,
                counted=self.call.counted,
            )
        return dtypes.narrowed(str(self.call), dtypes.scaled(result, after), tensor.dtype)

    def scattered(self, tensor: tf.Tensor, signature: Any = None) -> tf.Tensor:
        """Reduce a tensor, and return this rank's rows.

        Args:
            tensor: a tensor of one of the dtypes `dtypes.REDUCED`.
            signature: the signature; None for one with the factors.
        """
        op, after = dtypes.split_factors(tensor, self.op, self.postscale, self.call.job.engine.size)
        classes = backward.scatter_classes(self.call.job)
        with ops.translated():
            result = ops.reducescatter(
                self.call.name,
                dtypes.scaled(tensor, self.prescale),
                op=int(op),
                wire=self.compression.value,
                signature=self.signature("reducescatter") if signature is None else signature,
                counted=self.call.counted,
                **classes,
            )
        return dtypes.scaled(result, after)
