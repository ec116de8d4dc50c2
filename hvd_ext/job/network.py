"""The links of a job that was told no topology: kept from an earlier job, measured now, or assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from hvd_ext.errors import HvdExtError
from hvd_ext.job import consensus, cores, log, membership, probe_cache
from hvd_ext.options import is_file
from hvd_ext.topology import media, read, write
from hvd_ext.topology.fit import Curve, rounded
from hvd_ext.topology.tree import HOST_MEMORY, MEDIA, Link, Tree, with_cores

if TYPE_CHECKING:
    from hvd_ext.engine.engine import Engine
    from hvd_ext.options import Options

Timed = TypeVar("Timed")

ASSUMED, KEPT, MEASURED = "assumed", "kept", "measured"

# Links that a look shows to be so many times as fast as when they were measured: something had disturbed the probe, or
# they have become faster.
FASTER = 3.0

_seen: dict[tuple[str, ...], Tree] = {}  # what this process has measured or read, by the hosts of the ranks


@dataclass(frozen=True)
class Network:
    """The links of a job, and where they come from.

    Args:
        source: `ASSUMED`, `KEPT` or `MEASURED`.
        line: the same in words, for the banner; empty if the links are assumed as they have been asked for.
        seconds: how long it took to measure; 0 if nothing was measured.
        curves: times over the size; empty unless they were measured now.
    """

    tree: Tree
    source: str = ASSUMED
    line: str = ""
    seconds: float = 0.0
    curves: tuple[Curve, ...] = ()


def wanted(options: Options, size: int) -> bool:
    """Whether a job measures its links: no topology was given, something is left to choose, and `probe` allows it."""
    left = options.algorithm == "auto" or (options.replan_every > 0 and not is_file(options.buckets))
    return options.topology is None and options.probe != "off" and left and size > 1


def of_job(engine: Engine, hosts: Sequence[str], options: Options) -> Network:
    """Find the links of a job without a topology; all ranks call this function, and get the same answer.

    Links that an earlier job has measured count, unless a look shows that they are much faster now. If a probe fails,
    rank 0 warns, and the job takes the links of the earlier job, or else assumed ones.
    """
    session = membership.session()
    is_later = session is not None and session.world > 0  # whose links an earlier world may have known
    rows = _media(engine, options)
    between = None if rows is None else lambda one, other: rows[one][other] or HOST_MEMORY
    assumed = media.assumed(hosts, between)
    if not wanted(options, engine.size) and not (is_later and engine.size > 1):
        return Network(assumed)
    key = probe_cache.key_of(hosts, options, engine.inter_host_transport, rows)

    def known() -> dict[str, Any]:
        # Only rank 0 looks for a file, because hosts may have different ones.
        entry = None
        if engine.rank == 0 and is_later and (before := _seen_before(hosts)) is not None:
            entry = {"text": write.text(before), "looked": {}, "origin": "as before"}
        elif engine.rank == 0 and options.probe not in ("refresh", "off"):
            found = probe_cache.find(key, probe_cache.folder(options))
            if found is not None:
                # In a later world a look would delay workers that train already.
                looked = {} if is_later else found.looked
                origin = f"measured on {found.day}, HVD_EXT_PROBE=refresh measures again"
                entry = {"text": write.text(found.tree), "looked": looked, "origin": origin}
        return {"cores": cores.seen(), "kept": entry}

    answers = consensus.exchange(engine, "network", known)
    cores_of = cores.of_hosts(hosts, [answer["cores"] for answer in answers])
    links, kept = Network(assumed), answers[0]["kept"]
    if kept is not None:
        tree = read.parse(kept["text"], "of the cache", engine.size)
        links = Network(tree, KEPT, f"{describe(tree)}; {kept['origin']}")
    elif not wanted(options, engine.size):
        return links
    if kept is None or (kept["looked"] and _are_faster(engine, assumed, options, cores_of, kept["looked"])):
        links = _measured(engine, assumed, options, key, cores_of, links)
    if links.source == ASSUMED:
        return links
    remember(hosts, links.tree)
    # A launcher may give the next job other cores, which therefore are not kept.
    return replace(links, tree=replace(links.tree, root=with_cores(links.tree.root, cores_of)))


def remember(hosts: Sequence[str], tree: Tree) -> None:
    """Keep the links of these ranks for a later world of this process that has some of them."""
    if tree not in _seen.values():
        _seen[tuple(hosts)] = tree


def _seen_before(hosts: Sequence[str]) -> Tree | None:
    """Return the links of these ranks, if they are some of those of an earlier world of this process."""
    for earlier, tree in _seen.items():
        left = list(enumerate(earlier))
        ranks = []
        for host in hosts:
            found = next((one for one in left if one[1] == host), None)
            if found is None:
                break
            left.remove(found)
            ranks.append(found[0])
        else:
            if ranks == sorted(ranks):
                return tree.subset(ranks)
    return None


def _media(engine: Engine, options: Options) -> list[list[str]] | None:
    """Give what joins the GPUs of any two ranks; None if buckets lie on the host."""
    if not options.gpu_buckets or engine.size == 1:
        return None
    return consensus.exchange(engine, "media", engine.media)


def _timed(probe: Callable[[], Timed]) -> tuple[Timed | None, str]:
    """Give what a probe has measured, or why it has failed on this rank."""
    try:
        return probe(), ""
    except HvdExtError as failed:
        return None, str(failed) or type(failed).__name__
    except (OSError, ValueError, ArithmeticError, MemoryError) as failed:
        return None, f"{type(failed).__name__}: {failed}"


_OTHERWISE = {
    ASSUMED: "the planner assumes them, HVD_EXT_PROBE=off measures nothing",
    KEPT: "the planner takes those that an earlier job has measured",
}


def _failed(engine: Engine, answers: Sequence[dict[str, Any]], otherwise: str) -> bool:
    """Return whether a probe has failed on some rank; rank 0 warns of it, and says which links count."""
    failures = [(rank, answer["error"]) for rank, answer in enumerate(answers) if answer["error"]]
    if failures and engine.rank == 0:
        rank, words = failures[0]
        log.logger.warning("the links could not be measured (rank %d: %s); %s", rank, words, _OTHERWISE[otherwise])
    return bool(failures)


def _are_faster(
    engine: Engine, assumed: Tree, options: Options, cores_of: dict[str, float], before: dict[str, float]
) -> bool:
    """Look whether the links are much faster than when they were measured."""
    from hvd_ext.job import probe

    looked, error = _timed(lambda: probe.look(engine, assumed, options, cores_of))
    answers = consensus.exchange(engine, "network", lambda: {"error": error, "looked": looked})
    if _failed(engine, answers, KEPT):
        return False
    for name, seconds in answers[0]["looked"].items():
        if before.get(name, 0.0) > FASTER * seconds:
            if engine.rank == 0:
                log.logger.info(
                    "the links are faster than when they were measured (%s: %s then, %s now): they are measured again",
                    *(name, _time(before[name]), _time(seconds)),
                )
            return True
    return False


def _measured(
    engine: Engine, assumed: Tree, options: Options, key: dict[str, Any], cores_of: dict[str, float], known: Network
) -> Network:
    """Measure the links; gives those that are known if that fails."""
    from hvd_ext.job import probe

    probed, error = _timed(lambda: probe.measure(engine, assumed, options, cores_of))
    # Computers may round differently: all ranks read what rank 0 has written.
    answers = consensus.exchange(
        engine,
        "network",
        lambda: {
            "error": error,
            "text": write.text(probed.tree) if probed else "",
            "doubt": probed.doubt if probed else "",
            "s": probed.seconds if probed else 0.0,
        },
    )
    if _failed(engine, answers, known.source) or probed is None:
        return known
    tree = read.parse(answers[0]["text"], "of rank 0", engine.size)
    if engine.rank == 0 and answers[0]["doubt"]:
        log.logger.warning(
            "it cannot be told whether hosts are in racks (%s); the planner assumes that they are not, and "
            "HVD_EXT_TOPOLOGY may name a file with racks",
            answers[0]["doubt"],
        )
    if engine.rank == 0:
        probe_cache.keep(key, tree, probed.looked, probe_cache.folder(options))
    seconds = float(answers[0]["s"])  # ranks that act on it must have the same
    return Network(tree, MEASURED, f"{describe(tree)}; measured in {seconds:.2g} s", seconds, probed.curves)


def describe(tree: Tree) -> str:
    """Describe a cluster's links, as in "between hosts 95.6 Mbit/s and 41 us, in hosts 16.3 Gbit/s and 1.2 us".

    Of GPUs it names the medium, as in "in hosts (NVLink) 1.2 Tbit/s and 10 us".
    """
    branches = [node for nodes in reversed(tree.levels()) for node in nodes]
    parts = []
    for above, kind in ((2, "between racks"), (1, "between hosts")):
        joining = [node for node in branches if node.height == above + 1]
        if joining:
            slower = [
                f"{child.name}: {rate(child.port)}"
                for node in branches
                for child in node.children
                if node.height > above and child.height == above and child.port is not None
            ]
            named = ", ".join(slower[:4]) + (f" and {len(slower) - 4} more" if len(slower) > 4 else "")
            parts.append(f"{kind} {words(joining[0].link)}" + (f" ({named})" if named else ""))
    racks = [f"{len(node.children)}" for node in branches if node.height == 2 and node is not tree.root]
    if racks:
        parts[0] += f" (racks of {' + '.join(racks)} hosts)"
    for medium in reversed(("", *MEDIA)):
        inside = [
            node.link for node in branches if node.height == 1 and len(node.children) > 1 and node.medium == medium
        ]
        if inside:
            through = f" ({medium})" if medium else ""
            parts.append(f"in hosts{through} {words(max(inside, key=lambda link: link.beta_s_per_byte))}")
    return ", ".join(parts)


def words(link: Link) -> str:
    """Describe a link's rate and latency, as in "95.6 Mbit/s and 41 us"."""
    return f"{rate(link)} and {_time(link.alpha_s)}"


def _time(seconds: float) -> str:
    if seconds < 0.995e-4:
        return f"{seconds * 1e6:.2g} us"
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.0995 else f"{seconds:.2g} s"


def rate(link: Link) -> str:
    """Describe a link's rate, as in "95.6 Mbit/s"."""
    if not link.beta_s_per_byte:
        return "no limit"
    bits = rounded(8 / link.beta_s_per_byte)
    for unit, least in (("Tbit/s", 1e12), ("Gbit/s", 1e9)):
        if bits >= least:
            return f"{bits / least:.3g} {unit}"
    return f"{bits / 1e6:.3g} Mbit/s"
