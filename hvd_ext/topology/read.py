"""A cluster from a YAML file; docs/topology.md describes the format.

A node has a name, the link that joins its children, and one of three keys: `ranks` for a host, `children` for a rack or
the cluster (of any depth, and as uneven as needed), or `rank` for a single rank beside branches, which has no link. A
link has a latency and either `beta_s_per_byte` or `gbit_per_s`. A child may have a `port` of its own, which replaces
the link of the node above it, and a host may have `cores`, which its ranks share. The outermost node may have what the
processors need: `gamma_s_per_byte`, the time in which a rank reduces a byte, `message_s`, `selection_s_per_byte` and
`handover`; without them it costs nothing, or what was measured elsewhere. Two hosts with three and two ranks:

    name: cluster
    link: {alpha_s: 30.0e-6, gbit_per_s: 10}
    children:
      - name: left
        link: {alpha_s: 5.0e-6, beta_s_per_byte: 5.0e-10}
        ranks: [0, 2, 4]
      - name: right
        link: {alpha_s: 5.0e-6, beta_s_per_byte: 5.0e-10}
        ranks: [1, 3]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hvd_ext.errors import TopologyError
from hvd_ext.topology.tree import NO_LINK, Link, Node, Tree, leaf


class _LinkSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    alpha_s: float = Field(ge=0, description="latency of a message, in seconds; required")
    gbit_per_s: float | None = Field(
        default=None, gt=0, description="rate of each child's port, each way, in 10^9 bits per second"
    )
    beta_s_per_byte: float | None = Field(
        default=None, ge=0, description="the same in seconds per byte, instead of gbit_per_s; 0 is no limit"
    )

    @model_validator(mode="after")
    def _one_rate(self) -> _LinkSchema:
        if (self.beta_s_per_byte is None) == (self.gbit_per_s is None):
            raise ValueError("a link must have either beta_s_per_byte or gbit_per_s")
        return self

    def link(self) -> Link:
        if self.beta_s_per_byte is not None:
            return Link(self.alpha_s, self.beta_s_per_byte)
        assert self.gbit_per_s is not None
        return Link(self.alpha_s, 8 / (self.gbit_per_s * 1e9))


class _NodeSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(default="", description="used in messages; may be left out")
    link: _LinkSchema | None = Field(default=None, description="joins what is below the node; only `rank` has none")
    port: _LinkSchema | None = Field(
        default=None, description="the node's own port to the node above it, where it differs from that node's `link`"
    )
    cores: float | None = Field(
        default=None,
        gt=0,
        description="processor cores that the ranks of a host may use; a core for each rank by default",
    )
    medium: str = Field(
        default="",
        description="what joins GPUs of a host that have the buckets: NVLink, PCIe or host memory; such a host may "
        "have `children`: groups of GPUs with a medium of their own, and single ranks",
    )
    ranks: list[int] | None = Field(default=None, min_length=1, description="the node is a host with these ranks")
    children: list[_NodeSchema] | None = Field(
        default=None, min_length=1, description="the node is a rack, or the cluster: hosts, racks, single ranks"
    )
    rank: int | None = Field(default=None, ge=0, description="the node is a single rank beside hosts or racks")

    @model_validator(mode="after")
    def _one_content(self) -> _NodeSchema:
        keys = [key for key in ("children", "ranks", "rank") if getattr(self, key) is not None]
        if len(keys) != 1:
            raise ValueError(
                f"a node must have exactly one of children, ranks and rank, got {' and '.join(keys) or 'none'}"
            )
        if (self.link is None) != (self.rank is not None):
            raise ValueError("a node with children or ranks must have a link, which joins them; a single rank has none")
        if any(rank < 0 for rank in self.ranks or ()):
            raise ValueError(f"ranks must be 0 or more, got {self.ranks}")
        return self

    def node(self) -> Node:
        port = self.port.link() if self.port else None
        if self.rank is not None:
            return leaf(self.rank, port)
        children = tuple(child.node() for child in self.children or ()) or tuple(leaf(r) for r in self.ranks or ())
        link = self.link.link() if self.link else NO_LINK
        return Node(self.name, link, children, port=port, cores=self.cores or 0.0, medium=self.medium)


class _ClusterSchema(_NodeSchema):
    gamma_s_per_byte: float = Field(
        default=0.0,
        ge=0,
        description="time of a rank to reduce a byte, in seconds; 0, the default, leaves it out of the prices",
    )
    message_s: float = Field(
        default=0.0,
        ge=0,
        description="time of a rank's processor for each message to or from another host, in seconds; 0 by default",
    )
    selection_s_per_byte: float | None = Field(
        default=None,
        ge=0,
        description="time of a rank to select from a byte of a buffer, in seconds; measured on one core by default",
    )
    handover: _LinkSchema | None = Field(
        default=None, description="time of a rank to hand a buffer to the engine and to get it back; none by default"
    )
    size_nbytes: list[float] = Field(
        default=[],
        description="sizes of buffers in bytes, ascending, for which `size_factors` has factors",
    )
    size_factors: list[float] = Field(
        default=[],
        description="how many times as long a byte of buffers up to each size takes in hosts; the last one counts for "
        "larger buffers too; 1 by default",
    )

    def tree(self) -> Tree:
        handover = self.handover.link() if self.handover else NO_LINK
        costs = (self.gamma_s_per_byte, self.message_s, self.selection_s_per_byte, handover)
        if len(self.size_nbytes) != len(self.size_factors):
            raise TopologyError(
                f"size_nbytes and size_factors must have equal lengths; got {len(self.size_nbytes)} and "
                f"{len(self.size_factors)}"
            )
        return Tree(self.node(), *costs, tuple(zip(self.size_nbytes, self.size_factors, strict=True)))


def table() -> list[tuple[str, str, str, str]]:
    """Lists the keys of a topology file, each with the object that has it, the type of its value, and its meaning."""
    outermost = {
        name: field for name, field in _ClusterSchema.model_fields.items() if name not in _NodeSchema.model_fields
    }
    places = {"a node": _NodeSchema.model_fields, "a link": _LinkSchema.model_fields, "the outermost node": outermost}
    schema = _ClusterSchema.model_json_schema()
    schemas = {**schema["$defs"]["_LinkSchema"]["properties"], **schema["properties"]}
    return [
        (name, place, _takes(schemas[name]), field.description or "")
        for place, fields in places.items()
        for name, field in fields.items()
    ]


def _takes(schema: dict[str, Any]) -> str:
    """Describes the values of a key in words, from the key's JSON schema of pydantic."""
    schema = next((either for either in schema.get("anyOf", ()) if either.get("type") != "null"), schema)
    if "$ref" in schema:
        return {"_LinkSchema": "a link", "_NodeSchema": "a node"}[schema["$ref"].rpartition("/")[2]]
    if schema["type"] == "array":
        many = {"a node": "nodes", "a whole number": "whole numbers", "a number": "numbers"}[_takes(schema["items"])]
        return f"a list of {many}" + (f", {schema['minItems']} or more" if "minItems" in schema else "")
    words = {"string": "text", "number": "a number", "integer": "a whole number"}[schema["type"]]
    if "minimum" in schema:
        return f"{words}, {schema['minimum']:g} or more"
    return f"{words} above {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else words


