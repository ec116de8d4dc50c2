"""The page of all public names, from their signatures and docstrings; `python -m docs.tables` writes it."""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import hvd_ext as hvd
from hvd_ext.options.faces import FOLLOWING

# title, what a reader does with it, names in the order of the page; "callbacks.*" is what no other place names
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Start a job, and know one's place in it",
        "All ranks call `init`. [launch.md](launch.md) says how jobs are started, [settings.md](settings.md) which "
        "variables set the options, and `hvd.__version__` which version this is.",
        (
            *("init", "Options", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size"),
            *("cross_rank", "cross_size", "is_homogeneous", "pin_gpu", "run"),
        ),
    ),
    (
        "Train",
        "Wrap the optimizer before `compile`, or the tape of a loop of your own. [training.md](training.md) shows how "
        "`fit` ends on all ranks, and [stragglers.md](stragglers.md) how steps do without the slowest rank.",
        (
            *("DistributedOptimizer", "PartialDistributedOptimizer", "DistributedGradientTape"),
            *("PartialDistributedGradientTape", "scale_learning_rate", "SyncBatchNormalization", "explain", "flush"),
            *("catch_up", "optimizers.*"),
        ),
    ),
    (
        "Send less",
        "Values of the keyword `compression`. [compression.md](compression.md) compares them.",
        ("TopK", "Warmup", "Quantized", "LowRank", "AnyOf", "Sign", "Compression", "mstopk", "topk_error_feedback"),
    ),
    (
        "Send less often",
        "The value of the keyword `local_steps`, and the weights that a model has then "
        "([local_steps.md](local_steps.md)).",
        ("LocalSteps", "local_weights"),
    ),
    (
        "Callbacks of `fit`",
        "`synchronized` prepares a whole list of them. Methods that Keras calls (`on_epoch_end` and others) are left "
        "out here.",
        (
            *("callbacks.synchronized", "callbacks.verbose", "callbacks.BroadcastGlobalVariablesCallback"),
            *("callbacks.MetricAverageCallback", "callbacks.LearningRateWarmupCallback"),
            *("callbacks.LearningRateScheduleCallback", "callbacks.BestModelCheckpoint", "callbacks.*"),
        ),
    ),
    (
        "Data",
        "Each rank's part of the data, and a cache of decoded samples ([data.md](data.md)).",
        ("shard", "DataCache", "data.*"),
    ),
    (
        "Save, and go on",
        "[saving.md](saving.md) compares the ways to save. `hvd.state` holds what of your own belongs into a "
        "checkpoint.",
        ("callbacks.Checkpoint", "load_model", "state.register", "state.unregister", "state.*"),
    ),
    (
        "Exchange tensors and objects",
        "All ranks call a collective with equal arguments; `op` is one of the reductions in the table. They work in "
        "eager mode and in `tf.function`.",
        (
            *("Average", "Sum", "Min", "Max", "Product", "allreduce", "allgather", "broadcast", "reducescatter"),
            *("alltoall", "barrier", "join", "grouped_allreduce", "grouped_allgather", "grouped_reducescatter"),
            *("broadcast_variables", "broadcast_object", "allgather_object", "rank_op", "size_op", "local_rank_op"),
            *("local_size_op", "process_set_included_op", "pto"),
        ),
    ),
    (
        "Process sets",
        "Some of the ranks, which run collectives among themselves.",
        ("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    ),
    (
        "Look inside",
        "[trace.md](trace.md) reads the files. `hvd.explain`, under [Train](#train), prints the buckets.",
        ("start_trace", "stop_trace"),
    ),
    (
        "Exceptions",
        "All are in `hvd.errors`. `hvd.run` also raises `hvd_ext.runner.launcher.JobError`, an `HvdExtError`. "
        "[migration.md](migration.md#errors) says as which of TensorFlow's exceptions they can be caught, and "
        "[faq.md](faq.md) what to do.",
        ("errors.HvdExtError", "errors.*"),
    ),
    (
        "Elastic jobs",
        "[elastic.md](elastic.md) shows how to use them.",
        ("elastic.run", "elastic.*"),
    ),
    (
        "For scripts of Horovod's",
        "[migration.md](migration.md) has every name of Horovod's. `hvd_ext.tensorflow` and `hvd_ext.keras` have the "
        "names of this page too; `hvd_ext.keras` has four collectives with the order of arguments of Horovod's Keras "
        "module.",
        (
            *("broadcast_global_variables", "broadcast_", "start_timeline", "stop_timeline", "mpi_enabled"),
            *("mpi_built", "mpi_threads_supported", "gloo_enabled", "gloo_built", "nccl_built", "ddl_built"),
            *("ccl_built", "cuda_built", "rocm_built", "keras.*", "Adasum"),
        ),
    ),
)
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:    .*\n|\n)*)", re.MULTILINE)
WIDTH = 118


class Doc(NamedTuple):
    """The parts of a docstring: what stands in front, and by section the text, or (names, text) of each item."""

    body: str
    returns: str
    items: dict[str, list[tuple[str, str]]]


