"""Names of Horovod that this package does not support: using one raises an error that says what to do instead."""

from __future__ import annotations

# What to do instead; the migration page has the same words.
INSTEAD: dict[str, str] = {
    "experimental": (
        "leave experimental_run_tf_function out of compile(): Keras 3 has no such argument, and none is needed for a "
        "DistributedOptimizer to reduce the gradients"
    ),
    "mark_cycles": "must be False; the engine sleeps until there is work, it has no cycles",
}


class RefusedOp:
    """A reduction of Horovod's that no collective and no optimizer here accepts; `instead` says what to do."""

    def __init__(self, name: str, instead: str) -> None:
        self.name = name
        self.instead = instead

    def __repr__(self) -> str:
        return f"hvd_ext.{self.name}"


Adasum = RefusedOp("Adasum", "take op=Average, and hvd_ext.scale_learning_rate with a warm-up")


# Words in an exception that is not ours -> what to do about it.
_HINTS: dict[str, str] = {
    "unexpected keyword argument 'experimental_run_tf_function'": f"hvd_ext: {INSTEAD['experimental']}",
}


def add_hint(error: BaseException) -> None:
    """Add a hint to an exception that ends a program, if scripts written for Horovod raise it on Keras 3.

    Args:
        error: the exception; its printed traceback then ends with the hint. Before Python 3.11, exceptions take no
            notes and nothing happens.
    """
    for words, hint in _HINTS.items():
        if words in str(error) and hint not in getattr(error, "__notes__", ()) and hasattr(error, "add_note"):
            error.add_note(hint)


# Names in Horovod's modules that do not exist here -> what to use instead, for the AttributeError.
ABSENT: dict[str, str] = {
    "broadcast_object_fn": "use hvd_ext.broadcast_object, which needs no session",
    "BroadcastGlobalVariablesHook": (
        "make hvd_ext.broadcast_global_variables(root_rank) in the graph, and run it in the session after the "
        "initializers"
    ),
    "gpu_available": "use tf.config.list_physical_devices('GPU')",
    "LocalGradientAggregationHelper": "use DistributedOptimizer(..., backward_passes_per_step=N)",
    "compression": "use hvd_ext.Compression",
    "data": (
        "there is no compute service; run the tf.data service of TensorFlow (tf.data.experimental.service) on hosts of "
        "its own, and shard with hvd_ext.shard"
    ),
}
