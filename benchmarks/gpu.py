"""Builds, checks and times the GPU library on a machine that has nothing but Python, nvcc and a GPU.

    benchmarks/gpu.sh [FILE.json]

Every phase has a time limit, and the file is written after each. A phase whose tool is not there is said to be missing,
and the others run. Ends with 0 if all that ran is right, with 1 if something failed or did not end in time, with 2 if
nothing could be checked because nvcc or a GPU is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build" / "gpu_benchmark"
LIBRARY, PROGRAM, RANKS = BUILT / "libhvd_ext_gpu.so", BUILT / "on_gpu", BUILT / "ranks_on_gpu"
LIBRARIES = ROOT / "hvd_ext" / "lib"
BUILT_FILES = ("libhvd_ext_ops.so", "libhvd_ext_gpu.so")
INSTALLED = Path("/usr/local")  # where CUDA's installer puts it
NO_GPU = 2  # the exit status of on_gpu and of compare_torch.py where something they need is missing
TOTAL_S = 470.0
KEPT_CHARACTERS = 3000
# What a phase may take; their sum without the last is below TOTAL_S. A kernel that hangs ends at its phase's limit.
LIMITS_S = {"nvidia-smi": 10.0, "build": 110.0, "check": 60.0, "times": 20.0, "torch": 50.0, "sanitizer": 30.0}
LIMITS_S |= {"ranks": 20.0, "ops": 20.0, "job": 45.0}
# The last phase has what is left, of which the first step with each size of pictures takes most.
LAST = "training"
LIMITS_S[LAST] = 400.0
# The program stops itself earlier, and then says how far it came: starting CUDA takes seconds too.
CHECKING_S, SANITIZED_S = 50, 15
# Ranks that share the GPU, the density of what they send, and what they add up: the gradients of ResNet-50.
SHARING, GRADIENTS, SUMS = ((2, ""), (4, ""), (2, "0.01")), 25_557_032, 20
STEPS = "50"  # of each training of the job
# How many arrays the updates of LARS and of LAMB read and write; a copy reads one and writes one.
LAYERWISE = {"lars": 5, "lamb": 10}
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
UNSUPPORTED = "Device not supported"
PASSED, FAILED, LATE, MISSING = "passed", "failed", "out of time", "missing"


@dataclass
class Phase:
    """What became of a phase: `status` is one of the four words above, `why` tells it where it is not PASSED."""

    phase: str
    status: str
    seconds: float = 0.0
    limit_seconds: float = 0.0
    command: str = ""
    exit_status: int | None = None
    why: str = ""
    output: str = ""
    more: dict[str, Any] = field(default_factory=dict)


class Clock:
    """The time that is left of the eight minutes."""

    def __init__(self, total_s: float) -> None:
        self.end = time.monotonic() + total_s

    def limit(self, phase: str) -> float:
        """Gives the seconds that a phase may take now."""
        return max(0.0, min(LIMITS_S[phase], self.end - time.monotonic()))


def run(phase: str, command: list[str], limit_s: float) -> Phase:
    """Runs a command in a process group of its own, and ends all of it at the limit.

    Args:
        phase: its name in the result.
        command: to run.
        limit_s: seconds.

    Returns:
        What became of it, with its output; it has no exit status where it was killed.
    """
    began = time.monotonic()
    named = shlex.join([Path(command[0]).name, *command[1:]])
    done = Phase(phase, PASSED, limit_seconds=round(limit_s, 1), command=_in_repository(named)[:KEPT_CHARACTERS])
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        done.status, done.why = FAILED, f"it does not start: {error}"
        return done
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        done.status, done.why = LATE, f"it did not end within {limit_s:.0f} s and was killed"
    done.output, done.seconds = _in_repository(output), round(time.monotonic() - began, 2)
    if done.status == PASSED:
        done.exit_status = process.returncode
    if done.exit_status:
        done.status, done.why = FAILED, f"exit status {done.exit_status}: {_last_line(done.output)}"
    return done


def rows_of(output: str) -> list[dict[str, Any]]:
    """Finds the lines of output that are JSON objects."""
    rows = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # a line that was cut off when its writer was killed
    return rows


def tool(name: str) -> str | None:
    """Finds a tool of CUDA: on PATH, in $CUDA_HOME/bin, $CUDA_PATH/bin, or below /usr/local.

    Args:
        name: of the tool.

    Returns:
        Its path; None where it is not there.
    """
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [INSTALLED / "cuda", *sorted(INSTALLED.glob("cuda-*"), reverse=True)]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(str(home / "bin") for home in homes))


def described(clock: Clock) -> tuple[Phase, dict[str, Any]]:
    """Asks nvidia-smi for the GPU and its driver.

    Args:
        clock: the time that is left.

    Returns:
        The phase, and what was found of name, driver, memory and compute capability.
    """
    found = tool("nvidia-smi")
    if found is None:
        return Phase("nvidia-smi", MISSING, why="nvidia-smi was not found; the kernels are built for sm_90"), {}
    names = ("name", "driver_version", "memory.total", "compute_cap", "clocks.max.sm", "clocks.max.memory")
    command = [found, f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    phase = run("nvidia-smi", command, clock.limit("nvidia-smi"))
    cells = [cell.strip() for cell in phase.output.splitlines()[0].split(",")] if phase.output.strip() else []
    if phase.status == FAILED or (phase.status == PASSED and len(cells) != len(names)):
        phase.status, phase.why = MISSING, f"nvidia-smi names no GPU: {_last_line(phase.output)}"
    if phase.status != PASSED:
        return phase, {}
    phase.output = ""
    return phase, dict(zip(names, cells, strict=True))


def built(nvcc: str, architecture: str, clock: Clock) -> list[Phase]:
    """Compiles the library and the program that checks it, both at once.

    Args:
        nvcc: path of the compiler.
        architecture: compute capability without the point.
        clock: the time that is left.

    Returns:
        A phase for each.
    """
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir(parents=True)
    sources = sorted(str(path) for path in (ROOT / "tf_ops").glob("*/*.cu.cc"))
    program = ROOT / "tests" / "native" / "gpu" / "on_gpu.cu.cc"
    # The flags of tf_ops/CMakeLists.txt, for this GPU alone; -lineinfo lets compute-sanitizer name lines.
    flags = ["-std=c++17", "-O3", "-fmad=false", "-cudart", "static", "-Xcompiler=-fPIC,-ffp-contract=off", "-lpthread"]
    flags += ["-lineinfo", "-Xptxas", "-v"]
    flags += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}", "-I", str(ROOT / "tf_ops")]
    more = {
        "build library": ["--shared", "-x", "cu", "-o", str(LIBRARY), *sources],
        "build program": [
            "-I",
            str(ROOT / "tests" / "native"),
            "-x",
            "cu",
            "-o",
            str(PROGRAM),
            str(program),
            *sources,
        ],
    }
    objects = {str(BUILT / f"{path.parent.name}_{path.stem}.o"): path for path in _engine_sources()}
    more |= {name: ["-x", "c++", "-c", "-o", name, str(path)] for name, path in objects.items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        phases = list(pool.map(lambda item: run(item[0], [nvcc, *flags, *item[1]], clock.limit("build")), more.items()))
    parts = phases[2:]
    linked = next((part for part in parts if part.status != PASSED), None)
    if linked is None:
        link = ["-Xlinker", "-rpath=$ORIGIN", "-o", str(RANKS), *objects, str(LIBRARY), "-ldl"]
        linked = run("build ranks", [nvcc, *flags, *link], clock.limit("build"))
        linked.seconds += sum(part.seconds for part in parts)
    linked.phase = "build ranks"
    phases = [*phases[:2], linked]
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill stores", phases[0].output)]
    phases[0].more = {"architecture": f"sm_{architecture}", "kernels": len(spills), "spilled_bytes": sum(spills)}
    for phase in phases:  # what ptxas tells is in `more`; the file keeps what went wrong
        phase.output = "" if phase.status == PASSED else phase.output
    return phases


def _engine_sources() -> list[Path]:
    """Lists the sources of the engine, without MPI and TensorFlow, and of the program of ranks that share the GPU."""
    folders = [ROOT / "tf_ops" / name for name in ("plan", "kernels", "shm", "engine")]
    sources = [path for folder in folders for path in sorted(folder.glob("*.cc")) if not path.name.endswith(".cu.cc")]
    return [*sources, ROOT / "tests" / "native" / "gpu" / "ranks_on_gpu.cc"]


def checked(clock: Clock) -> Phase:
    """Runs all problems on the GPU.

    Args:
        clock: the time that is left.

    Returns:
        The phase; FAILED where an answer was wrong, LATE where problems were left over.
    """
    phase = run("check", [str(PROGRAM), "check", str(CHECKING_S)], clock.limit("check"))
    phase.more = _counts(phase.output)
    if phase.exit_status == NO_GPU:
        phase.status, phase.why = MISSING, _last_line(phase.output)
    elif phase.status == PASSED and not phase.more:
        phase.status, phase.why = FAILED, "it did not say what it checked"
    elif phase.status == PASSED and phase.more["checked"] < phase.more["of"]:
        phase.status, phase.why = LATE, "{checked} of {of} problems were checked, and were right".format(**phase.more)
    return phase


def sanitized(name: str, clock: Clock) -> Phase:
    """Runs short problems under a tool of compute-sanitizer, as many as the time lets it.

    Args:
        name: of the tool.
        clock: the time that is left.

    Returns:
        The phase; FAILED where the tool found anything or did not come to its summary.
    """
    found = tool("compute-sanitizer")
    if found is None:
        return Phase(name, MISSING, why="compute-sanitizer was not found")
    command = [found, "--tool", name, "--error-exitcode", "77", str(PROGRAM), "few", str(SANITIZED_S)]
    phase = run(name, command, clock.limit("sanitizer"))
    seen = FOUND.search(phase.output)
    phase.more = {**({"found": int(seen[1])} if seen else {}), **_counts(phase.output)}
    if UNSUPPORTED in phase.output:
        phase.status, phase.why = MISSING, f"compute-sanitizer cannot be used here: {UNSUPPORTED}"
    elif phase.exit_status == NO_GPU:
        phase.status, phase.why = MISSING, _last_line(phase.output)
    elif seen and int(seen[1]):
        phase.status, phase.why = FAILED, f"{name} found {seen[1]} errors or hazards"
    elif phase.status == PASSED and not seen:
        phase.status, phase.why = FAILED, f"{name} ended without its summary"
    elif phase.status == PASSED and not phase.more.get("checked"):
        phase.status, phase.why = FAILED, "no problem was run in the time"
    return phase


def timed(phase: str, command: list[str], clock: Clock) -> tuple[Phase, list[dict[str, Any]]]:
    """Runs a program that prints a line of JSON for each row.

    Args:
        phase: "times", "torch", "ranks" or the last one.
        command: of the program.
        clock: the time that is left.

    Returns:
        The phase, and the rows; of torch those that differ say `"same": false`, and the phase is FAILED.
    """
    done = run(phase, command, clock.limit(phase))
    told = rows_of(done.output)
    rows = [{"phase": phase, **row} for row in told if "elements" in row]
    done.more = {key: value for row in told if "elements" not in row for key, value in row.items()}
    if done.exit_status == NO_GPU:
        done.status, done.why = MISSING, _last_line(done.output)
    elif done.status == PASSED and not rows:
        done.status, done.why = FAILED, "it printed no row"
    if done.status in (PASSED, LATE):
        done.output = ""
    return done, rows


def with_tensorflow(clock: Clock) -> Iterator[tuple[Phase, list[dict[str, Any]]]]:
    """Runs what needs a Python with TensorFlow and the built package: ops, a job of two ranks, and training steps.

    Args:
        clock: the time that is left.

    Yields:
        The phases, each with its rows.
    """
    absent = [name for name in ("tensorflow", "keras") if importlib.util.find_spec(name) is None]
    absent += [name for name in BUILT_FILES if not (LIBRARIES / name).is_file()]
    ops = Phase("ops", MISSING, why=f"not there: {', '.join(absent)}")
    if not absent:
        ops = run("ops", [sys.executable, "-m", "tests.native.gpu.ops"], clock.limit("ops"))
        ops.more = _counts(ops.output)
        if ops.exit_status == NO_GPU:
            ops.status, ops.why = MISSING, _last_line(ops.output)
    yield ops, []
    if ops.status == MISSING:
        yield Phase("job", MISSING, why=ops.why), []
        yield Phase(LAST, MISSING, why=ops.why), []
        return
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if mpirun is None:
        yield Phase("job", MISSING, why="mpirun was not found"), []
    else:
        # One GPU for both ranks, of whose memory TensorFlow would take all; and the same kernels in both trainings.
        settings = {
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            "TF_DETERMINISTIC_OPS": "1",
            "XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0",
        }
        passed = [word for name, value in settings.items() for word in ("-x", f"{name}={value}")]
        os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")  # as in containers
        command = [mpirun, "-np", "2", "--oversubscribe", *passed, sys.executable, "-m", "tests.native.gpu.job"]
        yield run("job", [*command, str(LIBRARIES / BUILT_FILES[-1]), STEPS], clock.limit("job")), []
    yield timed(LAST, [sys.executable, str(ROOT / "benchmarks" / "gpu_training.py")], clock)


def _counts(output: str) -> dict[str, Any]:
    return next((row for row in rows_of(output) if "checked" in row), {})


def _in_repository(text: str) -> str:
    return text.replace(f"{ROOT}{os.sep}", "")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def release(nvcc: str, clock: Clock) -> str:
    """Gives the release of CUDA that nvcc is of."""
    told = run("nvcc", [nvcc, "--version"], clock.limit("nvidia-smi"))
    found = re.search(r"release ([\d.]+)", told.output)
    return found[1] if found else "unknown"


def begun() -> dict[str, Any]:
    """Describes the run before it begins: date, command, machine, commit."""
    try:
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["benchmarks/gpu.sh", *sys.argv[1:]]),
        "commit": commit or "unknown",
        "machine": {"system": f"{platform.system()} {platform.release()}", "cores": os.cpu_count()},
        "versions": {"python": platform.python_version()},
    }


def saved(path: Path, run_: dict[str, Any], phases: list[Phase], rows: list[dict[str, Any]]) -> None:
    """Writes the file, one run, phase or row a line.

    Args:
        path: of the file.
        run_: from `begun`, with what became known since.
        phases: as far as they are.
        rows: times, as far as they are.
    """
    told = []
    for phase in phases:
        one = asdict(phase)
        one.update(one.pop("more"))
        one["output"] = one["output"][-KEPT_CHARACTERS:]
        told.append({"run": 0, **one})
    lists = {"runs": [run_], "phases": told, "rows": [{"run": 0, **row} for row in rows]}
    parts = ['"benchmark": "top-k, norms, updates and sums on a GPU"']
    for name, items in lists.items():
        lines = ",\n".join(f"  {json.dumps(item)}" for item in items)
        parts.append(f'"{name}": [\n{lines}\n ]' if items else f'"{name}": []')
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".part")
    half.write_text("{\n " + ",\n ".join(parts) + "\n}\n", encoding="utf-8")
    half.replace(path)


def table(rows: list[dict[str, Any]]) -> str:
    """Writes the times as tables of Markdown: of top-k, norms, updates, ranks that share the GPU, and training steps.

    Args:
        rows: of the phases times, torch and ranks.

    Returns:
        The tables; a cell is "-" where a phase did not measure it.
    """
    headings = ("phase", "elements", "k", "topk ms", "copy ms", "no-op ms", "torch.topk ms", "x copy", "x torch.topk")
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for row in rows:
        if "topk_ms" not in row and "torch_ms" not in row:
            continue
        ours, copy, torch = (row.get(name) for name in ("topk_ms", "copy_ms", "torch_ms"))
        cells = [row["phase"], f"{row['elements']:,}", f"{row['k']:,}"]
        cells += [_number(time_ms) for time_ms in (ours, copy, row.get("noop_ms"), torch)]
        cells += [_number(ours / other if other else None) for other in (copy, torch)]
        lines.append(f"| {' | '.join(cells)} |")
    headings = ("tensors", "elements in all", "norms ms", "copy ms", "no-op ms", "x copy")
    lines += ["", f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for row in rows:
        if "norms_ms" in row:
            ours, copy = row["norms_ms"], row["copy_ms"]
            cells = [f"{row['tensors']:,}", f"{row['elements']:,}"]
            cells += [_number(time_ms) for time_ms in (ours, copy, row["noop_ms"], ours / copy if copy else None)]
            lines.append(f"| {' | '.join(cells)} |")
    headings = ("variables", "elements in all", "of", "ms", "copy ms", "no-op ms", "its passes ms", "x passes")
    lines += ["", f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for row in rows:
        for name, passes in LAYERWISE.items():
            if f"{name}_ms" in row:
                ours, least = row[f"{name}_ms"], row["copy_ms"] * passes / 2
                cells = [f"{row['variables']:,}", f"{row['elements']:,}", name.upper(), _number(ours)]
                cells += [_number(row["copy_ms"]), _number(row["noop_ms"]), _number(least), _number(ours / least)]
                lines.append(f"| {' | '.join(cells)} |")
    headings = (
        "ranks",
        "density",
        "elements",
        "on the GPU ms",
        "through the host ms",
        "faster",
        "its passes ms",
        "x passes",
    )
    lines += ["", f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for row in rows:
        if "ranks" in row:
            ranks, density = row["ranks"], row.get("density")
            on_gpu, on_host, copy = (
                statistics.median(row[name]) * 1e3 for name in ("on_gpu_seconds", "on_host_seconds", "copy_seconds")
            )
            # Of each rank a copy of all into the bucket, and of a part of each other rank a sum and a copy: two, three
            # and two elements are read or written, and two by the copy that was measured. With top-k, of each rank the
            # same copy, three elements of error feedback, 1.5 of the selection, one that is cleared and a result.
            passes = copy * (ranks * (1 + 5.5 / 2) if density else ranks + 2.5 * (ranks - 1))
            cells = [str(ranks), f"{density:g}" if density else "-", f"{row['elements']:,}", _number(on_gpu)]
            cells += [_number(on_host), _number(on_host / on_gpu), _number(passes), _number(on_gpu / passes)]
            lines.append(f"| {' | '.join(cells)} |")
    headings = ("pixels", "pictures a step", "plain Keras ms", "hvd_ext ms", "its update ms", "of its speed")
    lines += ["", f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for row in rows:
        if "ours_step_ms" in row:
            cells = [str(row["pixels"]), str(row["batch"]), _number(row["plain_step_ms"])]
            cells += [_number(row["ours_step_ms"]), _number(row["update_step_ms"]), f"{row['speed']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def measured(path: Path, clock: Clock) -> int:
    """Runs all phases and writes the file after each.

    Args:
        path: of the file.
        clock: the time that is left.

    Returns:
        The exit status.
    """
    phases: list[Phase] = []
    rows: list[dict[str, Any]] = []
    about = begun()

    def tell(phase: Phase, more: list[dict[str, Any]] | None = None) -> str:
        phases.append(phase)
        rows.extend(more or [])
        numbers = ", ".join(f"{name} {value}" for name, value in phase.more.items())
        print(f"{phase.phase:14} {phase.status:12} {phase.seconds:6.1f} s  {phase.why or numbers}", flush=True)
        if phase.status == FAILED and phase.output:
            print(phase.output[-KEPT_CHARACTERS:], flush=True)
        saved(path, about, phases, rows)
        return phase.status

    described_phase, about["gpu"] = described(clock)
    tell(described_phase)
    nvcc = tool("nvcc")
    if nvcc is None:
        tell(Phase("build library", MISSING, why="nvcc was not found on PATH, in $CUDA_HOME/bin or below /usr/local"))
        built_all = False
    else:
        about["versions"]["cuda"] = release(nvcc, clock)
        architecture = about["gpu"].get("compute_cap", "9.0").replace(".", "")
        library, program, sharing = [tell(phase) == PASSED for phase in built(nvcc, architecture, clock)]
        built_all = library and program
    if not built_all:
        for name in ("check", "times", "torch", "ranks", *TOOLS):
            tell(Phase(name, MISSING, why="what it runs was not built"))
    else:
        tell(checked(clock))
        # Times come before the sanitizer, so that a slow one costs no figures.
        tell(*timed("times", [str(PROGRAM), "times"], clock))
        compare = [sys.executable, str(ROOT / "tests" / "native" / "gpu" / "compare_torch.py")]
        tell(*timed("torch", [*compare, "--library", str(LIBRARY)], clock))
        for ranks, density in SHARING:
            if sharing:
                command = [str(RANKS), str(ranks), str(GRADIENTS), str(SUMS), *filter(None, [density])]
                tell(*timed("ranks", command, clock))
            else:
                tell(Phase("ranks", MISSING, why="what it runs was not built"))
        for name in TOOLS:
            tell(sanitized(name, clock))
    for phase, more in with_tensorflow(clock):
        tell(phase, more)
    if rows:
        print(f"\n{table(rows)}")
    print(f"\nresult: {path}")
    if any(phase.status in (FAILED, LATE) for phase in phases):
        return 1
    return 0 if any(phase.phase == "check" and phase.status == PASSED for phase in phases) else 2


def main() -> int:
    """Reads the arguments and runs all phases; the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "out" / "gpu.json", help="the result")
    return measured(parser.parse_args().file, Clock(TOTAL_S))


if __name__ == "__main__":
    sys.exit(main())
