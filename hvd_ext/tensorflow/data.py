"""A replacement for horovod.tensorflow.data.compute_service: an ImportError that says what to use instead."""

from __future__ import annotations

from hvd_ext.options import unsupported

raise ImportError(f"hvd_ext.tensorflow.data: {unsupported.ABSENT['data']}")
