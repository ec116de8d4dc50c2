"""The first process of a rehearsal: it keeps the switch's namespaces, and starts a holder of each host's.

It runs as a script in a bare interpreter, as process 1 of a PID namespace. When process 1 ends, the kernel ends every
process of that namespace, and a namespace disappears with its last process. Process 1 ends when its standard input
closes, which happens when the rehearsal's owner dies, however it dies.

The only argument is JSON: `hosts` (names), `switch` (name), `hosts_file` (path), and `session` (a folder on which each
host mounts its own). When everything is ready, it prints one line of JSON: `pid`, its process number outside of the
namespace, and `holders`, the process number of each host's holder inside of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

# $1: the host's name, $2: its session folder. exec keeps the holder's process number.
HOST = """
mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "$2" && hostname "$1" && echo ready && exec sleep infinity
"""


def main() -> None:
    """Set up the mounts and names of the namespaces, report that they are ready, and wait."""
    request = json.loads(sys.argv[1])
    # /proc still belongs to the outer PID namespace, and has this process's number there.
    pid = int(os.readlink("/proc/self"))
    for source in (["-t", "proc", "proc", "/proc"], ["--bind", request["hosts_file"], "/etc/hosts"]):
        subprocess.run(["mount", *source], check=True)
    for folder in ("/dev/shm", request["session"]):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    socket.sethostname(request["switch"])
    holders = {}
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--net", "sh", "-c", HOST, "sh"]
    for name in request["hosts"]:
        command = [*unshare, name, request["session"]]
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if holder.stdout is None or holder.stdout.readline() != "ready\n":
            raise SystemExit(f"host {name}: its namespaces cannot be made")
        holders[name] = holder.pid
    # Orphans of the jobs become children of this process; the kernel then reaps them without a wait().
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(json.dumps({"pid": pid, "holders": holders}), flush=True)
    while os.read(0, 1):
        continue


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(error.cmd)}: status {error.returncode}") from None
