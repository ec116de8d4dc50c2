"""The doctor's verdicts on a job: pure functions of what its ranks report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_ext.doctor import job_hosts as hosts
from hvd_ext.doctor.checks import Finding, State, flavour
from hvd_ext.doctor.job_facts import family
from hvd_ext.doctor.job_hosts import Answers, by_value, differing, rank_of, ranks
from hvd_ext.engine import versions

MIB = 1 << 20
MEET = "the ranks meet"
OURS = "hvd_ext: "


def judge(met: Mapping[str, Any]) -> list[Finding]:
    """Say what is right and what is wrong with a job.

    Args:
        met: "answers" of all ranks, or of the reporting rank alone; "allreduce" if the ranks met, and "error" if not;
            see `hvd_ext.doctor.job_meeting.meet`.
    """
    answers: Answers = met["answers"]
    findings = [launcher(answers), meeting(met), *mpi(answers, met), *hosts.machines(answers)]
    findings += [same(answers, "TensorFlow", "tensorflow"), same(answers, "Keras", "keras")]
    findings += [same(answers, "Python", "python"), same(answers, "hvd_ext", "hvd_ext")]
    if not answers[0]["refused"]:
        findings.append(hosts.network(answers, "error" not in met))
    if "error" not in met:  # only then the number of ranks on each host is known
        findings += [hosts.cores(answers), *hosts.gpus(answers)]
    findings += hosts.memory(answers)
    findings += [*horovod(answers), *variables(answers)]
    if "allreduce" in met:
        findings.append(allreduce(met["allreduce"], len(answers)))
    # The causes for which ranks did not meet come before the finding that they did not.
    return sorted(findings, key=lambda finding: finding.part == MEET and finding.state is State.WRONG)


def launcher(answers: Answers) -> Finding:
    """The launcher starts jobs that `init` accepts."""
    refused = [answer["refused"] for answer in answers if answer["refused"]]
    if refused:
        mend = "start it with horovodrun --mpi -np N, or with mpirun -np N"
        return Finding("launcher", State.WRONG, refused[0], mend)
    programs = dict.fromkeys(answer["mpirun"] for answer in answers if answer["mpirun"])
    return Finding("launcher", State.OK, "; ".join([answers[0]["launcher"], *programs]))


def meeting(met: Mapping[str, Any]) -> Finding:
    """All ranks have come, and they form one job."""
    answers: Answers = met["answers"]
    if "error" in met:
        if answers[0]["refused"]:
            return Finding(MEET, State.WRONG, "not tried: the launcher starts no MPI job", "")
        return Finding(MEET, State.WRONG, met["error"], _mend_of_meeting(answers))
    places = by_value(answers, lambda answer: answer["host"])
    seen = f"{len(answers)} ranks on {len(places)} host{'s' * (len(places) > 1)}: "
    return Finding(MEET, State.OK, seen + "; ".join(f"{host}: {ranks(numbers)}" for host, numbers in places.items()))


def end_of_meeting(words: Sequence[str], status: int | None, limit_s: float) -> str:
    """Say why the process that started MPI gave no answer, from its lines of stderr and its exit status."""
    if words and words[0].startswith(OURS):
        return " ".join(word.removeprefix(OURS) for word in words)
    if status is not None and status >= 0:
        text = "MPI ended the process"
    else:
        text = f"MPI did not finish within {limit_s:g} s, or the process was killed"
    return f"{text}: {' '.join(words[:12])}" if words else f"{text}, without output"


def mpi(answers: Answers, met: Mapping[str, Any]) -> list[Finding]:
    """The ranks use the launcher's MPI, all of them the same, and each process has only one MPI in its memory."""
    part = "MPI library"
    with_mpi = [answer for answer in answers if answer.get("mpi")]
    if not with_mpi:
        return []
    groups = by_value(
        with_mpi, lambda answer: f"{flavour(answer['mpi']['said'])}: {', '.join(answer['mpi']['mapped'])}"
    )
    findings = [Finding(part, State.OK, differing(groups) if len(groups) > 1 else str(next(iter(groups))))]
    kinds = by_value(with_mpi, lambda answer: flavour(answer["mpi"]["said"]))
    if len(kinds) > 1:
        seen = f"the ranks have different MPIs: {differing(kinds)}"
        findings = [Finding(part, State.WRONG, seen, f"install one MPI on all hosts, then {versions.BUILD} on each")]
    for number, answer in enumerate(with_mpi):
        said, rank = flavour(answer["mpi"]["said"]), rank_of(number, answer, with_mpi)
        starts = _kind(answer["mpirun"]) or _kind_of_variables(answer["launcher"])
        if starts and _kind(said) and starts != _kind(said):
            seen = (
                f"the launcher is of {answer['mpirun'] or starts}, the native library of rank {rank} is linked with "
                f"{said}: each process would be a job of its own, of size 1"
            )
            mend = f"take the mpirun of {said}, or {versions.BUILD} with the mpicxx of the launcher first on PATH"
            findings.append(Finding("MPI of the launcher", State.WRONG, seen, mend))
            break
    mixed = _mixed(with_mpi)
    if mixed is not None:
        findings.append(mixed)
    return findings