def doc(thing: Any) -> Doc:
    """Takes a docstring apart.

    Args:
        thing: a function, a class, a property or a value.

    Returns:
        Its parts.

    Raises:
        ValueError: there is no docstring, or an item of a section does not begin with names and a colon.
    """
    text = (inspect.getdoc(thing) or "") + "\n"
    if not text.strip():
        raise ValueError(f"{thing!r} has no docstring")
    returns, items = "", {}
    for title, block in SECTION.findall(text):
        lines = textwrap.dedent(block).strip()
        if title == "Returns":
            returns = lines
            continue
        items[title] = []
        for item in re.split(r"\n(?! )", lines):
            found = re.fullmatch(r"([\w*, ]+?): (.*)", " ".join(item.split()))
            if not found:
                raise ValueError(f"{thing!r}, {title}: an item must be `name: text`, seen {item!r}")
            items[title].append((found[1], found[2]))
    return Doc(SECTION.sub("", text).strip(), returns, items)


def written(text: str) -> str:
    """Gives text as Markdown: signs that would mean something are escaped outside of code, pages become links."""
    parts = text.split("`")
    parts[::2] = [
        re.sub(r"docs/(\w+\.md)", r"[\1](\1)", re.sub(r"([<*]|(?<=\W)_)", r"\\\1", part)) for part in parts[::2]
    ]
    return "`".join(parts)


def parameters(thing: Any) -> list[inspect.Parameter]:
    """Gives the parameters of a function or a class without `self`; those of a value are none."""
    if isinstance(thing, property | enum.EnumMeta) or not callable(thing) or isinstance(thing, enum.Enum):
        return []
    found = list(inspect.signature(thing).parameters.values())
    return found[1:] if found and found[0].name == "self" else found


def default(value: Any) -> str:
    """Gives a default as a caller would write it."""
    if isinstance(value, type(hvd.Average)):
        return f"hvd.{value.name}"
    return f"hvd.{value}" if isinstance(value, enum.Enum) else repr(value)


