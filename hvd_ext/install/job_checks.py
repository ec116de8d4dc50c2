"""The doctor's verdicts on a job: pure functions of what its ranks say of themselves."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvd_ext.install import versions
from hvd_ext.install.checks import Finding, State, flavour
from hvd_ext.install.job_facts import family

Answers = Sequence[Mapping[str, Any]]
MIB = 1 << 20
# What Open MPI keeps there for each rank of a host, with its default sizes (btl vader), and some room.
SHM_RANK_NBYTES = 16 * MIB
MEET = "the ranks meet"
UNBOUND = "mpirun --bind-to none"


def judge(met: Mapping[str, Any]) -> list[Finding]:
    """Say what is right and what is wrong with a job.

    Args:
        met: "answers" (by rank, or of the reporting rank alone), with "allreduce" where the ranks met, else "error"; see
            `hvd_ext.install.job_meeting.meet`.

    Returns:
        The findings, in a fixed order.
    """
    answers: Answers = met["answers"]
    findings = [launcher(answers), meeting(met), *mpi(answers, met), *machines(answers)]
    findings += [same(answers, "TensorFlow", "tensorflow"), same(answers, "Keras", "keras")]
    findings += [same(answers, "Python", "python"), same(answers, "hvd_ext", "hvd_ext")]
    findings += [network(answers, "error" not in met), cores(answers), *gpus(answers), *memory(answers)]
    findings += [*horovod(answers), *variables(answers)]
    if "allreduce" in met:
        findings.append(allreduce(met["allreduce"], len(answers)))
    return findings


def ranks(numbers: Iterable[int]) -> str:
    """Name ranks in words: "rank 3", or "ranks 0-2, 5"."""
    given = sorted(numbers)
    parts: list[list[int]] = []
    for number in given:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"rank {text}" if len(given) == 1 else f"ranks {text}"


def by_value(answers: Answers, value: Callable[[Mapping[str, Any]], Any]) -> dict[Any, list[int]]:
    """Group the ranks by what they say: each value with its ranks."""
    found: dict[Any, list[int]] = {}
    for number, answer in enumerate(answers):
        found.setdefault(value(answer), []).append(_rank(number, answer, answers))
    return found


def differing(groups: Mapping[Any, Sequence[int]]) -> str:
    """Say in words which ranks have which value."""
    return "; ".join(f"{value or 'nothing'} ({ranks(numbers)})" for value, numbers in groups.items())


def launcher(answers: Answers) -> Finding:
    """The launcher starts jobs that `init` takes, and all ranks know it by the same name."""
    refused = [answer["refused"] for answer in answers if answer["refused"]]
    if refused:
        mend = "start it with horovodrun --mpi -np N, or with mpirun -np N"
        return Finding("launcher", State.WRONG, refused[0], mend)
    groups = by_value(answers, lambda answer: answer["mpirun"] or answer["launcher"])
    return Finding("launcher", State.OK, f"{answers[0]['launcher']}; {differing(groups)}")


def meeting(met: Mapping[str, Any]) -> Finding:
    """The ranks have come, and they form one job."""
    answers: Answers = met["answers"]
    if "error" in met:
        if answers[0]["refused"]:
            return Finding(MEET, State.WRONG, "not tried: the launcher starts no MPI job", "")
        return Finding(MEET, State.WRONG, met["error"], _mend_of_meeting(answers))
    hosts = by_value(answers, lambda answer: answer["host"])
    seen = f"{len(answers)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}: "
    return Finding(MEET, State.OK, seen + "; ".join(f"{host}: {ranks(numbers)}" for host, numbers in hosts.items()))


def end_of_meeting(words: Sequence[str], status: int | None, limit_s: float) -> str:
    """Say why the process that started MPI gave no answer.

    Args:
        words: its lines on stderr.
        status: its exit status; negative for a signal.
        limit_s: the seconds it had.

    Returns:
        One line.
    """
    if status is not None and status >= 0:
        text = "MPI ended the process"
    else:
        text = f"MPI did not come to an end within {limit_s:g} s, or was ended from outside"
    return f"{text}: {' '.join(words[:12])}" if words else f"{text}, without a word"


def mpi(answers: Answers, met: Mapping[str, Any]) -> list[Finding]:
    """The MPI in the ranks is that of the launcher, the same on all ranks, and the only one in a process."""
    part = "MPI library"
    known = [answer for answer in answers if answer.get("mpi")]
    if not known:
        return []
    groups = by_value(known, lambda answer: f"{flavour(answer['mpi']['said'])}: {', '.join(answer['mpi']['mapped'])}")
    findings = [Finding(part, State.OK, differing(groups) if len(groups) > 1 else str(next(iter(groups))))]
    kinds = by_value(known, lambda answer: flavour(answer["mpi"]["said"]))
    if len(kinds) > 1:
        seen = f"the ranks have different MPIs: {differing(kinds)}"
        findings = [Finding(part, State.WRONG, seen, f"install one MPI on all hosts, then {versions.BUILD} on each")]
    for number, answer in enumerate(known):
        said, rank = flavour(answer["mpi"]["said"]), _rank(number, answer, known)
        starts = _kind(answer["mpirun"]) or _kind_of_variables(answer["launcher"])
        if starts and _kind(said) and starts != _kind(said):
            seen = (
                f"the launcher is of {answer['mpirun'] or starts}, the native library of rank {rank} is linked with {said}"
                ": each process would be a job of its own, of size 1"
            )
            mend = f"take the mpirun of {said}, or {versions.BUILD} with the mpicxx of the launcher first on PATH"
            findings.append(Finding("MPI of the launcher", State.WRONG, seen, mend))
            break
    mixed = _mixed(known)
    if mixed is not None:
        findings.append(mixed)
    return findings


def machines(answers: Answers) -> list[Finding]:
    """What is wrong with a machine, said by one rank of each host."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for answer in answers:
        for finding in answer["findings"]:
            if finding["state"] != State.OK.value:
                key = (finding["part"], finding["state"], finding["seen"], finding["mend"])
                found.setdefault(key, []).append(answer["host"])
    return [
        Finding(part, State(state), f"{seen} (host {', '.join(sorted(set(hosts)))})", mend)
        for (part, state, seen, mend), hosts in found.items()
    ]


