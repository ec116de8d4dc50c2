"""The doctor's verdicts on a job: pure functions of what its ranks report."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from hvd_ext.doctor.checks import Finding, State, flavour
from hvd_ext.doctor.job_facts import family
from hvd_ext.engine import versions

MIB = 1 << 20
MEET = "the ranks meet"
OURS = "hvd_ext: "
# What Open MPI keeps in /dev/shm for each rank of a host with its default sizes (btl vader), plus a margin.
SHM_RANK_NBYTES = 16 * MIB
UNBOUND = "mpirun --bind-to none"
Answers = Sequence[Mapping[str, Any]]


def judge(met: Mapping[str, Any]) -> list[Finding]:
    """Say what is right and what is wrong with a job.

    Args:
        met: "answers" of all ranks, or of the reporting rank alone; "allreduce" if the ranks met, and "error" if not;
            see `hvd_ext.doctor.job_meeting.meet`.
    """
    answers: Answers = met["answers"]
    findings = [launcher(answers), meeting(met), *mpi(answers), *machines(answers)]
    findings += [same(answers, "TensorFlow", "tensorflow"), same(answers, "Keras", "keras")]
    findings += [same(answers, "Python", "python"), same(answers, "hvd_ext", "hvd_ext")]
    if not answers[0]["refused"]:
        findings.append(network(answers, "error" not in met))
    if "error" not in met:  # only then the number of ranks on each host is known
        findings += [cores(answers), *gpus(answers)]
    findings += memory(answers)
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


def mpi(answers: Answers) -> list[Finding]:
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
        starts = _kind(answer["mpirun"]) or ("Open MPI" if "OMPI_COMM_WORLD_SIZE" in answer["launcher"] else "")
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


def machines(answers: Answers) -> list[Finding]:
    """What is wrong with each machine, as one rank of each host has found."""
    hosts_of: dict[tuple[str, str, str, str], list[str]] = {}
    for answer in answers:
        for finding in answer["findings"]:
            if finding["state"] != State.OK.value:
                key = (finding["part"], finding["state"], finding["seen"], finding["mend"])
                hosts_of.setdefault(key, []).append(answer["host"])
    return [
        Finding(part, State(state), f"{seen} (host {', '.join(sorted(set(hosts)))})", mend)
        for (part, state, seen, mend), hosts in hosts_of.items()
    ]


def network(answers: Answers, met: bool) -> Finding:
    """The hosts have a network in common, and Open MPI may use it."""
    part = "network"
    hosts = {answer["host"]: answer for answer in answers}
    named = {f"{name}={text}" for answer in answers for name, text in answer["tcp"].items()}
    chosen = f"; {', '.join(sorted(named))}" if named else ""
    listed = "; ".join(f"{host}: {_listed(answer['networks'])}" for host, answer in hosts.items())
    if len(hosts) == 1:
        seen = listed if met else f"{listed}; the other hosts have not reported{chosen}"
        return Finding(part, State.OK, f"one host, {seen}" if met else seen)
    common = _common([answer["networks"] for answer in hosts.values()])
    usable = [name for name in common if all(_allowed_on(name, answer) for answer in hosts.values())]
    only_v6 = bool(common) and ":" in common[0]
    # Open MPI takes networks of IPv6 only by the names of their interfaces
    cards = {name for answer in hosts.values() for network in common[:1] for name in _names(network, answer)}
    include = ",".join(sorted(cards)) if only_v6 else "".join(common[:1])
    if usable and (met or not only_v6):
        return Finding(part, State.OK, f"in common: {', '.join(usable)}{chosen}")
    if usable:
        seen = f"the hosts have only networks of IPv6 in common: {', '.join(usable)}{chosen}"
        mend = "an Open MPI that was built with --enable-ipv6 (ompi_info names its IPv6 support), or addresses of IPv4"
    elif common:
        seen = f"{', '.join(common)} is common to all hosts, but Open MPI was told not to use it{chosen}"
        mend = f"mpirun --mca btl_tcp_if_include {include}"
    else:
        seen = f"the hosts have no network in common: {listed}{chosen}"
        mend = "mpirun --mca btl_tcp_if_include with the networks between which the hosts have a route"
    if met:
        return Finding(part, State.OPTIONAL, f"{seen}; the ranks met nevertheless, through a route", "")
    return Finding(part, State.WRONG, seen, mend)


def cores(answers: Answers) -> Finding:
    """Each host has enough cores for its ranks."""
    words, state, mend = [], State.OK, ""
    for host, of_host in _hosts(answers).items():
        if not of_host[0]["cores"]:
            continue
        count, (usable, there) = len(of_host), of_host[0]["cores"]
        words.append(f"{host}: {count} rank{'s' * (count > 1)}, {there} cores")
        if count > there:
            state = State.OPTIONAL
            words[-1] += ": the ranks take turns"
            mend = mend or "start fewer ranks on each host; speeds measured like this mean nothing"
        elif usable < there and usable < there // count:
            state, mend = State.OPTIONAL, UNBOUND
            words[-1] += f", and each rank is bound to {usable}: TensorFlow's threads share them"
    return Finding("cores", state, "; ".join(words) or "unknown", mend)


def gpus(answers: Answers) -> list[Finding]:
    """On hosts with GPUs, each rank has its own GPU."""
    findings = []
    for host, of_host in _hosts(answers).items():
        count, seen = len(of_host), next((answer["gpus"] for answer in of_host if answer["gpus"]), 0)
        visible = [answer["visible"] for answer in of_host]
        apart = seen == 1 and None not in visible and len(set(visible)) == count
        if not seen or apart:
            continue
        words = f"host {host}: {seen} for {count} ranks"
        if seen < count:
            mend = f"{seen} ranks on each host (mpirun --map-by ppr:{seen}:node), or CUDA_VISIBLE_DEVICES=-1"
            findings.append(Finding("GPUs", State.WRONG, f"{words}: some ranks would have no GPU", mend))
        elif seen > count:
            findings.append(Finding("GPUs", State.OPTIONAL, f"{words}: {seen - count} idle", "a rank for each GPU"))
        else:
            findings.append(Finding("GPUs", State.OK, f"{words}; hvd_ext.pin_gpu() gives each rank its own"))
    return findings


def memory(answers: Answers) -> list[Finding]:
    """Each host has enough shared memory for its ranks, and enough memory that a fabric may lock."""
    findings = []
    for host, of_host in _hosts(answers).items():
        answer, need = of_host[0], SHM_RANK_NBYTES * len(of_host)
        if len(of_host) > 1 and answer["shm"] and answer["shm"][0] < need:
            free, there = (nbytes // MIB for nbytes in answer["shm"])
            seen = f"/dev/shm of host {host} has {free} MiB free of {there} MiB, MPI may need {need // MIB} MiB"
            findings.append(Finding("shared memory", State.OPTIONAL, seen, "docker run --shm-size=1g, or the like"))
        if answer["memlock"] is not None and 0 <= answer["memlock"] < 1024 * MIB:
            seen = f"host {host} has an RDMA fabric, and a process may lock {answer['memlock'] // 1024} KiB only"
            mend = "ulimit -l unlimited, where the daemon of the launcher starts"
            findings.append(Finding("locked memory", State.OPTIONAL, seen, mend))
    return findings


def ranks(numbers: Iterable[int]) -> str:
    """Name ranks in words: "rank 3", or "ranks 0-2, 5"."""
    ordered = sorted(numbers)
    parts: list[list[int]] = []
    for number in ordered:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def by_value(answers: Answers, value: Callable[[Mapping[str, Any]], Any]) -> dict[Any, list[int]]:
    """Group the ranks by a value of their answers: each value with its ranks."""
    groups: dict[Any, list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(value(answer), []).append(rank_of(number, answer, answers))
    return groups


def differing(groups: Mapping[Any, Sequence[int]]) -> str:
    """Say in words which ranks have which value."""
    return "; ".join(f"{value or 'nothing'} ({ranks(numbers)})" for value, numbers in groups.items())


def rank_of(number: int, answer: Mapping[str, Any], answers: Answers) -> int:
    """Return the rank that gave an answer; if there is only one answer, it may come from another rank than 0."""
    return number if len(answers) > 1 or answer["rank"] is None else int(answer["rank"])


def _without_folder(text: str) -> str:
    before, _, after = text.partition(" at ")
    return before + after[after.find(",") :] if "," in after else before


def _kind(text: str) -> str:
    return next((name for name in ("Open MPI", "MPICH") if name in text.split(":")[0]), "")


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


def _hosts(answers: Answers) -> dict[str, list[Mapping[str, Any]]]:
    """Group the answers by host."""
    return {host: [one for one in answers if one["host"] == host] for host in by_value(answers, itemgetter("host"))}


def _listed(networks: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"{name} {address}" for name, address in networks) or "no interface but the loopback"


def _common(hosts: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """Return the networks in which all hosts have different addresses, those of IPv4 first.

    docker0 exists on all hosts, but joins none.
    """
    addresses: dict[str, list[str]] = {}
    for networks in hosts:
        for _, address in networks:
            interface = ipaddress.ip_interface(address)
            addresses.setdefault(str(interface.network), []).append(str(interface.ip))
    shared = [name for name, of_network in addresses.items() if len(set(of_network)) == len(of_network) == len(hosts)]
    return sorted(shared, key=lambda name: ":" in name)


def _names(network: str, answer: Mapping[str, Any]) -> set[str]:
    net = ipaddress.ip_network(network)
    return {name for name, address in answer["networks"] if ipaddress.ip_interface(address).network == net}


def _allowed_on(network: str, answer: Mapping[str, Any]) -> bool:
    net = ipaddress.ip_network(network)
    names = _names(network, answer)

    def meant(text: str) -> bool:
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        wide = [ipaddress.ip_network(entry, strict=False) for entry in entries if "/" in entry]
        return bool(names & set(entries)) or any(
            net.version == other.version == 4 and net.overlaps(other) for other in wide
        )

    include, exclude = (answer["tcp"].get(f"btl_tcp_if_{which}", "") for which in ("include", "exclude"))
    return meant(include) if include else not (exclude and meant(exclude))
