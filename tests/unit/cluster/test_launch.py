"""How a job is started on a rehearsed cluster and ended: words, environment, refusals, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from hvd_ext.cluster import launch, state as states
from hvd_ext.cluster.spec import Spec, topology
from hvd_ext.cluster.state import State
from hvd_ext.errors import InvalidError
from hvd_ext.runner import launcher
from hvd_ext.runner.launcher import JobError
from hvd_ext.topology.read import read as read_topology
from tests.waiting import LIMIT_S, until

HERE = states.namespaces("self")


def state(folder: Path, *, inside: bool = True, **changes: object) -> State:
    own = HERE if inside else {**HERE, "pid": "pid:[1]"}
    parts = {"ranks": {"h1": 2, "h2": 1}, "holders": {"h1": 7, "h2": 8}, "mca": {}, "environment": {}, **changes}
    return State(123, own, str(folder), **parts)


def after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_mpirun_gets_the_hosts_and_the_users_parameters_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_mpirun", lambda: "/opt/mpirun")
    words = launch.mpirun(state(tmp_path, mca={"btl": "tcp,self", "btl_tcp_links": "2"}), ["/bin/true", "-x"])
    job = words[words.index("/opt/mpirun") :]
    wanted = {"-np": "3", "-H": "h1:2,h2:1", "btl": "tcp,self", "btl_tcp_links": "2", "--wdir": os.getcwd()}
    wanted |= {"plm_rsh_agent": str(tmp_path / "agent"), "orte_tmpdir_base": str(tmp_path / "session")}
    assert {name: after(job, name) for name in wanted} == wanted
    assert job[-2:] == ["/bin/true", "-x"]


def test_the_way_in_depends_on_where_one_is(tmp_path: Path) -> None:
    inner = states.enter(state(tmp_path))
    assert after(inner, "--target") == "1"
    assert "--pid" not in inner
    outer = states.enter(state(tmp_path, inside=False), "h2")
    assert after(outer, "--target") == "123"
    assert "--pid" in outer
    assert after(outer[outer.index("--") :], "--target") == "8"
    other_user = State(5, {"pid": "pid:[1]", "user": "user:[1]"}, str(tmp_path), {}, {}, {}, {})
    assert {"--user", "--preserve-credentials"} <= set(states.enter(other_user))


def test_a_job_inherits_all_but_what_an_outer_job_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess_base_jobid", "PMIX_RANK", "PMI_FD", "PMIX2_X", "ORTE_X"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MY_SETTING", "kept")
    monkeypatch.delenv("HVD_EXT_TOPOLOGY", raising=False)
    variables = launch.environment(state(tmp_path, environment={"OMPI_MCA_btl_tcp_links": "2"}))
    left = {name for name in variables if name.startswith(("OMPI_", "PMI", "ORTE_"))}
    assert left == {"OMPI_MCA_btl_tcp_links", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}
    assert variables["MY_SETTING"] == "kept"
    line = f"{sys.executable} -m hvd_ext.cluster.launch {tmp_path}/state.json --"
    assert variables["HVD_EXT_LAUNCHER"] == line
    assert variables["HVD_EXT_TOPOLOGY"] == str(tmp_path / "topology.yaml")
    monkeypatch.setenv("HVD_EXT_TOPOLOGY", "mine.yaml")
    assert launch.environment(state(tmp_path))["HVD_EXT_TOPOLOGY"] == "mine.yaml"


def test_parameters_of_the_users_environment_are_told_from_a_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.setenv("OMPI_MCA_btl_tcp_links", "2")
    assert launch.users_parameters()["OMPI_MCA_btl_tcp_links"] == "2"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert launch.users_parameters() == {}


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = state(tmp_path, mca={"a": "b"})
    written.write()
    assert states.read(written.path) == written


def test_the_topology_of_a_state_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "topology.yaml").write_text(topology(Spec((2, 1), rate="10mbit")))
    assert read_topology(launch.environment(state(tmp_path))["HVD_EXT_TOPOLOGY"], 3).hosts() == ((0, 1), (2,))


@pytest.mark.parametrize("text", [None, "no JSON", "[]", '{"pid": 1}'])
def test_a_rehearsal_that_is_gone_is_refused_in_words(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.json"
    if text is not None:
        path.write_text(text)
    assert launch.main([str(path), "--", "true"]) == 1
    assert f"hvd_ext cluster: state file ({path}): must be that of a rehearsal that runs" in capsys.readouterr().err


def test_the_launcher_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["state.json"], ["state.json", "true"]):
        assert launch.main(arguments) == 1
        assert "STATE_FILE -- COMMAND" in capsys.readouterr().err


def test_a_program_is_found_on_the_path_beside_this_python_first(tmp_path: Path) -> None:
    assert launch.resolve([sys.executable, "-c", "1"]) == [os.path.abspath(sys.executable), "-c", "1"]
    assert os.path.isabs(launch.resolve(["sh"])[0])
    with pytest.raises(InvalidError, match=r"command \(no-such-program\): it is neither a program on PATH nor a path"):
        launch.resolve(["no-such-program"])
    with pytest.raises(InvalidError, match="command: must say what each rank runs"):
        launch.resolve([])


def test_another_mpis_mpirun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    program.chmod(0o755)
    monkeypatch.setattr(launch.launcher, "find", lambda name: str(program))
    with pytest.raises(JobError, match=r"needs the mpirun of Open MPI 4, this is HYDRA build details:"):
        launch.find_mpirun()
    monkeypatch.setattr(launch.launcher, "find", lambda name: None)
    with pytest.raises(JobError, match="neither beside this Python nor on PATH"):
        launch.find_mpirun()


def test_a_job_hands_its_status_on_and_ends_in_time() -> None:
    assert launch.run(["sh", "-c", "exit 3"], dict(os.environ)) == 3
    with pytest.raises(JobError, match="did not end within 0.1 s"):
        launch.run(["sleep", "600"], dict(os.environ), timeout_s=0.1)
    with pytest.raises(JobError, match="/no-such-program"):
        launch.run(["/no-such-program"], {})


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="needs a kernel that lists children")
def test_nsenter_is_left_to_read_the_status_of_what_it_started(tmp_path: Path) -> None:
    program = tmp_path / "nsenter"
    program.write_text('#!/bin/sh\nsh -c \'touch "$0/up"; exec sleep 600\' "$1"\necho $? > "$1/status"\n')
    program.chmod(0o755)
    process = subprocess.Popen([str(program), str(tmp_path)], start_new_session=True)
    until((tmp_path / "up").exists)
    launch._end(process)
    assert (tmp_path / "status").read_text() == f"{128 + signal.SIGTERM}\n"


def test_a_signal_ends_in_order_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def job() -> None:
        with launch.heeding_signals():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)  # a second one does not disturb the clean-up

    with pytest.raises(launch.Stopped) as stopped:
        job()
    assert stopped.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) is before


# A launcher and its daemon wait for ever, its rank ends.
LAUNCHER = """
setsid sleep 600 &
echo $! > "$1/daemon"
RANK
echo $? > "$1/rank"
sleep 600
"""


def job(folder: Path, rank: str) -> list[str]:
    return ["sh", "-c", LAUNCHER.replace("RANK", rank), "sh", str(folder)]


def test_a_launcher_without_ranks_is_ended_with_its_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = launcher.marked

    def seen(name: str, mark: str) -> dict[psutil.Process, dict[str, str]]:
        found = marked(name, mark)
        if any("OMPI_COMM_WORLD_RANK" in variables for variables in found.values()):
            (tmp_path / "seen").touch()
        return found

    monkeypatch.setattr(launcher, "marked", seen)
    monkeypatch.setattr(launch, "PATIENCE_S", 0.5)
    monkeypatch.setattr(launch, "LOOK_S", 0.1)
    rank = 'OMPI_COMM_WORLD_RANK=0 sh -c \'until [ -e "$0/seen" ]; do sleep 0.05; done\' "$1"'
    with pytest.raises(JobError, match="all its ranks have ended, but mpirun waits"):
        launch.run(job(tmp_path, rank), os.environ, timeout_s=LIMIT_S)
    assert (tmp_path / "rank").exists()
    daemon = int((tmp_path / "daemon").read_text())
    until(lambda: not psutil.pid_exists(daemon) or not launcher.lives(psutil.Process(daemon)))


def test_a_launcher_whose_ranks_were_never_seen_gets_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE_S", 0.0)
    monkeypatch.setattr(launch, "LOOK_S", 0.1)
    assert launch.run(["sh", "-c", "sleep 1; exit 3"], os.environ, timeout_s=LIMIT_S) == 3


def test_a_rank_with_another_environment_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE_S", 0.2)
    mark = uuid.uuid4().hex
    watch = launch.Watch(mark)
    program = f"until [ -e {tmp_path}/seen ]; do sleep 0.05; done; exec env -i sleep 600"
    variables = {**os.environ, launch.MARK: mark, "OMPI_COMM_WORLD_RANK": "0"}
    rank = subprocess.Popen(["sh", "-c", program], env=variables)
    try:
        assert not watch.without_ranks()
        (tmp_path / "seen").touch()
        until(lambda: not launcher.marked(launch.MARK, mark))
        time.sleep(0.3)
        assert not watch.without_ranks()
        rank.kill()
        until(watch.without_ranks)  # although its status has not been read yet
    finally:
        rank.kill()
        rank.wait()


def test_the_processes_of_a_job_are_those_with_its_mark() -> None:
    mark = uuid.uuid4().hex
    processes = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, launch.MARK: value}) for value in (mark, f"{mark}0")
    ]
    try:
        assert [process.pid for process in launcher.marked(launch.MARK, mark)] == [processes[0].pid]
        launch._end_members(mark)
        assert processes[0].wait(LIMIT_S) == -9
        assert processes[1].poll() is None
        assert launcher.marked(launch.MARK, mark) == {}
    finally:
        for process in processes:
            process.kill()
            process.wait()