def same(answers: Answers, part: str, field: str) -> Finding:
    """All ranks have the same version and build of something; the folder may differ between hosts."""
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


def network(answers: Answers, met: bool) -> Finding:
    """The hosts have a network in common, and Open MPI may use it."""
    part = "network"
    hosts = {answer["host"]: answer for answer in answers}
    named = {f"{name}={text}" for answer in answers for name, text in answer["tcp"].items()}
    chosen = f"; {', '.join(sorted(named))}" if named else ""
    own = "; ".join(f"{host}: {_listed(answer['networks'])}" for host, answer in hosts.items())
    if len(hosts) == 1:
        seen = own if met else f"{own}; the other hosts have said nothing{chosen}"
        return Finding(part, State.OK, f"one host, {seen}" if met else seen)
    common = _common([answer["networks"] for answer in hosts.values()])
    usable = [name for name in common if _allowed(name, hosts.values())]
    if usable:
        return Finding(part, State.OK, f"in common: {', '.join(usable)}{chosen}")
    if common:
        seen = f"{', '.join(common)} is common to all hosts, and Open MPI was told not to use it{chosen}"
        mend = f"mpirun --mca btl_tcp_if_include {common[0]}"
    else:
        seen = f"the hosts have no network in common: {own}{chosen}"
        mend = "mpirun --mca btl_tcp_if_include with the networks between which the hosts have a route"
    if met:
        return Finding(part, State.OPTIONAL, f"{seen}; the ranks met nevertheless, through a route", "")
    return Finding(part, State.WRONG, seen, mend)


