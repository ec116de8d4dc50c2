"""How rehearsed clusters end: their status, what they say, and that nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from hvd_ext.cluster import folder as folders, launch, state as states
from hvd_ext.cluster.rehearsal import Cluster, ClusterError
from hvd_ext.cluster.spec import Spec
from hvd_ext.runner.launcher import marked
from tests.mpi.benches import rehearsal
from tests.mpi.faulty import members
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.cluster

MARK = "HVD_EXT_TEST_MARK"
NOBODY = 65534


def test_the_command_says_what_it_made_and_hands_output_and_status_on(short: Path) -> None:
    done = rehearsal(short, "--hosts", "1,1", "--rate", "10mbit", "--", "echo", "--rate", "out")
    assert sorted(done.stdout) == sorted("--rate out\n" * 2)  # lines of two ranks may mix
    assert "hvd_ext cluster: 2 ranks on 2 hosts (h1: 0, h2: 1)" in done.stderr
    assert "each host's link: 10mbit each way" in done.stderr
    assert "hvd_ext cluster: burst 16kb (suits 10mbit), queue" in done.stderr
    wider = ("--hosts", "1,1", "--rate", "10mbit", "--burst", "32kb")
    chosen = rehearsal(short, *wider, "sh", "-c", "exit 7", status=7)
    assert "hvd_ext cluster: burst 32kb, queue" in chosen.stderr
    assert list(short.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_what_another_user_left_is_left_alone_and_the_job_runs(short: Path) -> None:
    short.chmod(0o1777)
    target = short / "of-root"
    target.mkdir(mode=0o700)
    script = f"""mkdir {folders.PREFIX}fifo {folders.PREFIX}link; touch {folders.PREFIX}fifo/state.json
mkfifo {folders.PREFIX}fifo/lock; ln -s {target}/made {folders.PREFIX}link/lock"""
    subprocess.run(["sh", "-ec", script], cwd=short, user=NOBODY, group=NOBODY, extra_groups=[], check=True)
    done = rehearsal(short, "--hosts", "1,1", "--", "true")
    words = [f"{folders.PREFIX}{name} belongs to user {NOBODY}" for name in ("fifo", "link")]
    assert f"hvd_ext cluster: left alone in {short}: {'; '.join(words)}\n" in done.stderr
    assert list(target.iterdir()) == []
    assert len(list(short.iterdir())) == 3


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_nothing_is_left_however_it_ends(number: signal.Signals, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    up = f'touch "{short}/up.$OMPI_COMM_WORLD_RANK"; exec sleep 600'
    command = [sys.executable, "-m", "hvd_ext", "cluster", "run", "--hosts", "1,1", "--rate", "10mbit"]
    with (short / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--", "sh", "-c", up],
            env={**os.environ, "TMPDIR": str(short), MARK: mark},
            stdout=log,
            stderr=subprocess.STDOUT,
            # The shell that runs tests in the background ignores SIGINT, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        until(lambda: (short / "up.0").exists() and (short / "up.1").exists(), "both ranks run")
        state = states.read(next(short.glob(f"{folders.PREFIX}*/state.json")))
        assert len(members(state.namespaces["pid"])) > 4
        process.send_signal(number)
        code = process.wait(LIMIT_S)
        assert code == (-9 if number == signal.SIGKILL else 128 + number), (short / "log").read_text()
        until(lambda: not marked(MARK, mark), "its processes end")
        assert members(state.namespaces["pid"]) == []
    finally:
        for left in marked(MARK, mark):
            left.kill()
        process.wait()
    text = Path("/proc/self/mounts").read_text()
    assert str(short) not in text
    assert not {"core", "h1", "h2"} & set(psutil.net_if_addrs())
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    assert [str(path) for path in folders.remove_stale()] == ([state.folder] if number == signal.SIGKILL else [])
    assert list(short.glob(f"{folders.PREFIX}*")) == []


def test_an_exception_inside_the_block_ends_the_cluster() -> None:
    cluster = Cluster(Spec((1, 1)))
    with pytest.raises(ValueError, match="told to fail"), cluster:  # noqa: PT012
        state = cluster.state
        raise ValueError("told to fail")
    assert members(state.namespaces["pid"]) == []
    assert not Path(state.folder).exists()


def test_a_link_that_cannot_be_made_is_an_error_in_words_and_leaves_nothing(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    too_fast = Cluster(Spec((1, 1), rate="99999999999999gbit"))
    with pytest.raises(ClusterError, match=r"network of switch: tc failed: .*rate"), too_fast:
        pass
    assert list(short.iterdir()) == []


def test_a_job_that_does_not_end_is_ended_and_the_cluster_is_good_for_another() -> None:
    with Cluster(Spec((1, 1))) as cluster:
        with pytest.raises(launch.JobError, match="did not end within 1 s"):
            cluster.mpirun(["sleep", "600"], timeout_s=1, output=subprocess.DEVNULL)
        assert cluster.mpirun(["true"], timeout_s=LIMIT_S) == 0


def test_without_root_it_works_where_the_kernel_lets_users_have_namespaces(short: Path) -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("needs setpriv of util-linux")
    # Through a shell: the first program is still run with root's rights.
    user = (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "sh", "-c", 'exec "$@"', "sh")
    probe = [*user, sys.executable, "-c", "import hvd_ext.cluster.rehearsal as r, sys; sys.exit(r.obstacle() or 0)"]
    can = subprocess.run(probe, capture_output=True, text=True, check=False)
    if can.returncode != 0:
        pytest.skip(f"another user cannot run this Python, or has no namespaces: {can.stderr.strip()[-200:]}")
    short.chmod(0o777)
    hosts = ("--hosts", "1,1", "--rate", "10mbit")
    done = rehearsal(short, *hosts, "--", "sh", "-c", "hostname; exit 5", prefix=user, status=5)
    assert set(done.stdout) <= set("h12\n")  # lines of two ranks may mix