def same(answers: Answers, part: str, field: str) -> Finding:
    """All ranks have the same version and build of a package; its folder may differ between hosts."""
    groups = by_value(answers, lambda answer: answer[field])
    if len(groups) == 1:
        seen = str(next(iter(groups)))
        return Finding(part, State.OK if seen else State.WRONG, seen or "not installed")
    builds = by_value(answers, lambda answer: _without_folder(answer[field]))
    if len(builds) == 1:
        return Finding(part, State.OK, f"{next(iter(builds))}, in several folders: {differing(groups)}")
    seen = f"the ranks have different ones: {differing(builds)}"
    if field == "python" and len({build.rpartition(".")[0] for build in builds}) == 1:
        return Finding(part, State.OPTIONAL, seen, "the same Python on all hosts")
    return Finding(part, State.WRONG, seen, "the same virtual environment on all hosts, by the same path")


def horovod(answers: Answers) -> list[Finding]:
    """A note if Horovod is installed beside Keras 3."""
    groups = by_value(answers, lambda answer: answer["horovod"])
    there = [version for version in groups if version]
    if not there or not any(answer["keras"].startswith("3") for answer in answers):
        return []
    note = "its own DistributedOptimizer does not synchronise under Keras 3, silently: use hvd_ext.DistributedOptimizer"
    return [Finding("Horovod", State.OK, f"{', '.join(there)} is installed; {note}")]


def variables(answers: Answers) -> list[Finding]:
    """Horovod's environment variables that are set: which have an effect here, and which have none."""
    findings = []
    heeded = dict.fromkeys(text for answer in answers for text in answer["heeded"])
    if heeded:
        findings.append(Finding("Horovod's variables", State.OK, "; ".join(heeded)))
    unheeded = dict.fromkeys(f"{setting}: {why}" for answer in answers for setting, why in answer["variables"])
    if unheeded:
        seen = "without effect in hvd_ext: " + "; ".join(unheeded)
        findings.append(Finding("Horovod's variables", State.OPTIONAL, seen, "unset them"))
    return findings


def allreduce(done: Mapping[str, Any], size: int) -> Finding:
    """A sum over all ranks was correct; the finding has its time."""
    if done["wrong"]:
        seen = f"{done['wrong']} elements of a sum over {size} ranks were wrong"
        return Finding("allreduce", State.WRONG, seen, "report this with the output of the command")
    rate = done["nbytes"] / MIB / max(done["seconds"], 1e-9)
    text = f"{done['nbytes'] // MIB} MiB over {size} ranks in {1e3 * done['seconds']:.3g} ms: {rate:,.0f} MiB a second"
    return Finding("allreduce", State.OK, f"right; {text} ({done['algorithm']})")


def _without_folder(text: str) -> str:
    before, _, after = text.partition(" at ")
    return before + after[after.find(",") :] if "," in after else before


def _kind(text: str) -> str:
    return next((name for name in ("Open MPI", "MPICH") if name in text.split(":")[0]), "")


def _kind_of_variables(text: str) -> str:
    return "Open MPI" if "OMPI_COMM_WORLD_SIZE" in text else ""


def _mend_of_meeting(answers: Answers) -> str:
    if "SLURM" in answers[0]["launcher"] or answers[0]["mpirun"].endswith("srun"):
        return "srun --mpi=pmix (or --mpi=pmi2 for MPICH); srun --mpi=list names what there is"
    return "see docs/launch.md"


def _mixed(answers: Answers) -> Finding | None:
    for number, answer in enumerate(answers):
        mapped, said = answer["mpi"]["mapped"], flavour(answer["mpi"]["said"])
        if sum(os.path.basename(path).startswith(("libmpi.so", "libmpich.so")) for path in mapped) > 1:
            seen = (
                f"rank {rank_of(number, answer, answers)} has several MPI libraries in its memory: {', '.join(mapped)}"
            )
            return Finding("mixed MPI libraries", State.WRONG, seen, "build all packages for one MPI; unset LD_PRELOAD")
        for package, library in answer["peers"].items():
            other = _kind(library) or family(library)
            if other and _kind(said) and other != _kind(said):
                seen = f"{package} is built for {other} ({library}) and hvd_ext for {said}: not in one process"
                mend = f"build {package} again for {said}, or do not import it in this job"
                return Finding("mixed MPI libraries", State.OPTIONAL, seen, mend)
    return None
