"""Keras 3 on TensorFlow: the optimizer that reduces its gradients over the ranks, and the callbacks around `fit`.

`import hvd_ext.keras as hvd` replaces `import horovod.keras as hvd`: it has the public names of `hvd_ext`, and the
collectives with Horovod's order of arguments from `hvd_ext.keras.face`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # ruff: isort: off
    # the first one is twice here: of two imports of one name mypy takes the first, and pyright the last
    from hvd_ext.keras.face import *  # noqa: F403
    from hvd_ext import *  # type: ignore[assignment]  # noqa: F403
    from hvd_ext.keras.face import *  # noqa: F403
    # ruff: isort: on
else:
    _FACE = ("allreduce", "allgather", "broadcast", "reducescatter")

    def __getattr__(name: str) -> Any:
        import hvd_ext

        if name in _FACE:
            from hvd_ext.keras import face

            return getattr(face, name)
        if name in hvd_ext.__all__:
            return getattr(hvd_ext, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        import hvd_ext

        return sorted(hvd_ext.__all__)