def cores(answers: Answers) -> Finding:
    """The ranks of a host have cores to run on."""
    words, state, mend = [], State.OK, ""
    for host, numbers in by_value(answers, lambda answer: answer["host"]).items():
        answer = next(one for one in answers if one["host"] == host)
        if not answer["cores"]:
            continue
        usable, there = answer["cores"]
        words.append(f"{host}: {len(numbers)} ranks, {there} cores")
        if len(numbers) > there:
            state = State.OPTIONAL
            words[-1] += ": the ranks take turns"
            mend = mend or "fewer ranks on a host; a measurement of speed says nothing here"
        elif usable < there and usable < there // len(numbers):
            state, mend = State.OPTIONAL, UNBOUND
            words[-1] += f", and each rank is bound to {usable}: TensorFlow's threads share them"
    return Finding("cores", state, "; ".join(words) or "unknown", mend)


def gpus(answers: Answers) -> list[Finding]:
    """Each rank of a host has a GPU of its own, where there are any."""
    findings = []
    for host, numbers in by_value(answers, lambda answer: answer["host"]).items():
        own = [answer for answer in answers if answer["host"] == host]
        seen = next((answer["gpus"] for answer in own if answer["gpus"]), 0)
        visible = [answer["visible"] for answer in own]
        apart = seen == 1 and None not in visible and len(set(visible)) == len(own)
        if not seen or apart:
            continue
        words = f"host {host}: {seen} for {len(numbers)} ranks"
        if seen < len(numbers):
            mend = f"{seen} ranks on each host (mpirun --map-by ppr:{seen}:node), or CUDA_VISIBLE_DEVICES=-1"
            findings.append(Finding("GPUs", State.WRONG, f"{words}: a rank per GPU is missing one", mend))
        elif seen > len(numbers):
            findings.append(
                Finding("GPUs", State.OPTIONAL, f"{words}: {seen - len(numbers)} idle", "a rank for each GPU")
            )
        else:
            findings.append(Finding("GPUs", State.OK, f"{words}; hvd_ext.pin_gpu() gives each rank its own"))
    return findings


