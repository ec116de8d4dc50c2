"""Jobs that are ended from outside: by SIGKILL in the middle of a save, and by a signal to the launcher.

The signal is SIGUSR1, which launchers pass on at once. Upon SIGTERM Open MPI gives its ranks one second, and on a slow
machine that is no test of ours.
"""

from __future__ import annotations

from pathlib import Path

from hvd_ext.state import folder, manifest
from tests.mpi import jobs

# Argument: "die" for a job whose rank 1 is killed in its third save; else a job that ends its launcher.
PROGRAM = """
import logging, os, signal, sys
from pathlib import Path

import keras
import numpy as np
import hvd_ext as hvd
from hvd_ext.state import arrays

logging.basicConfig(level=logging.INFO, format="%(message)s")
hvd.init()
dies = sys.argv[1] == "die"
directory = Path(sys.argv[2])

class Ends(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if not dies and epoch == 3 and hvd.rank() == 0:
            os.kill(os.getppid(), signal.SIGUSR1)

write = arrays.write
def killed(file, sections):
    write(file, sections)
    if dies and hvd.rank() == 1 and (directory / "checkpoint-000002").exists():
        os.kill(os.getpid(), signal.SIGKILL)
arrays.write = killed

model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.5)), "mse")
x = np.arange(24, dtype=np.float32).reshape(8, 3) / 16 + hvd.rank()
checkpoint = hvd.callbacks.Checkpoint(directory, every=1 if dies else None)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(), Ends(), checkpoint]
model.fit(x, x[:, :2], batch_size=2, epochs=10**6, shuffle=False, verbose=0, callbacks=callbacks)
iterations = hvd.allgather_object((int(model.optimizer.iterations.numpy()), model.get_weights()[0].tolist()))
print("equal on all ranks:", all(each == iterations[0] for each in iterations))
print("stopped by", checkpoint.stopped_by, "after", iterations[0][0], flush=True)
sys.exit(checkpoint.exit_status)
"""


def test_a_killed_save_leaves_the_older_checkpoints_and_the_next_job_saves_on_the_launchers_signal(
    tmp_path: Path,
) -> None:
    script, directory = tmp_path / "program.py", tmp_path / "checkpoints"
    script.write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "first").mkdir()
    jobs.run(tmp_path / "first", [str(script), "die", str(directory)]).must_fail()
    assert folder.serials(directory) == [2, 1]
    assert [path.name for path in directory.glob(".writing-*")] != []
    newest = folder.newest(directory)
    assert newest == folder.path_of(directory, 2)
    assert (manifest.read(newest).epoch, manifest.read(newest).step) == (2, 0)
    manifest.check(newest, manifest.read(newest), [manifest.rank_file(0), manifest.rank_file(1)])

    (tmp_path / "second").mkdir()
    job = jobs.run(tmp_path / "second", [str(script), "signal", str(directory)], forked=False).must_fail()
    assert "checkpoint-000002: restored: epoch 2, batch 0" in job.outputs[0], job.text()
    assert all("equal on all ranks: True" in output for output in job.outputs), job.text()
    saved = manifest.read(folder.path_of(directory, 3))
    assert saved.reason == "SIGUSR1"
    assert all(f"stopped by SIGUSR1 after {4 * saved.epoch + saved.step}" in output for output in job.outputs)
    assert list(directory.glob(".writing-*")) == []