def signature(name: str, thing: Any) -> str:
    """Gives a call with its parameters and their defaults, in lines that a page can show."""
    words, keyword_only = [], False
    for parameter in parameters(thing):
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind == parameter.KEYWORD_ONLY and not keyword_only:
            words.append("*")
        keyword_only |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        given = "" if parameter.default is parameter.empty else f"={default(parameter.default)}"
        words.append(f"{stars}{parameter.name}{given}")
    line = f"{name}({', '.join(words)})"
    if len(line) <= WIDTH:
        return line
    inner = textwrap.wrap(", ".join(words), WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return "\n".join([f"{name}(", *(f"    {row}" for row in inner), ")"])


def annotation(parameter: inspect.Parameter) -> str:
    """Gives a parameter's type as the source writes it."""
    kind = parameter.annotation
    return kind.removeprefix("options.") if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Gives a Markdown table."""
    from docs.tables import markdown

    return markdown(list(head), [list(row) for row in rows])


def arguments(thing: Any, items: list[tuple[str, str]]) -> str:
    """Gives the table of arguments: names, types, meaning.

    Args:
        thing: the function or class.
        items: names, several of them separated by commas, and text of each argument in the docstring.

    Returns:
        The table.

    Raises:
        ValueError: the docstring describes other arguments than there are.
    """
    there = {parameter.name: parameter for parameter in parameters(thing)}
    named = [name.strip(" *") for names, _ in items for name in names.split(",")]
    if items[-1][1].endswith(FOLLOWING):
        named += list(there)[list(there).index(named[-1]) + 1 :]
    if sorted(named) != sorted(there):
        raise ValueError(f"{thing!r}: the docstring describes {sorted(named)}, the arguments are {sorted(there)}")
    rows = []
    for names, text in items:
        several = [name.strip() for name in names.split(",")]
        types = dict.fromkeys(annotation(there[name.strip("*")]) for name in several)
        rows.append(
            [", ".join(f"`{name}`" for name in several), ", ".join(f"`{kind}`" for kind in types), written(text)]
        )
    return table(["Argument", "Type", "Meaning"], rows)


def details(name: str, thing: Any) -> Iterator[str]:
    """Yields the paragraphs about a name: signature, text, arguments, result, exceptions."""
    parts = doc(thing)
    if isinstance(thing, property):
        yield f"```\n{name}\n```"
    elif callable(thing) and not isinstance(thing, enum.EnumMeta):
        yield f"```\n{signature(name, thing)}\n```"
    yield written(parts.body)
    if callable(thing) and "Args" in parts.items:
        yield arguments(thing, parts.items["Args"])
    if "Attributes" in parts.items:
        yield table(["Attribute", "Meaning"], [[f"`{one}`", written(text)] for one, text in parts.items["Attributes"]])
    if parts.returns:
        yield f"**Returns:** {written(' '.join(parts.returns.split()))}"
    if callable(thing) and "Raises" in parts.items:
        rows = [
            (", ".join(f"`{one.strip()}`" for one in names.split(",")), text) for names, text in parts.items["Raises"]
        ]
        yield "**Raises:**\n\n" + "\n".join(f"- {names}: {written(text)}" for names, text in rows)


def methods(thing: Any) -> dict[str, Any]:
    """Gives the public methods and properties of a class by name, without those that Keras or Python calls."""
    if not inspect.isclass(thing):
        return {}
    bases = thing.__mro__[1:]
    others = [base for base in bases if not base.__module__.startswith("hvd_ext")]
    found = {}
    for owner in (thing, *(base for base in bases if base not in others)):
        for name, value in vars(owner).items():
            kinds = (property, staticmethod, classmethod)
            if name.startswith("_") or not (inspect.isfunction(value) or isinstance(value, kinds)):
                continue
            if not any(hasattr(base, name) for base in others):
                found.setdefault(name, value if isinstance(value, property) else getattr(thing, name))
    return found


def small(thing: Any) -> bool:
    """Whether a row of a table says all: no argument to explain, one paragraph, no method."""
    if isinstance(thing, enum.EnumMeta) or methods(thing):
        return False
    parts = doc(thing)
    raised = inspect.isclass(thing) and issubclass(thing, Exception) and "Attributes" not in parts.items
    lonely = not callable(thing) or raised or not parameters(thing)
    return lonely and "\n\n" not in parts.body and not (callable(thing) and (parts.items or parts.returns))


def public() -> dict[str, Any]:
    """Gives every public name behind `hvd.`, with what it stands for."""
    from hvd_ext.keras import face

    names: dict[str, Any] = {}
    for name in hvd.__all__:
        thing = getattr(hvd, name)
        if isinstance(thing, ModuleType):
            names |= {f"{name}.{inner}": getattr(thing, inner) for inner in thing.__all__}
        elif name != "__version__":
            names[name] = thing
    names |= {f"data.{name}": getattr(hvd.data, name) for name in hvd.data.__all__}
    names |= {f"keras.{name}": getattr(face, name) for name in face.__all__}
    own = inspect.getmembers(hvd.state, inspect.isfunction)
    return names | {
        f"state.{name}": value for name, value in own if value.__module__ == hvd.state.__name__ and name[0] != "_"
    }


def grouped() -> list[tuple[str, str, dict[str, Any]]]:
    """Gives the groups of the page: title, text, and the names with what they stand for, each thing once.

    Raises:
        ValueError: a name is in no group, or a group has a name that is not there.
    """
    names = public()
    said = {name for _, _, listed in GROUPS for name in listed if not name.endswith("*")}
    if said - set(names):
        raise ValueError(f"docs/api.py: {sorted(said - set(names))} are no public names")
    seen = {id(names[name]) for name in said}
    pages = []
    for title, what, listed in GROUPS:
        here: dict[str, Any] = {}
        for name in listed:
            if name.endswith("*"):
                rest = {
                    one: thing for one, thing in names.items() if one.startswith(name[:-1]) and id(thing) not in seen
                }
                here |= rest
                seen |= {id(thing) for thing in rest.values()}
            else:
                here[name] = names[name]
        pages.append((title, what, here))
    left = sorted(name for name, thing in names.items() if id(thing) not in seen)
    if left:
        raise ValueError(f"docs/api.py: {left} are in no group; add them to GROUPS")
    return pages


def anchor(heading: str) -> str:
    """Gives the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def entry(name: str, thing: Any, also: list[str]) -> Iterator[str]:
    """Yields the paragraphs of one name, and of its methods."""
    yield f"### hvd.{name}"
    yield from details(f"hvd.{name}", thing)
    if also:
        yield "Also " + ", ".join(f"`hvd.{other}`" for other in also) + "."
    for inner, method in methods(thing).items():
        yield f"#### hvd.{name}.{inner}"
        yield from details(inner, method)


def page() -> str:
    """Gives the part of docs/api.md behind its introduction.

    Returns:
        Markdown.

    Raises:
        ValueError: a public name is in no group, or its docstring does not describe its arguments.
    """
    names, index, blocks = public(), [], []
    for title, what, here in grouped():
        rows = {name: thing for name, thing in here.items() if small(thing)}
        links = [f"`{name}`" if name in rows else f"[`{name}`](#{anchor(f'hvd.{name}')})" for name in here]
        index.append(f"- [{title}](#{anchor(title)}): {', '.join(links)}")
        blocks += [f"## {title}", what]
        lines: dict[str, list[str]] = {}
        for name, thing in rows.items():
            call = f"`hvd.{name}{'()' if inspect.isfunction(thing) else ''}`"
            lines.setdefault(written(" ".join(doc(thing).body.split())), []).append(call)
        if lines:
            blocks.append(table(["Name", "What it is"], [[", ".join(calls), text] for text, calls in lines.items()]))
        for name in [name for name in here if name not in rows]:
            also = [other for other, same in names.items() if same is here[name] and other != name]
            blocks += entry(name, here[name], also)
    return "\n\n".join(["\n".join(index), *blocks])
