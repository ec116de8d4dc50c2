"""A worker of an elastic job without TensorFlow: python elastic_worker.py FOLDER.

It speaks the supervisor's protocol. In a world it holds connections to all of its peers; when one breaks, it leaves the
world, as an engine that fails makes a rank do. It writes what happens to FOLDER/log, and obeys the files `finish`,
`fail.ID`, `cut.ID`, `deaf.ID`, `apart.ID` and `broken.HOST` of the folder. In the last world it saves what it has.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
NUMBER = os.environ["HVD_EXT_WORKER"]
stop: list[int] = []


def log(**event: Any) -> None:
    with (FOLDER / "log").open("a") as file:
        file.write(json.dumps({"worker": int(NUMBER), "pid": os.getpid(), **event}) + "\n")


def apart(workers: Iterable[int]) -> list[int]:
    """Gives the workers that this one cannot reach: all if it has a file `apart.ID`, else those that have one."""
    others = [worker for worker in workers if worker != int(NUMBER)]
    far = [worker for worker in others if (FOLDER / f"apart.{worker}").exists()]
    return others if (FOLDER / f"apart.{NUMBER}").exists() else far


def main() -> int:
    if (FOLDER / f"broken.{os.environ.get('TEST_HOST')}").exists():
        return 1
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    listener = socket.create_server(("127.0.0.1", 0))
    addresses, _, port = os.environ["HVD_EXT_SUPERVISOR"].rpartition(":")
    supervisor = socket.create_connection((addresses.split(",")[0], int(port)))
    lines = supervisor.makefile("rw")

    def send(**message: Any) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    hello = {
        "kind": "hello",
        "token": os.environ["HVD_EXT_SUPERVISOR_TOKEN"],
        "worker": NUMBER,
        "host": os.environ.get("TEST_HOST", "here"),
    }
    send(**hello, pid=os.getpid(), addresses=["127.0.0.1"], port=listener.getsockname()[1])
    world, told = -1, False
    while True:
        send(kind="ready", world=world)
        while (message := json.loads(lines.readline() or '{"kind": "end", "why": "lost"}'))["kind"] != "world":
            if message["kind"] == "end":
                log(end=message["why"])
                return 1 if message["why"] == "lost" else 0
        world, peers = message["number"], message["peers"]
        log(world=world, rank=message["rank"], peers=[peer["worker"] for peer in peers], token=message["token"])
        log(hosts=[peer["host"] for peer in peers], world=world, rank=message["rank"])
        print(f"step of worker {NUMBER}")
        unreachable = apart(peer["worker"] for peer in peers)
        for number in unreachable:
            send(kind="unreachable", world=world, peer=number, tried=f"10.0.0.{number} port 4711 (timed out)")
        if unreachable:
            continue
        held = []
        try:
            for peer in peers:
                held.append(socket.create_connection((peer["addresses"][0], peer["port"])))
            for _ in peers:
                held.append(listener.accept()[0])
            send(kind="joined", world=world)
        except OSError:
            pass
        if message["last"] is not None:
            log(saved=message["last"])
            return 1
        while True:
            if (FOLDER / f"fail.{NUMBER}").exists():
                print("ValueError: as planned")
                return 3
            if (FOLDER / f"cut.{NUMBER}").exists():
                # The connection stays open for a while after the end of this process, as if no packet came through.
                descriptor = supervisor.fileno()
                subprocess.Popen(["sleep", "2.5"], pass_fds=[descriptor], stdout=2, start_new_session=True)
                return 1
            if (FOLDER / "finish").exists():
                send(kind="done")
                return 0
            if stop and not told:
                told = True
                send(kind="leaving", why="SIGTERM")
            readable, _, _ = select.select([supervisor, *held], [], [], 0.02)
            if (FOLDER / f"deaf.{NUMBER}").exists():
                time.sleep(0.1)
            elif supervisor in readable:
                message = json.loads(lines.readline() or '{"kind": "end", "why": "lost"}')
                log(told=message["kind"])
                if message["kind"] == "end":
                    return 1
                if message["kind"] == "changed":
                    break
            elif readable:
                break
        for connection in held:
            connection.close()


if __name__ == "__main__":
    sys.exit(main())