def read(path: str | Path, size: int | None = None) -> Tree:
    """Reads a cluster from a YAML file in the format that the module's docstring describes.

    Raises:
        TopologyError: the file is missing, is not YAML, breaks the format (unknown key, missing key, wrong type),
            names a rank twice or not at all, or has another number of ranks than the job.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"topology file {path}: it cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TopologyError(f"topology file {path}: it is not UTF-8 text: {error}") from error
    return parse(text, str(path), size)


def parse(text: str, source: str = "text", size: int | None = None) -> Tree:
    """Reads a cluster from YAML text.

    Raises:
        TopologyError: as for read().
    """
    where = f"topology file {source}"
    try:
        content = yaml.safe_load(text)
    except Exception as error:  # PyYAML's own, and Python's where a scalar cannot be made, such as the date 2020-13-45
        raise TopologyError(f"{where}: it is not YAML: {' '.join(str(error).split())}") from error
    try:
        cluster = _ClusterSchema.model_validate(content)
        tree = cluster.tree()
    except ValidationError as error:
        raise TopologyError(f"{where}: {_first_fault(error)}") from error
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from error
    if size is not None and tree.size != size:
        raise TopologyError(f"{where}: it has {tree.size} ranks and the job has {size}; both must be equal")
    return tree


def _first_fault(error: ValidationError) -> str:
    faults = error.errors()
    fault = faults[0]
    place = ".".join(str(part) for part in fault["loc"]) or "the top level"
    words = {
        "extra_forbidden": "unknown key",
        "missing": "missing key",
        "model_type": "a node is a mapping with name, link and one of children, ranks, rank",
    }
    text = words.get(fault["type"], f"{fault['msg']}, got {fault['input']!r}")
    if fault["type"] == "value_error":
        text = fault["msg"].removeprefix("Value error, ")
    return f"{place}: {text}" + (f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else "")
