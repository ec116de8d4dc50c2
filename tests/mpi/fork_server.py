"""Ranks of test jobs that do not import TensorFlow again: they are forked from a process that has imported it.

Importing TensorFlow and Keras takes 3 to 5 s of processor in each rank, longer than most jobs. A server imports both
once, and starts none of their threads. An interpreter that a launcher starts as a rank sends the server its program,
environment and open files (`become`, which tests/mpi/site calls before the program runs). It stands in for the forked
rank: it forwards signals, and ends as the rank ends. If it is killed, the server kills the rank. A rank of a rehearsed
host is forked into the namespaces of its host.

Two servers serve the even and the odd ranks. So the ranks of a job have different hash seeds, as interpreters of their
own have: a result that depends on the order of a set must differ between ranks here too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import timing

SOCKET = "HVD_EXT_TEST_SERVER"
SURROUNDINGS = "surroundings.json"  # in the servers' folder
OUTPUT = "HVD_EXT_TEST_OUTPUT"  # tests find the processes of a job by it
# These are read when the interpreter or TensorFlow starts: a rank with other values needs its own interpreter.
AT_START = ("PYTHON", "TF_", "KERAS_", "LD_PRELOAD", "XLA_", "CUDA_")
LATER = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
# Of a rehearsed host, in the order in which a rank enters them; the first takes effect with the next fork.
NAMESPACES = ("pid_for_children", "net", "ipc", "uts", "mnt")
_HEADER = struct.Struct("!I")
_servers: list[tuple[subprocess.Popen[bytes], str]] = []
_lock = threading.Lock()


def begin(environment: Mapping[str, str]) -> str:
    """Start the servers if they do not run, and give their folder, the value of `SOCKET`."""
    with _lock:
        if not _servers:
            folder = tempfile.mkdtemp(prefix="hvd-fork-")
            own = {name: text for name, text in environment.items() if name != OUTPUT}
            Path(folder, SURROUNDINGS).write_text(json.dumps(_surroundings(own)), encoding="utf-8")
            for parity in range(2):
                path = os.path.join(folder, str(parity))
                command = [sys.executable, str(Path(__file__).resolve()), path]
                with open(f"{path}.log", "wb") as log:
                    process = subprocess.Popen(
                        command, env=own, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True
                    )
                _servers.append((process, folder))
        return _servers[0][1]


def stop() -> None:
    """End the servers."""
    for process, _ in _servers:
        process.terminate()
    _servers.clear()


# --- in a rank


def become(rank: int, arguments: Sequence[str]) -> None:
    """Run a program in a rank that a server forks, and end as that rank ends; return where none can be forked.

    Args:
        rank: of the job; it chooses the server.
        arguments: of a Python interpreter.
    """
    # What the rank starts itself is no rank of this job.
    folder = Path(os.environ.pop(SOCKET))
    plain = arguments[:1] == ["-m"] or (arguments and not arguments[0].startswith("-"))
    known = folder / SURROUNDINGS
    if not plain or not known.exists() or json.loads(known.read_text("utf-8")) != _surroundings(os.environ):
        return
    request = {"arguments": list(arguments), "environment": dict(os.environ), "folder": os.getcwd(), "nice": os.nice(0)}
    text = json.dumps(request).encode()
    connection = _connected(str(folder / str(rank % 2)))
    namespaces = _namespaces()
    socket.send_fds(connection, [_HEADER.pack(len(text))], [0, 1, 2, *namespaces.values()])
    for descriptor in namespaces.values():
        os.close(descriptor)
    connection.sendall(text)
    _, (process,), _, _ = socket.recv_fds(connection, 1, 1)
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _forward(process, number))
    code = _HEADER.unpack(_received(connection, _HEADER.size))[0]
    status = os.waitstatus_to_exitcode(code)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
        time.sleep(10)
    os._exit(status)


def _surroundings(environment: Mapping[str, str]) -> dict[str, str]:
    """Give what a rank cannot change any more: variables, and the namespace of its users."""
    values = {name: text for name, text in environment.items() if name.startswith(AT_START) and name not in LATER}
    return values | {"users": os.readlink("/proc/self/ns/user")}


def _namespaces() -> dict[str, int]:
    return {name: os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in NAMESPACES}


def _forward(process: int, number: int) -> None:
    """Send a signal; a number of a process would be that of another one in a rehearsed cluster."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


