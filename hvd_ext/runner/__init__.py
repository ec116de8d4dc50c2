"""`run` calls a function on several ranks, from a notebook or a program, and returns the result of each rank."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.job import launch as launching
from hvd_ext.job.log import logger
from hvd_ext.runner import ended, handover, launcher

__all__ = ["run"]


_FIXED = "the number of ranks is fixed while a job runs: give num_proc"
# A job on other hosts gets the variables of this process's environment that begin with one of these.
_TRAVELS = ("HVD_EXT_", "HOROVOD_", "TF_", "KERAS_", "XLA_", "OMP_", "PYTHON", "PATH", "LD_LIBRARY_PATH")
# These variables give each rank its share of the machine's cores.
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# Horovod's arguments that have no meaning here -> what to do instead; the migration page has the same words.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("min_num_proc", "max_num_proc", "min_np", "max_np"), _FIXED),
    "slots": "say how many ranks each host has in hosts, as in 'host1:4,host2:4'",
    **dict.fromkeys(("reset_limit", "cooldown_range"), _FIXED),
    "start_timeout": "set HVD_EXT_STALL_FATAL_S in os.environ: if a rank does not start, the job fails after that time",
    "use_gloo": "hvd_ext runs on MPI: leave it out",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: None = None,
    max_num_proc: None = None,
    slots: None = None,
    reset_limit: None = None,
    cooldown_range: None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    start_timeout: None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: bool | int | None = None,
    use_gloo: None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: None = None,
    max_np: None = None,
) -> list[Any]:
    """Call a function on several ranks, as `mpirun` would start them, and wait for all of them.

    This is `horovod.run`. The function must call `hvd_ext.init()` itself. The function and its results are pickled with
    cloudpickle, so that a function from a notebook's cell works. The output of rank 0 is shown while the job runs, and
    the output of each rank is written to its own file. Ctrl-C, an error or the end of this process end all ranks.

    Args:
        func: the function that each rank calls.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: the number of ranks. If there are more ranks than cores, they take turns.
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, min_np, max_np: must be None, because the number
            of ranks is fixed.
        hosts: the hosts with their numbers of ranks, "host1:4,host2:4"; None for this machine. The hosts must have this
            interpreter and the current folder under the same paths, and share the folder for temporary files
            (`TMPDIR`).
        hostfile: a file that lists the hosts, with a line "host1 slots=4" for each.
        start_timeout: must be None; see `HVD_EXT_STALL_FATAL_S`.
        ssh_port: the SSH port of the other hosts.
        ssh_identity_file: the private key for the other hosts.
        disable_cache: accepted without effect.
        output_filename: a folder that keeps the output of each rank (`rank.0.txt`, ...), even if the job succeeds.
        verbose: print the command that starts the job.
        use_gloo: must be None or False.
        use_mpi: accepted without effect, because jobs always run on MPI.
        mpi_args: further arguments for mpirun, as one text.
        network_interface: the network interfaces that connect the hosts, separated by commas.
        executable: the Python interpreter of the ranks; None for this one.
        np: Horovod's older name of num_proc.

    Returns:
        The function's results, by rank.

    Raises:
        InvalidError: an argument breaks its rule, the function does not pickle, or this process is itself a rank of a
            job.
        RankError: the function raised an exception on a rank, or its result there does not pickle. The error has the
            rank and its traceback, and the exception is its `__cause__`.
        JobError: a rank was killed or ended without a result, or the job could not be started.
    """
    given = {name: value for name, value in locals().items() if name in REFUSED}
    for name, value in given.items():
        if value is not None and value is not False:
            raise InvalidError(f"run: {name} ({value!r}) has no meaning here: {REFUSED[name]}")
    ranks = _number_of_ranks(num_proc, np)
    _refuse_inside_a_job()
    options = _options(hosts, hostfile, ssh_port, ssh_identity_file, network_interface, mpi_args)
    function = handover.pickled(func, args, {} if kwargs is None else kwargs)
    environment = _environment(ranks, elsewhere=hosts is not None or hostfile is not None)
    with _folders(output_filename) as (folder, outputs):
        files = handover.Files(folder, outputs)
        files.write_job(function)
        command = [executable or sys.executable, "-m", "hvd_ext.runner.rank", str(folder), str(outputs)]
        command = launcher.mpirun(ranks, [*options(environment), "--tag-output", *command])
        if verbose:
            print(shlex.join(command), flush=True)
        status = _waited(command, files, environment)
        return ended.results(files, ranks, status)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"module 'hvd_ext.runner' has no attribute {name!r}: of Horovod's runner there is only "
        "hvd_ext.run(function, np=4); start programs with mpirun or with horovodrun --mpi"
    )


def _number_of_ranks(num_proc: object, np: object) -> int:
    """Return the number of ranks, which was given under one of two names."""
    ranks = num_proc if np is None else np
    if np is not None and num_proc not in (1, np):
        raise InvalidError(
            f"run: num_proc ({num_proc!r}) and np ({np!r}) are two names of one number; give one of them"
        )
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidError(f"run: num_proc ({ranks!r}): must be a whole number of ranks, at least 1")
    return ranks


def _refuse_inside_a_job() -> None:
    """Raise if this process is a rank of a job: each rank that calls `run` would start another job."""
    outer = launching.examine(os.environ)
    if outer.mpi and (outer.size or 1) > 1:
        raise InvalidError(
            f"run: this process is one of {outer.size} ranks already ({outer.by}); call run in a program that was "
            "started without a launcher, or call the function itself"
        )


def _options(
    hosts: str | None,
    hostfile: str | os.PathLike[str] | None,
    ssh_port: int | None,
    ssh_identity_file: str | os.PathLike[str] | None,
    network_interface: str | None,
    mpi_args: str | None,
) -> Callable[[Mapping[str, str]], list[str]]:
    """Return a function that makes mpirun's arguments (hosts, SSH, network) from the job's environment."""
    if hosts is not None and hostfile is not None:
        raise InvalidError("run: hosts and hostfile both say where the ranks run; give one of them")
    words: list[str] = []
    if hosts is not None:
        words += ["-H", hosts]
    if hostfile is not None:
        if not Path(hostfile).is_file():
            raise InvalidError(f"run: hostfile ({os.fspath(hostfile)}): there is no such file")
        words += ["--hostfile", os.fspath(hostfile)]
    ssh = ["-p", str(ssh_port)] if ssh_port is not None else []
    ssh += ["-i", os.fspath(ssh_identity_file)] if ssh_identity_file is not None else []
    if ssh:
        words += ["--mca", "plm_rsh_args", shlex.join(ssh)]
    if network_interface is not None:
        words += ["--mca", "btl_tcp_if_include", network_interface, "--mca", "oob_tcp_if_include", network_interface]
    words += shlex.split(mpi_args or "")
    if hosts is None and hostfile is None:
        return lambda environment: words
    return lambda environment: [
        *words,
        *["--wdir", os.getcwd()],
        *(word for name in {*environment, launcher.MARK} if name.startswith(_TRAVELS) for word in ("-x", name)),
    ]


def _environment(ranks: int, *, elsewhere: bool) -> dict[str, str]:
    """Return the job's environment, which divides the cores among the ranks unless the user has set their threads."""
    if elsewhere:
        environment = launcher.job_environment()
        for name in _THREADS:
            if name not in os.environ:
                del environment[name]  # the other hosts have other numbers of cores
        return environment
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks > cores:
        logger.warning("run: %d ranks share %d cores of this machine: they take turns", ranks, cores)
    threads = str(max(1, cores // ranks))
    return launcher.job_environment(**{name: os.environ.get(name, threads) for name in _THREADS})


@contextlib.contextmanager
def _folders(kept: str | os.PathLike[str] | None) -> Iterator[tuple[Path, Path]]:
    """Make a folder for the job's files, and one for the ranks' output, which stays if the job fails."""
    folder = Path(tempfile.mkdtemp(prefix="hvd_ext_run_"))
    outputs = folder / "output" if kept is None else Path(kept).absolute()
    leave = False
    try:
        outputs.mkdir(parents=True, exist_ok=True)
        for old in outputs.glob("rank.*.txt"):
            old.unlink()
        yield folder, outputs
    except HvdExtError:
        leave = outputs.parent == folder and any(outputs.iterdir())
        raise
    except OSError as error:
        raise InvalidError(f"run: output_filename ({kept}): must be a folder that can be written: {error}") from error
    finally:
        if leave:
            for path in folder.iterdir():
                if path != outputs:
                    path.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _waited(command: Sequence[str], files: handover.Files, environment: Mapping[str, str]) -> int:
    """Run the job to its end while showing the output of rank 0; return mpirun's status."""
    shown = handover.Shown(files.output(0))
    with launcher.Job(command, files.launcher, environment) as running:
        while running.status() is None:
            shown.more(sys.stdout)
            time.sleep(launcher.POLL_S)
        shown.more(sys.stdout)
        status = running.status()
    assert status is not None
    return status
