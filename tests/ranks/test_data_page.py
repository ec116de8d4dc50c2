"""The examples of docs/data.md, one after the other in one program, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from hvd_ext.data import cache as caches
from tests import pages
from tests.ranks.training import assert_same_bits_on_all_ranks

pytestmark = pytest.mark.ranks(2)


def test_the_examples_run(hvd: ModuleType, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shared)
    try:
        names = pages.run("docs/data.md", 6)
        first, second = names["history"]["pictures_cache_hits"]
        # where the samples do not divide evenly, each epoch leaves another sample of a part out
        assert (first, second) == (0, 1) if 64 % hvd.size() == 0 else first == 0 and 1 >= second >= 20 / 21
        assert names["padded"].element_spec.shape.as_list() == [None, None]
        assert names["later"].stats()["loaded"] == 0
        assert names["numbers"].stats()["replaced"] == 0
        assert_same_bits_on_all_ranks(names["model"].weights)
    finally:
        hvd.barrier()
        for one in caches.open_caches():
            one.close()
