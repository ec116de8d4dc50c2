"""One rank of `hvd_ext.run`: it calls the function and writes down how it ended.

mpirun ... python -m hvd_ext.runner.rank FOLDER OUTPUTS
"""

from __future__ import annotations

import os
import pickle
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_ext import errors
from hvd_ext.errors import CommunicationError, HvdExtError, InvalidError
from hvd_ext.options import unsupported
from hvd_ext.runner import launcher
from hvd_ext.runner.handover import Files, Outcome


def main(folder: Path, outputs: Path) -> None:
    """Call the function as one rank of the job.

    Raises:
        BaseException: the function raised it; raised again so that the job ends.
    """
    launcher.end_with_parent(signal.SIGKILL)  # mpirun may die before MPI has started here
    if not outputs.is_dir() or not folder.is_dir():
        sys.exit(
            f"hvd_ext: run hands its files over in {folder}, which is not on host {platform.node()}: set TMPDIR, in "
            "the process that calls run, to a folder that all hosts share"
        )
    rank = int(next(os.environ[name] for name in launcher.RANK_VARIABLES if name in os.environ))
    files = Files(folder, outputs)
    _write_to(files.output(rank))
    try:
        outcome = Outcome(_returned(files))
    except BaseException as error:
        unsupported.add_hint(error)
        files.write_outcome(rank, _raised(error))
        raise
    files.write_outcome(rank, outcome)


def _write_to(path: Path) -> None:
    """Redirect the output of this process and its libraries to a file, so that lines of several ranks never mix."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)


def _returned(files: Files) -> bytes:
    import cloudpickle

    data = files.read_job()
    try:
        func, args, kwargs = pickle.loads(data)
    except Exception as error:
        raise HvdExtError(
            f"the function cannot be read here, by Python {platform.python_version()} ({sys.executable}): {error!r}"
        ) from error
    value = _called(func, args, kwargs)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise InvalidError(
            f"result ({type(value).__name__}): what the function returns must pickle: {error}; return numbers, NumPy "
            "arrays, dictionaries of them, or model.get_weights()"
        ) from error


def _called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _raised(error: BaseException) -> Outcome:
    import cloudpickle

    try:
        exception = cloudpickle.dumps(error)
        pickle.loads(exception)  # some exceptions can be pickled but not unpickled
    except Exception:
        exception = None
    code = getattr(error, "error_code", None)  # set by TensorFlow's exceptions
    gone = isinstance(error, CommunicationError) or errors.TENSORFLOW_CODES.get(code or 0) == errors.COMMUNICATION
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next  # leave out this file's frames, which the user does not know
    return Outcome(
        error=traceback.format_exception_only(type(error), error)[0].strip(),
        traceback="".join(traceback.format_exception(type(error), error, frames)),
        exception=exception,
        consequence=gone,
        at_s=time.time(),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
