"""The part of hvd_ext that uses TensorFlow.

`import hvd_ext.tensorflow as hvd` replaces `import horovod.tensorflow as hvd`: it has the public names of `hvd_ext`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_ext import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        import hvd_ext

        if name in hvd_ext.__all__:
            return getattr(hvd_ext, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        import hvd_ext

        return sorted(hvd_ext.__all__)