def memory(answers: Answers) -> list[Finding]:
    """Shared memory between the ranks of a host, and memory that a fabric may lock."""
    findings = []
    for host, numbers in by_value(answers, lambda answer: answer["host"]).items():
        answer = next(one for one in answers if one["host"] == host)
        need = SHM_RANK_NBYTES * len(numbers)
        if len(numbers) > 1 and answer["shm"] and answer["shm"][0] < need:
            free, there = (nbytes // MIB for nbytes in answer["shm"])
            seen = f"/dev/shm of host {host} has {free} MiB free of {there} MiB, MPI may want {need // MIB} MiB"
            findings.append(Finding("shared memory", State.OPTIONAL, seen, "docker run --shm-size=1g, or the like"))
        if answer["memlock"] is not None and 0 <= answer["memlock"] < 1024 * MIB:
            seen = f"host {host} has an RDMA fabric, and a process may lock {answer['memlock'] // 1024} KiB only"
            mend = "ulimit -l unlimited, where the daemon of the launcher starts"
            findings.append(Finding("locked memory", State.OPTIONAL, seen, mend))
    return findings


def horovod(answers: Answers) -> list[Finding]:
    """Horovod beside Keras 3: a note."""
    groups = by_value(answers, lambda answer: answer["horovod"])
    there = [version for version in groups if version]
    if not there or not any(answer["keras"].startswith("3") for answer in answers):
        return []
    note = "its own DistributedOptimizer does not synchronise under Keras 3, silently: use hvd_ext.DistributedOptimizer"
    return [Finding("Horovod", State.OK, f"{', '.join(there)} is installed; {note}")]


def variables(answers: Answers) -> list[Finding]:
    """Horovod's environment variables: those that have an effect here, and those that have none."""
    findings = []
    heeded = dict.fromkeys(text for answer in answers for text in answer["heeded"])
    if heeded:
        findings.append(Finding("Horovod's variables", State.OK, "; ".join(heeded)))
    unheeded = dict.fromkeys(f"{setting}: {why}" for answer in answers for setting, why in answer["variables"])
    if unheeded:
        seen = "without an effect here: " + "; ".join(unheeded)
        findings.append(Finding("Horovod's variables", State.OPTIONAL, seen, "unset them"))
    return findings


def allreduce(done: Mapping[str, Any], size: int) -> Finding:
    """A sum over all ranks was right, and how long it took."""
    if done["wrong"]:
        seen = f"{done['wrong']} elements of a sum over {size} ranks were wrong"
        return Finding("allreduce", State.WRONG, seen, "report this with the output of the command")
    rate = done["nbytes"] / MIB / max(done["seconds"], 1e-9)
    text = f"{done['nbytes'] // MIB} MiB over {size} ranks in {1e3 * done['seconds']:.3g} ms: {rate:.3g} MiB a second"
    return Finding("allreduce", State.OK, f"right; {text} ({done['algorithm']})")


def _rank(number: int, answer: Mapping[str, Any], answers: Answers) -> int:
    return number if len(answers) > 1 or answer["rank"] is None else int(answer["rank"])


def _without_folder(text: str) -> str:
    before, _, after = text.partition(" at ")
    return before + after[after.find(",") :] if "," in after else before


def _kind(text: str) -> str:
    return next((name for name in ("Open MPI", "MPICH") if name in text.split(":")[0]), "")


def _kind_of_variables(text: str) -> str:
    return "Open MPI" if "OMPI_COMM_WORLD_SIZE" in text else ""


def _mend_of_meeting(answers: Answers) -> str:
    if "SLURM" in answers[0]["launcher"]:
        return "srun --mpi=pmix (or --mpi=pmi2 for MPICH); srun --mpi=list names what there is"
    return "the lines of this report that are to mend come first; then see docs/launch.md"


def _mixed(known: Answers) -> Finding | None:
    for number, answer in enumerate(known):
        mapped, said = answer["mpi"]["mapped"], flavour(answer["mpi"]["said"])
        cores_of = {os.path.basename(path): path for path in mapped if "libmpi.so" in path or "libmpich" in path}
        if len(cores_of) > 1 or len({os.path.dirname(path) for path in cores_of.values()}) > 1:
            seen = f"rank {_rank(number, answer, known)} has several MPI libraries in its memory: {', '.join(mapped)}"
            return Finding("mixed MPI libraries", State.WRONG, seen, "build all packages for one MPI; unset LD_PRELOAD")
        for package, library in answer["peers"].items():
            other = _kind(library) or family(library)
            if other and _kind(said) and other != _kind(said):
                seen = f"{package} is built for {other} ({library}) and hvd_ext for {said}: not in one process"
                mend = f"build {package} again for {said}, or do not import it in this job"
                return Finding("mixed MPI libraries", State.OPTIONAL, seen, mend)
    return None


def _listed(networks: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"{name} {address}" for name, address in networks) or "no interface but the loopback"


def _common(hosts: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """The networks that all hosts are in, each with an address of its own: docker0 is in every host, and joins none."""
    found: dict[str, list[str]] = {}
    for networks in hosts:
        for _, address in networks:
            interface = ipaddress.ip_interface(address)
            found.setdefault(str(interface.network), []).append(str(interface.ip))
    return [name for name, own in found.items() if len(set(own)) == len(own) == len(hosts)]


def _allowed(network: str, hosts: Iterable[Mapping[str, Any]]) -> bool:
    return all(_allowed_on(network, answer) for answer in hosts)


def _allowed_on(network: str, answer: Mapping[str, Any]) -> bool:
    net = ipaddress.ip_network(network)
    names = {name for name, address in answer["networks"] if ipaddress.ip_interface(address).network == net}

    def meant(text: str) -> bool:
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        wide = [ipaddress.ip_network(entry, strict=False) for entry in entries if "/" in entry]
        return bool(names & set(entries)) or any(net.overlaps(other) for other in wide)

    include, exclude = (answer["tcp"].get(f"btl_tcp_if_{which}", "") for which in ("include", "exclude"))
    return meant(include) if include else not (exclude and meant(exclude))
