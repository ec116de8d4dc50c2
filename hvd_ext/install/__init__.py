"""Building the native parts and telling what a machine has: `python -m hvd_ext doctor | build | install-horovod`.

The modules `child`, `sources`, `native` and `horovod` use the standard library only: setup.py imports them in
pip's empty build environment.
"""

from __future__ import annotations
