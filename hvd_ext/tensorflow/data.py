"""What `from horovod.tensorflow.data.compute_service import ...` meets here: an ImportError that says what to use."""

from __future__ import annotations

from hvd_ext.options import unsupported

raise ImportError(f"hvd_ext.tensorflow.data: {unsupported.ABSENT['data']}")
