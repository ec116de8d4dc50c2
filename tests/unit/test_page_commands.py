"""The Python blocks and the commands of the pages: what runs them, or why nothing does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from benchmarks.studies.__main__ import app as studies
from tests.unit.test_help import APPS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)

# page -> the test that runs its Python blocks, all of them
BLOCKS = {
    "README.md": "tests/ranks/test_pages.py",
    "docs/buckets.md": "tests/ranks/test_replanning.py",
    "docs/data.md": "tests/ranks/test_data_page.py",
    "docs/elastic.md": "tests/unit/elastic/test_page.py",
    "docs/gpu.md": "tests/ranks/test_gpu_machines.py",
    "docs/launch.md": "tests/mpi/test_run.py",
    "docs/optimizers.md": "tests/ranks/test_pages.py",
    "docs/saving.md": "tests/unit/state/test_page.py",
    "docs/stragglers.md": "tests/ranks/test_pages.py",
    "docs/compression.md": "tests/ranks/test_topk_page.py",
    "docs/local_steps.md": "tests/ranks/test_pages.py",
    "docs/topk.md": "tests/ranks/test_topk_page.py",
    "docs/training.md": "tests/ranks/test_pages.py",
}
BLOCKS_NOT_RUN = {
    "docs/cluster.md": "its job is a file of the reader's; tests/mpi/test_cluster.py makes the same calls",
    "docs/migration.md": "shows the imports of Horovod that a script has before it is changed",
}

# commands that this file runs; `*` stands for anything
HERE = (
    "python -m hvd_ext plan --hosts *",
    "python -m hvd_ext * --help",
    "python -m hvd_ext simulate --hosts 4,4 --model resnet50",
    "python -m benchmarks.studies --help",
    "python examples/*.py --help",
)
# commands -> the test that runs the same program, on less data or fewer ranks where they take long
ELSEWHERE = {
    "python train.py": "tests/ranks/test_pages.py",
    "mpirun -np 2 --oversubscribe python train.py": "tests/ranks/test_pages.py",
    "python -m hvd_ext plan --topology *": "tests/unit/topology/test_read.py",
    "python -m hvd_ext simulate --*": "tests/unit/planning/test_simulate_command.py",
    "mpirun -np * python -m hvd_ext doctor": "tests/mpi/test_doctor.py",
    "python -m hvd_ext run *": "tests/unit/runner/test_supervisor.py",
    "* python -m hvd_ext probe*": "tests/mpi/test_probe.py",
    "python -m hvd_ext cluster run * -- python train.py": "tests/mpi/test_cluster.py",
    "python -m hvd_ext cluster run * -- python examples/digits.py*": "tests/mpi/test_demo.py",
    "python examples/digits.py": "tests/mpi/test_demo.py",
    "mpirun -np 2 --oversubscribe python examples/digits.py": "tests/mpi/test_demo.py",
    "mpirun -np 2 --oversubscribe python examples/custom_loop.py": "tests/mpi/test_examples.py",
    "mpirun -np 2 --oversubscribe python examples/process_sets.py": "tests/mpi/test_examples.py",
    "make demo": "tests/mpi/test_demo.py",
    "make recipe": "tests/mpi/test_recipe.py",
    "mpirun * python examples/dawnbench_resnet50.py *": "tests/mpi/test_recipe.py",
    "make fuzz": "tests/unit/test_fuzz.py",
    "make sanitize": "tests/native/test_sanitizers.py",
    "make docs": "tests/unit/test_docs.py",
    "python tests/golden/make.py": "tests/unit/planning/test_golden.py",
    "python examples/make_images.py *": "tests/unit/examples/test_make_images.py",
    "python examples/images_baseline.py *": "tests/unit/examples/test_images_baseline.py",
    "python examples/dawnbench_resnet50.py * --dry-run *": "tests/unit/examples/test_recipe_price.py",
    "python examples/dawnbench_resnet50.py * --calibrate": "tests/unit/examples/test_recipe_price.py",
    "*python -m hvd_ext bench allreduce*": "tests/mpi/test_bench.py",
    "python -m benchmarks.studies plot-allreduce *": "benchmarks/tests/test_plots.py",
    "python -m benchmarks.studies plot-breakdown *": "benchmarks/tests/test_plots.py",
    "*python -m benchmarks.studies schedule *": "benchmarks/tests/test_jobs.py",
    "python -m benchmarks.studies stragglers *": "benchmarks/tests/test_jobs.py",
    "python -m benchmarks.studies data *": "benchmarks/tests/test_data.py",
    "python -m benchmarks.studies topk *": "benchmarks/tests/test_topk.py",
    "python -m benchmarks.studies lars*": "benchmarks/tests/test_jobs.py",
    "python -m hvd_ext cluster run * -- python -m hvd_ext bench breakdown *": "tests/mpi/test_bench_commands.py",
    "python -m hvd_ext cluster run * -- python -m benchmarks.studies hitopk *": "benchmarks/tests/test_jobs.py",
    "python -m benchmarks.studies hitopk --topology *": "benchmarks/tests/test_hitopk.py",
    "python -m benchmarks.studies plot-hitopk *": "benchmarks/tests/test_plots.py",
    "python -m benchmarks.studies convergence *": "benchmarks/tests/test_jobs.py",
    "python -m benchmarks.studies recipe *": "benchmarks/tests/test_jobs.py",
    "python -m benchmarks.studies plot-convergence *": "benchmarks/tests/test_plots.py",
    "*benchmarks/gpu.sh*": "benchmarks/tests/test_gpu.py",
    "python tests/native/gpu/compare_torch.py *": "tests/native/gpu/test_library.py",
}
MINUTES = "is a measurement of minutes, whose figures are kept in benchmarks/results"
NOT_RUN = {
    "make setup": "a test cannot set up what it runs in; .ci/run does, from a fresh clone",
    "make test": "runs this test",
    "make test-benchmarks": "runs tests",
    "make check": "runs this test",
    "make lint": "is the second step of .ci/run",
    "make faults*": "runs tests for half an hour; tests/unit/test_planted_faults.py checks the patches",
    "python -m tests.faults *": "runs tests; tests/unit/test_planted_faults.py checks the patches",
    "python -m pytest *": "runs tests",
    "mpirun -np 4 --tag-output python train.py": "a flag of Open MPI's",
    "mpirun --map-by ppr:4:node python train.py": "a flag of Open MPI's, for hosts of the reader's",
    "HVD_EXT_TOPOLOGY=* python train.py": "a job of the reader's; tests/mpi/test_cluster.py reads such files in jobs",
    "HVD_EXT_TRACE=* python examples/digits.py": "tests/mpi/test_trace.py traces a shorter job",
    "python -m hvd_ext trace *": "needs the trace of a job; tests/unit/trace has the command",
    "python -m hvd_ext cluster run * -- python -m benchmarks.studies.prices *": MINUTES,
    "python -m benchmarks.studies.replan *": MINUTES,
    "mpirun * python -m benchmarks.studies.skew *": MINUTES,
    "python -m tests.native.gpu.ops*": "needs a GPU",
    "python benchmarks/gpu_training.py*": "needs a GPU",
    "build/gpu_benchmark/on_gpu *": "needs a GPU",
    "build/gpu_benchmark/ranks_on_gpu *": "needs a GPU",
    "pip install mpich": "another MPI would replace the one of the tests; docs/mpi.md says what was tried",
    "cmake * -DHVD_EXT_MPICXX=*": "needs MPICH",
    "ninja -C build/mpich all hvd_ext_mpi_tests": "needs MPICH",
    "mpiexec *": "needs MPICH",
    "docker *": "needs a container engine; tests/unit/test_docker.py checks what can be checked without",
}


def page(path: Path) -> str:
    """Names a page in the repository."""
    return path.relative_to(ROOT).as_posix()


def fenced(text: str, *languages: str) -> list[str]:
    """Gives the blocks of a page in one of these languages."""
    found = re.findall(r"^( *)```(\w+)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, word, body in found if word in languages]


def without_comments(block: str) -> list[str]:
    """Gives the commands of a block: continued lines joined, comments left out."""
    lines = re.sub(r" *\\\n\s*", " ", block).splitlines()
    return [stripped for line in lines if (stripped := re.sub(r"(^|\s+)#.*", "", line).strip())]


def commands(text: str) -> list[str]:
    """Gives the commands of a page: those of blocks for a shell, and of indented blocks that begin with a program."""
    found = [line for block in fenced(text, "sh", "bash") for line in without_comments(block)]
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?:^\n)((?:^    .*\n)+)", rest, re.MULTILINE):
        if re.match(r" *(python|mpirun|make) ", block):
            found += without_comments(block)
    return found


EVERY = sorted({one for path in PAGES for one in commands(path.read_text(encoding="utf-8"))})


def entries(command: str) -> list[str]:
    """Names the lists that know a command."""
    lists = {"HERE": HERE, "ELSEWHERE": ELSEWHERE, "NOT_RUN": NOT_RUN}
    return [name for name, known in lists.items() if any(fnmatchcase(command, pattern) for pattern in known)]


def walked(command: Any, words: list[str]) -> list[Any]:
    """Gives a command of typer and the commands below it that the words name; each must be there."""
    if not hasattr(command, "commands") or words[:1] in ([], ["--help"], ["x"]):
        return [command]
    assert words[0] in command.commands, f"{command.name} has no command {words[0]}"
    return [command, *walked(command.commands[words[0]], words[1:])]


def parsed(command: Any, words: list[str]) -> None:
    """Has a command of typer read its arguments, which it must know, without running it."""
    *_, command = within = walked(command, words)
    words = words[len(within) - 1 :]
    if "--help" in words:
        return
    try:
        command.make_context(command.name, list(words))
    except Exception as error:  # typer has its own copy of click's errors
        raise AssertionError(f"{command.name} {shlex.join(words)}: {getattr(error, 'message', error)}") from error


def ours(command: str) -> list[tuple[Any, list[str]]]:
    """Gives the programs of ours, with their arguments, within a command line, as behind `mpirun`."""
    found = []
    words = shlex.split(command)
    for place, word in enumerate(words):
        if word == "-m" and words[place + 1] == "hvd_ext":
            name, *rest = words[place + 2 :]
            found.append((APPS[name], rest) if name in APPS else (APPS[""], [name, *rest]))
        if word == "-m" and words[place + 1] == "benchmarks.studies":
            found.append((studies, words[place + 2 :]))
    return found


@pytest.mark.parametrize("path", [path for path in PAGES if "```python" in path.read_text(encoding="utf-8")], ids=page)
def test_the_python_blocks_of_a_page_run_in_a_test_or_have_a_reason(path: Path) -> None:
    blocks = fenced(path.read_text(encoding="utf-8"), "python")
    for block in blocks:
        compile(block, page(path), "exec")
    assert (page(path) in BLOCKS) != (page(path) in BLOCKS_NOT_RUN)
    if test := BLOCKS.get(page(path)):
        text = (ROOT / test).read_text(encoding="utf-8")
        counted = re.findall(rf'pages\.run\("{re.escape(page(path))}", (\d+)', text)
        if not counted:
            assert f'"{path.name}"' in text
            counted = re.findall(r"len\(cells\) == (\d+)", text)
        assert [int(count) for count in counted] == [len(blocks)]


@pytest.mark.parametrize("command", EVERY)
def test_a_command_of_a_page_runs_in_a_test_or_has_a_reason(command: str) -> None:
    known = entries(command)
    assert known, "add it to HERE, ELSEWHERE or NOT_RUN"
    for pattern, test in ELSEWHERE.items():
        if known == ["ELSEWHERE"] and fnmatchcase(command, pattern):
            assert (ROOT / test).is_file()
    for app, words in ours(command):
        parsed(typer.main.get_command(app), words)


def test_no_list_has_what_no_page_has() -> None:
    for known in (HERE, ELSEWHERE, NOT_RUN):
        assert [pattern for pattern in known if not any(fnmatchcase(command, pattern) for command in EVERY)] == []
    pages = {page(path) for path in PAGES}
    assert (BLOCKS.keys() | BLOCKS_NOT_RUN.keys()) - pages == set()


@pytest.mark.parametrize("path", PAGES, ids=page)
def test_the_options_of_commands_in_the_text_are_there(path: Path) -> None:
    for command in re.findall(r"`(python -m (?:hvd_ext|benchmarks\.studies) [^`]*)`", path.read_text(encoding="utf-8")):
        for app, words in ours(command.replace("...", "x")):
            commands = walked(typer.main.get_command(app), words)
            known = {option for one in commands for param in one.params for option in param.opts}
            used = {word.split("=")[0] for word in words[: words.index("--") if "--" in words else None]}
            assert {word for word in used if word.startswith("--")} - known - {"--help"} == set(), command


@pytest.mark.parametrize("command", [one for one in EVERY if entries(one)[:1] == ["HERE"]])
def test_a_command_that_takes_no_job_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    if words[1] != "-m":
        done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout.lower()
        return
    ((app, rest),) = ours(command)
    rest = [str(ROOT / word) if (ROOT / word).is_file() else word for word in rest]
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, rest, env={"COLUMNS": "160", "TERM": "dumb"})
    assert shown.exit_code == 0, shown.output
    assert shown.output
