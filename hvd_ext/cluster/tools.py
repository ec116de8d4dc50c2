"""The system's tools that make namespaces, and whether this machine has them and allows their use."""

from __future__ import annotations

import os
import shutil
import subprocess

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "util-linux"}
TOOLS["hostname"] = "hostname"


def tool(name: str) -> str | None:
    """Find a system tool, even in the folders that only root has on PATH."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def obstacle() -> str:
    """Say what is needed to rehearse a cluster here; empty if nothing is missing."""
    missing = [name for name in TOOLS if tool(name) is None]
    if missing:
        packages = " ".join(sorted({TOOLS[name] for name in missing}))
        return f"needs the tools {', '.join(missing)}: apt-get install {packages}"
    probe = subprocess.run([*unshare(), "sh", "-exc", _probe()], capture_output=True, text=True, check=False)
    if probe.returncode == 0:
        return ""
    # The shell prints each command, and the last one is the one that failed.
    seen = ": ".join(probe.stderr.strip().rpartition("+ ")[2].splitlines())
    if os.geteuid() == 0:
        return (
            "needs root with all capabilities (a container with --privileged), and a kernel with bridges, veth and "
            f"tbf; this root was refused: {seen}"
        )
    return f"needs root (sudo, or a container with --privileged), or a kernel that lets users create namespaces: {seen}"


def _probe() -> str:
    """Return the shell commands that try, inside new namespaces, each thing that a rehearsal makes there."""
    ip, tc = tool("ip"), tool("tc")
    return f"""{tool("mount")} -t proc proc /proc
{ip} link add name core type bridge
{ip} link add name left type veth peer name right
{tc} qdisc add dev left root tbf rate 1mbit burst 16kb limit 64kb"""


def unshare() -> list[str]:
    """Return the words to put before a command to run it as process 1 of new namespaces; it dies when unshare ends."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    flags = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"]
    return [tool("unshare") or "unshare", *user, *flags]