def _connected(path: str) -> socket.socket:
    """Connect; the server may still import TensorFlow."""
    connection = socket.socket(socket.AF_UNIX)
    end = time.monotonic() + 120
    while True:
        try:
            connection.connect(path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _received(connection: socket.socket, nbytes: int) -> bytes:
    text = b""
    while len(text) < nbytes:
        part = connection.recv(nbytes - len(text))
        if not part:
            sys.exit("the fork server of the tests has ended")
        text += part
    return text


# --- in a server


def _serve(path: str) -> dict[str, Any]:
    """Fork for each request until the process is terminated; the forked rank returns with its request."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    own = _namespaces()
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ, None)
    ranks: dict[
        socket.socket, tuple[int, int, str]
    ] = {}  # by connection: process, its descriptor, the file of its test
    while True:
        for key, _ in events.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, files, namespaces = _request(connection)
                try:
                    _enter(namespaces, NAMESPACES[:1])
                    pid = os.fork()
                except OSError:  # the rehearsed cluster has ended
                    pid = -1
                if pid == 0:
                    events.close()
                    listener.close()
                    for descriptor in [connection, *ranks]:
                        descriptor.close()
                    _enter(namespaces, NAMESPACES[1:])
                    for target, file in enumerate(files):
                        os.dup2(file, target)
                    for descriptor in [*files, *namespaces.values(), *own.values()]:
                        os.close(descriptor)
                    return request
                _enter(own, NAMESPACES[:1])
                for descriptor in [*files, *namespaces.values()]:
                    os.close(descriptor)
                if pid < 0:
                    connection.close()
                    continue
                end = os.pidfd_open(pid)
                socket.send_fds(connection, [b"+"], [end])
                ranks[connection] = (pid, end, _test_of(request))
                events.register(end, selectors.EVENT_READ, connection)
                events.register(connection, selectors.EVENT_READ, connection)
                continue
            connection = key.data
            if connection not in ranks:
                continue
            pid, end, test = ranks[connection]
            if key.fileobj is connection:  # the process that stands in for it was killed
                events.unregister(connection)
                os.kill(pid, signal.SIGKILL)
                continue
            _, status, usage = os.wait4(pid, 0)
            if test:
                timing.add("test", test, 0.0, usage.ru_utime + usage.ru_stime, count=0)
                timing.write()
            events.unregister(end)
            os.close(end)
            with contextlib.suppress(KeyError):
                events.unregister(connection)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(_HEADER.pack(status))
            connection.close()
            del ranks[connection]


def _request(connection: socket.socket) -> tuple[dict[str, Any], list[int], dict[str, int]]:
    """Receive a request, its open files and its namespaces."""
    header, descriptors, _, _ = socket.recv_fds(connection, _HEADER.size, 3 + len(NAMESPACES))
    request: dict[str, Any] = json.loads(_received(connection, _HEADER.unpack(header)[0]))
    return request, descriptors[:3], dict(zip(NAMESPACES, descriptors[3:], strict=True))


def _enter(namespaces: Mapping[str, int], names: Sequence[str]) -> None:
    """Join namespaces; those that the process is in already ask for no privilege."""
    for name in names:
        if os.path.samestat(os.fstat(namespaces[name]), os.stat(f"/proc/self/ns/{name}")):
            continue
        if ctypes.CDLL(None, use_errno=True).setns(namespaces[name], 0):
            raise OSError(ctypes.get_errno(), f"cannot join the namespace {name}")


def _test_of(request: dict[str, Any]) -> str:
    """Give the file of the test that waits for this rank; a rank that runs pytest measures its tests itself."""
    test = request["environment"].get("PYTEST_CURRENT_TEST", "")
    return "" if "pytest" in request["arguments"] else test.partition("::")[0]


def _run(request: dict[str, Any]) -> None:
    """Be the interpreter of a rank."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.nice(max(0, request["nice"] - os.nice(0)))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    platform._uname_cache = None  # type: ignore[attr-defined]  # a rehearsed host has its own name
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    timing.begin()
    arguments = request["arguments"]
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = request["folder"]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    program = types.ModuleType("__main__")
    program.__file__ = arguments[0]
    sys.modules["__main__"] = program
    exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), program.__dict__)


def _main(path: str) -> None:
    import keras
    import tensorflow as tf

    assert keras.Model and tf.Module, "loads what both load at first use"
    gc.collect()
    gc.freeze()
    timing.write()
    _run(_serve(path))


if __name__ == "__main__":
    _main(sys.argv[1])
