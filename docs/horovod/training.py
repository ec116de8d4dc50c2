"""The rows of optimizers, tapes, callbacks and models."""

from __future__ import annotations

from docs.horovod.row import REFUSED, Row, callable_rows, same
from hvd_ext.options import unsupported

_OPTIMIZERS, _TAPES, _CALLBACKS = "Optimizers", "Tapes", "Callbacks, models, layers"

_PLACED = "accepted without effect: GPU tensors go through host memory"
_COMPRESSION = (
    "Compression.none, .fp16 and also .bf16; sums are taken in float32; `compress` and `decompress` exist for loops "
    "that call them"
)
_GROUPS = "as in Horovod; several dtypes and variables of equal names work too"
_NUM_GROUPS = "accepted as `groups=N`, with a DeprecationWarning"

_REDUCTION = {"device_dense": _PLACED, "device_sparse": _PLACED, "num_groups": _NUM_GROUPS, "groups": _GROUPS}

_OPTIMIZER_ROWS = (
    *callable_rows(
        _OPTIMIZERS,
        "DistributedOptimizer",
        "optimizer name use_locking device_dense device_sparse compression sparse_as_dense backward_passes_per_step op "
        "gradient_predivide_factor average_aggregated_gradients num_groups groups process_set scale_local_gradients",
        "for optimizers of Keras 3 and of tf_keras (Keras 2), not of tf.compat.v1; all arguments after `name` by "
        "keyword, since Horovod's own modules differ in their order; `apply` and `apply_gradients` in a custom loop "
        "reduce too",
        {
            **_REDUCTION,
            "use_locking": "accepted without effect: it belongs to tf.compat.v1",
            "op": "Average or Sum, in every module; Horovod's `tensorflow.DistributedOptimizer` averages in silence",
            "backward_passes_per_step": (
                "the same mechanism as Keras' gradient_accumulation_steps, so use only one of the two; `iterations` "
                "counts updates, while Horovod counts passes"
            ),
            "gradient_predivide_factor": "with op=Sum it is refused; Horovod's Keras module ignores it in silence",
        },
    ),
    *callable_rows(
        _OPTIMIZERS,
        "PartialDistributedOptimizer",
        "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op groups "
        "process_set local_layers scale_local_gradients",
        "all arguments after `name` by keyword",
        {key: words for key, words in _REDUCTION.items() if key != "num_groups"},
    ),
    *same(_OPTIMIZERS, "DistributedOptimizer.register_local_var", "its gradient stays local"),
    *same(
        _OPTIMIZERS,
        "DistributedOptimizer.compute_gradients DistributedOptimizer.get_gradients",
        "exist where tf_keras has them. They return reduced gradients, which `apply_gradients` does not reduce again, "
        "with or without `skip_gradients_aggregation`. Gradients that were changed in between (clipped) are averaged "
        "again, which changes nothing; with op=Sum, local variables or backward_passes_per_step the "
        "program must ask for the skip itself",
    ),
    *same(_OPTIMIZERS, "Average Sum"),
    *same(_OPTIMIZERS, "Min Max Product", "for allreduce and grouped_allreduce; they have no gradient here"),
    Row(_OPTIMIZERS, unsupported.Adasum.name, "", REFUSED, unsupported.Adasum.instead),
    *same(_OPTIMIZERS, "Compression.none Compression.fp16", _COMPRESSION),
)

_TAPE_ARGUMENTS = (
    "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups groups "
    "process_set scale_local_gradients"
)

_TAPE_ROWS = (
    *callable_rows(
        _TAPES,
        "DistributedGradientTape",
        _TAPE_ARGUMENTS,
        "with a plain optimizer; all arguments after `gradtape` by keyword; sources may be keras.Variable",
        _REDUCTION,
    ),
    *callable_rows(
        _TAPES,
        "PartialDistributedGradientTape",
        _TAPE_ARGUMENTS.replace("scale_local", "local_layers scale_local"),
        "all arguments after `gradtape` by keyword",
        _REDUCTION,
    ),
    *callable_rows(
        _TAPES,
        "DistributedGradientTape.gradient",
        "target sources output_gradients use_generic_names",
        "",
        {"use_generic_names": "accepted without effect: gradients are identified by their position"},
    ),
    *same(_TAPES, "DistributedGradientTape.register_local_source"),
    *callable_rows(
        _TAPES,
        "DistributedGradientTape.get_local_and_global_gradients",
        "target sources output_gradients use_generic_names",
        "",
        {"use_generic_names": "accepted without effect: gradients are identified by their position"},
    ),
)

_CALLBACK_ROWS = (
    *callable_rows(
        _CALLBACKS,
        "callbacks.BroadcastGlobalVariablesCallback",
        "root_rank device local_variables",
        "also broadcasts variables that exist before the first step",
        {"device": "accepted without effect"},
    ),
    *callable_rows(
        _CALLBACKS,
        "callbacks.MetricAverageCallback",
        "device",
        "",
        {"device": "accepted without effect"},
    ),
    *callable_rows(
        _CALLBACKS,
        "callbacks.LearningRateScheduleCallback",
        "initial_lr multiplier start_epoch end_epoch staircase momentum_correction steps_per_epoch",
    ),
    *callable_rows(
        _CALLBACKS,
        "callbacks.LearningRateWarmupCallback",
        "initial_lr warmup_epochs momentum_correction steps_per_epoch verbose",
    ),
    *callable_rows(
        _CALLBACKS,
        "callbacks.BestModelCheckpoint",
        "monitor verbose save_weights_only mode save_freq",
        "`filepath` may be set later, as in Horovod, or passed; arguments after `verbose` by keyword, since Horovod "
        "has two orders",
    ),
    *callable_rows(
        _CALLBACKS,
        "load_model",
        "filepath custom_optimizers custom_objects compression legacy_opts",
        "all arguments after `custom_objects` by keyword. The optimizer of every file is wrapped; Horovod silently "
        "leaves that of a `.keras` file plain. With `root_rank=0` only rank 0 needs the file on its disk. With "
        "TF_USE_LEGACY_KERAS=1 the model is one of tf_keras",
        {"legacy_opts": "must be False with Keras 3, which has no legacy optimizers; with tf_keras it changes nothing"},
    ),
    *callable_rows(
        _CALLBACKS,
        "SyncBatchNormalization",
        "fused",
        "a layer of Keras 3; all arguments by keyword",
        {"fused": "must be False, as in Horovod"},
    ),
    *callable_rows(
        _CALLBACKS,
        "broadcast_variables",
        "variables root_rank process_set inplace",
        "variables of Keras and of TensorFlow may be mixed",
    ),
    *callable_rows(_CALLBACKS, "broadcast_", "variables root_rank name process_set"),
    *callable_rows(
        _CALLBACKS,
        "broadcast_global_variables",
        "root_rank",
        "in graphs of TensorFlow 1; elsewhere an error; name the variables: "
        "`hvd_ext.broadcast_variables([*model.variables, *optimizer.variables], root_rank)`",
    ),
)

_ELASTIC_ROWS = (
    *same("Elastic", "elastic.run elastic.run_fn elastic.ObjectState elastic.TensorFlowState"),
    *same("Elastic", "elastic.TensorFlowKerasState elastic.KerasState elastic.CommitStateCallback"),
    *same("Elastic", "elastic.UpdateBatchStateCallback", "`state.batch` is the number of batches done"),
    *same("Elastic", "elastic.UpdateEpochStateCallback elastic.HorovodInternalError"),
)

ROWS = (*_OPTIMIZER_ROWS, *_TAPE_ROWS, *_CALLBACK_ROWS, *_ELASTIC_ROWS)
