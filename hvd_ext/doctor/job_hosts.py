"""The doctor's verdicts on a job's hosts: pure functions of what ranks report about networks, cores, GPUs, memory.

How messages name ranks, and say which of them differ, is here too.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from hvd_ext.doctor.checks import Finding, State

MIB = 1 << 20
# What Open MPI keeps in /dev/shm for each rank of a host with its default sizes (btl vader), plus a margin.
SHM_RANK_NBYTES = 16 * MIB
UNBOUND = "mpirun --bind-to none"
Answers = Sequence[Mapping[str, Any]]


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
    usable = [name for name in common if _allowed(name, hosts.values())]
    only_v6 = bool(common) and ":" in common[0]
    include = common[0] if common and not only_v6 else _interfaces(common[:1], hosts.values())
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


def _interfaces(networks: Sequence[str], hosts: Iterable[Mapping[str, Any]]) -> str:
    """Return the names of the interfaces of networks; Open MPI takes networks of IPv6 only by these names."""
    return ",".join(sorted({name for answer in hosts for network in networks for name in _names(network, answer)}))


def _names(network: str, answer: Mapping[str, Any]) -> set[str]:
    net = ipaddress.ip_network(network)
    return {name for name, address in answer["networks"] if ipaddress.ip_interface(address).network == net}


def _allowed(network: str, hosts: Iterable[Mapping[str, Any]]) -> bool:
    return all(_allowed_on(network, answer) for answer in hosts)


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
