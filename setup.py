"""Packs hvd_ext: the Python part always, and the native libraries if this machine can build them.

The native build needs TensorFlow, MPI and a C++ compiler. It uses the TensorFlow and the MPI of the interpreter that
runs pip, even from inside pip's isolated build environment. It names what is missing but installs nothing, so that the
machine's own build of TensorFlow is never replaced. HVD_EXT_NATIVE=0 skips the native build.

The wheel has the native sources too (hvd_ext/_native), so that `python -m hvd_ext build` works later.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from hvd_ext.build import native  # noqa: E402  (found through the line above)
from hvd_ext.engine import libraries, versions  # noqa: E402  (found through the line above)


def say(text: str) -> None:
    """Write to the log, and to the terminal if there is one, because pip hides the log of a successful build."""
    print(text, file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        return
    try:
        with open("/dev/tty", "w", encoding="utf-8") as terminal:
            terminal.write(f"\n{text}\n")
    except OSError:  # no terminal
        return


class BuildWithNative(build_py):
    """Adds the list of opcodes, the native sources and, where they can be built, the native libraries."""

    def run(self) -> None:
        """Build into build_lib; an editable installation uses the source tree, where `make setup` builds."""
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib).resolve() / "hvd_ext"
        shutil.rmtree(package, ignore_errors=True)  # setuptools packs whatever an earlier build has left there
        super().run()
        tree = ROOT / "tf_ops"
        for path in libraries.source_files(tree):
            copy = package / "_native" / path.relative_to(tree)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        shutil.copyfile(tree / "plan" / "ir.def", package / "planning" / "ir.def")
        if os.environ.get("HVD_EXT_NATIVE", "1") != "0":
            self.build_native(tree, package / "lib")

    def build_native(self, tree: Path, output: Path) -> None:
        """Build the native libraries, or say what is missing and how to get them."""
        toolchain, missing = native.find_toolchain(isolated=True)
        if toolchain is None:
            without_mpi, _ = native.find_toolchain(isolated=True, mpi=False)
            if without_mpi is not None:
                native.build(without_mpi, tree, output, isolated=True, echo=lambda line: print(line, flush=True))
            commands = [thing.mend for thing in missing] + [versions.BUILD]
            say(
                "hvd_ext: the Python part is installed without the native libraries"
                + (" but those of the data cache" if without_mpi is not None else "")
                + ": training needs them.\n"
                + "\n".join(f"  missing: {thing.what}" for thing in missing)
                + "\n  what to do:\n"
                + "\n".join(f"    {command}" for command in commands)
                + "\n  `python -m hvd_ext doctor` tells more"
            )
            return
        native.build(toolchain, tree, output, isolated=True, echo=lambda line: print(line, flush=True))
        say(f"hvd_ext: the native libraries are built for TensorFlow {toolchain.tensorflow} and {toolchain.mpi}")


class NativeDistribution(Distribution):
    """A distribution whose wheel is specific to a platform."""

    def has_ext_modules(self) -> bool:
        """Tell setuptools that the wheel holds machine code."""
        return True


setup(cmdclass={"build_py": BuildWithNative}, distclass=NativeDistribution)
