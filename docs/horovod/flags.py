"""The rows of `horovodrun`'s flags; with MPI, `horovodrun` can still launch our jobs."""

from __future__ import annotations

from collections.abc import Iterator

from docs.horovod.row import OTHER, REFUSED, SAME, Row

SECTION = "Flags of horovodrun"

# Flags that horovodrun handles itself when it launches an MPI job.
LAUNCHING = (
    "--num-proc --hosts --hostfile --mpi --mpi-args --network-interfaces --network-interface --ssh-port "
    "--ssh-identity-file --tcp --binding-args --output-filename --prefix-output-with-timestamp --start-timeout "
    "--disable-cache --config-file --verbose"
)
# flag -> the variable that it sets for the ranks
VARIABLES: dict[str, str] = {
    "--fusion-threshold-mb": "HOROVOD_FUSION_THRESHOLD",
    "--cycle-time-ms": "HOROVOD_CYCLE_TIME",
    "--cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "--hierarchical-allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "--no-hierarchical-allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "--hierarchical-allgather": "HOROVOD_HIERARCHICAL_ALLGATHER",
    "--no-hierarchical-allgather": "HOROVOD_HIERARCHICAL_ALLGATHER",
    "--torus-allreduce": "HOROVOD_TORUS_ALLREDUCE",
    "--no-torus-allreduce": "HOROVOD_TORUS_ALLREDUCE",
    "--autotune": "HOROVOD_AUTOTUNE",
    "--no-autotune": "HOROVOD_AUTOTUNE",
    "--autotune-log-file": "HOROVOD_AUTOTUNE_LOG",
    "--autotune-warmup-samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "--autotune-steps-per-sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "--autotune-bayes-opt-max-samples": "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "--autotune-gaussian-process-noise": "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--timeline-mark-cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
    "--no-timeline-mark-cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
    "--no-stall-check": "HOROVOD_STALL_CHECK_DISABLE",
    "--stall-check": "HOROVOD_STALL_CHECK_DISABLE",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "--mpi-threads-disable": "HOROVOD_MPI_THREADS_DISABLE",
    "--no-mpi-threads-disable": "HOROVOD_MPI_THREADS_DISABLE",
    "--num-nccl-streams": "HOROVOD_NUM_NCCL_STREAMS",
    "--thread-affinity": "HOROVOD_THREAD_AFFINITY",
    "--gloo-timeout-seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "--log-level": "HOROVOD_LOG_LEVEL",
    "--log-with-timestamp": "HOROVOD_LOG_HIDE_TIME",
    "--log-without-timestamp": "HOROVOD_LOG_HIDE_TIME",
    "--log-hide-timestamp": "HOROVOD_LOG_HIDE_TIME",
    "--no-log-hide-timestamp": "HOROVOD_LOG_HIDE_TIME",
}
ELASTIC = (
    "--min-np --max-np --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range "
    "--host-discovery-script"
)
ABOUT_HOROVOD = "--version --check-build"


def _rows() -> Iterator[Row]:
    for flag in LAUNCHING.split():
        yield Row(SECTION, f"horovodrun {flag}", f"horovodrun {flag}", SAME)
    for flag in ABOUT_HOROVOD.split():
        note = "the flag describes Horovod; python -m hvd_ext doctor describes hvd_ext"
        yield Row(SECTION, f"horovodrun {flag}", "python -m hvd_ext doctor", OTHER, note)
    yield Row(SECTION, "horovodrun --jsrun", "horovodrun --jsrun", OTHER, "starts an MPI job; we have not tried it")
    for flag, variable in VARIABLES.items():
        yield Row(SECTION, f"horovodrun {flag}", variable, OTHER, "sets this variable: see above")
    yield Row(SECTION, "horovodrun --gloo", "", REFUSED, "hvd_ext runs on MPI: horovodrun --mpi, or mpirun")
    for flag in ELASTIC.split():
        yield Row(SECTION, f"horovodrun {flag}", "", REFUSED, "the same flag of python -m hvd_ext run (elastic.md)")


ROWS = tuple(_rows())
