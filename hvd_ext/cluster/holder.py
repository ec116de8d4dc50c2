"""The first process of a rehearsal: it holds the switch's namespaces, starts a holder of each host's, and waits.

It runs by its path in a bare interpreter, as process 1 of a PID namespace. The kernel ends every process of that
namespace when process 1 ends, and a namespace goes when its last process does; process 1 ends when its standard input
closes, and that closes when the rehearsal's owner dies, however it dies.

The only argument is JSON: `hosts` (names), `switch` (name), `hosts_file` (path), `session` (a folder, each host's own).
It prints one line of JSON when all is there: `pid`, its number outside, and `holders`, by host, numbers inside.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

# $1: the host's name, $2: its session folder. The holder's number stays the same through exec.
HOST = """
mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "$2" && hostname "$1" && echo ready && exec sleep infinity
"""


def main() -> None:
    """Make the namespaces' own mounts and names, say that they are there, and wait."""
    request = json.loads(sys.argv[1])
    # /proc is still that of the outer PID namespace, and says this process's number there.
    pid = int(os.readlink("/proc/self"))
    for source in (["-t", "proc", "proc", "/proc"], ["--bind", request["hosts_file"], "/etc/hosts"]):
        subprocess.run(["mount", *source], check=True)
    for folder in ("/dev/shm", request["session"]):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    socket.sethostname(request["switch"])
    holders = {}
    own = ["unshare", "--mount", "--uts", "--ipc", "--net", "sh", "-c", HOST, "sh"]
    for name in request["hosts"]:
        command = [*own, name, request["session"]]
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if holder.stdout is None or holder.stdout.readline() != "ready\n":
            raise SystemExit(f"host {name}: its namespaces cannot be made")
        holders[name] = holder.pid
    # Orphans of the jobs become children of this process: the kernel shall forget them by itself.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(json.dumps({"pid": pid, "holders": holders}), flush=True)
    while os.read(0, 1):
        continue


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(error.cmd)}: status {error.returncode}") from None
