"""Why the gradients of an optimizer or tape are reduced as they are, as one table, and their layout as a file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_ext.errors import InvalidError
from hvd_ext.job import log
from hvd_ext.planning.prediction import predict
from hvd_ext.trace import rounds

if TYPE_CHECKING:
    from rich.table import Table

    from hvd_ext.job.runtime import Runtime
    from hvd_ext.planning.bucket_layout import BucketLayout, Layout
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import Reducer
    from hvd_ext.tensorflow.gradients.replanning import Review

WIDTH = 170
NAMED = 2  # runners-up for each bucket


def explained(reducer: Reducer, file: str | Path | None) -> str:
    """Describe how each list of variables is reduced.

    Args:
        file: where to write the layout of the newest channel; None for nowhere.

    Returns:
        A table for each open channel, and one of its rounds so far if they are partial.

    Raises:
        InvalidError: no step has been made yet, or the file cannot be written.
        PlanError: two gradients have the same name, so that a file cannot name them.
    """
    texts = []
    newest: Layout | None = None
    inner = [part for gradients in reducer.sets for part in gradients.policy.reducers]
    for gradients in [one for part in (reducer, *inner) for one in part.sets]:
        for channel in (*gradients.channels, *gradients.policy.channels):
            if channel.is_open:
                replanning = gradients.replannings.get(channel)
                review = replanning.reviews[-1] if replanning is not None and replanning.reviews else None
                texts.append(of_layout(gradients.job, channel.name, channel.layout, review))
                if channel.partial is not None:
                    texts.append(of_rounds(gradients.job, channel))
                newest = channel.layout if channel in gradients.channels else newest
    if newest is None:
        raise InvalidError(f"explain ({reducer.label}): its buckets are planned at its first step; call it later")
    if file is not None:
        try:
            Path(file).write_text(json.dumps(newest.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidError(f"explain, file ({file}): it cannot be written: {error.strerror or error}") from error
    return "\n".join(texts)


def say(job: Runtime, name: str, layout: Layout, review: Review | None) -> None:
    """Print a layout's table on rank 0, if `Options.explain` asks for it; without a review, no times are known."""
    if job.options.explain and job.engine.rank == 0:
        log.write(log.line(f"{name}: the buckets\n{of_layout(job, name, layout, review)}"))


def of_layout(job: Runtime, name: str, layout: Layout, review: Review | None) -> str:
    """Describe a layout as a table of buckets with predicted times, the reasons for them, and the measured step."""
    from rich.table import Table

    count = len(layout.buckets)
    title = f"{name}: {count} bucket{'s' * (count != 1)}" + (f" by {layout.bucketer}" if layout.bucketer else "")
    predicted = None if review is None else predict(job.tree, layout, review.times)
    if review is not None and predicted is not None:
        title += f", planned after step {review.step}; predicted step {_ms(predicted.step_s)} ms"
        title += "" if review.measured_s is None else f", measured before {_ms(review.measured_s)} ms"
    table = Table(title=title, title_justify="left")
    for head in ("bucket", "tensors", "size", "sent as", "algorithm", "segment", "ready ms", "begins ms", "ends ms"):
        table.add_column(head, justify="left" if head in ("sent as", "algorithm") else "right", no_wrap=True)
    table.add_column("runners-up, alone", no_wrap=True)
    for number, (bucket, nbytes) in enumerate(zip(layout.buckets, layout.nbytes, strict=True)):
        times = ["-"] * 3
        if review is not None and predicted is not None:
            of_bucket = (predicted.ready_s, predicted.begins_s, predicted.ends_s)
            times = [_ms(seconds[number]) for seconds in of_bucket]
        table.add_row(
            str(number),
            str(len(bucket.tensors)),
            _size(nbytes),
            _form(bucket),
            bucket.plan.algorithm,
            _size(bucket.segment_nbytes),
            *times,
            _runners_up(bucket),
        )
    lines = [f"{what}: {why}" for what, why in (("buckets", layout.reason), ("form", layout.form_reason)) if why]
    if layout.largest is not None and layout.largest.choice is not None:
        lines.append(f"largest bucket: {layout.largest.choice.why}")
    if review is not None:
        lines.append(str(review))
    return _printed(table) + "".join(f"{line}\n" for line in lines)


def of_rounds(job: Runtime, channel: Channel) -> str:
    """Sum up the rounds of a channel that are over; an empty text if there is none."""
    engine = job.engine
    summary = rounds.of_engine(engine.rounds(channel.handle), engine.rank, engine.ranks)
    return "" if summary is None else _printed(summary.table(channel.name))


def _printed(table: Table) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=WIDTH).print(table)
    return out.getvalue()


def _form(bucket: BucketLayout) -> str:
    selection, whole = bucket.selection, bucket.wire or bucket.dtype
    if selection is None or bucket.wire is not None:
        return whole
    if selection.dense_above == 0:
        return f"whole {whole}, and residuals"
    return {"topk": "top-k", "sign": "signs"}.get(selection.codec, f"{selection.bits} bits")


def _runners_up(bucket: BucketLayout) -> str:
    if bucket.choice is None:
        return ""
    prices = [(price, name) for name, price in bucket.choice.candidates if not isinstance(price, str)]
    others = [(price, name) for price, name in sorted(prices) if name != bucket.choice.algorithm][:NAMED]
    return ", ".join(f"{name} {_ms(price)} ms" for price, name in others)


def _size(nbytes: int) -> str:
    for unit, factor in (("MB", 1_000_000), ("kB", 1000)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"
