"""Loaders of other packages, as the data benchmark compares them; each hands over pictures and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Epochs = Callable[[int], Iterator[tuple[Any, Any]]]


class _Rows:
    """A source of Grain: the rows of an array with their numbers."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return self._rows[number], np.int32(number)


def grain_epochs(rows: Any, batch: int) -> Epochs:
    """Read an array with Grain, in this process, with the number of threads that it has by itself."""
    import grain

    seeds = iter(range(1 << 30))

    def epochs(passes: int) -> Iterator[tuple[Any, Any]]:
        for _ in range(passes):
            shuffled = grain.MapDataset.source(_Rows(rows)).shuffle(seed=next(seeds))
            yield from shuffled.batch(batch, drop_remainder=True).to_iter_dataset()

    return epochs


def streaming_epochs(samples: Iterable[Any], folder: Path, batch: int) -> Epochs:
    """Write shards of MosaicML Streaming, and read them with its own loader, in this process."""
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    with MDSWriter(out=str(folder), columns={"picture": "ndarray", "label": "int"}) as writer:
        for number, picture in enumerate(samples):
            writer.write({"picture": picture, "label": number})
    data = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=1, batch_size=batch)
    loader = DataLoader(data, batch_size=batch)

    def epochs(passes: int) -> Iterator[tuple[Any, Any]]:
        for _ in range(passes):
            for found in loader:
                yield found["picture"].numpy(), found["label"].numpy()

    return epochs
