"""The numbers of the data caches of an epoch, in Keras' logs."""

from __future__ import annotations

from typing import Any

from hvd_ext.data.cache import open_caches
from hvd_ext.keras import base

_PLACES = ("memory", "disk")
_PARTS = [(place, what) for place in _PLACES for what in ("bytes", "s")]


class CacheLogs(base.Callback):
    """Puts what each open `hvd_ext.DataCache` did in an epoch into its logs, for this rank; `synchronized` has it.

    For a cache with the name N: "N_cache_hits", the share of samples that memory or disk had; "N_cache_mb", what these
    took from there, in MB; "N_cache_wait_s", the seconds that the threads of the pipeline spent with loading samples or
    waited for other processes to load them. Where a disk had samples there are the parts of each place:
    "N_cache_memory_mb", "N_cache_memory_s", "N_cache_disk_mb" and "N_cache_disk_s". With validation these are of both.

    Attributes:
        names: the logs of the last epoch that it has written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._before: dict[str, dict[str, Any]] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note where the counters stand."""
        self._before = {cache.name: cache.stats() for cache in open_caches()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add what the counters have gained."""
        if logs is None:
            return
        others = set(logs)
        for cache in open_caches():
            now, before = cache.stats(), self._before.get(cache.name, {})
            gained = {
                key: now[key] - before.get(key, 0)
                for key in ("hits", "loaded", "load_s", "wait_s", *(f"{place}_{what}" for place, what in _PARTS))
            }
            used = gained["hits"] + gained["loaded"]
            if used:
                logs[f"{cache.name}_cache_hits"] = gained["hits"] / used
                logs[f"{cache.name}_cache_mb"] = (gained["memory_bytes"] + gained["disk_bytes"]) / 1e6
                logs[f"{cache.name}_cache_wait_s"] = gained["load_s"] + gained["wait_s"]
            if gained["disk_bytes"]:
                for place in _PLACES:
                    logs[f"{cache.name}_cache_{place}_mb"] = gained[f"{place}_bytes"] / 1e6
                    logs[f"{cache.name}_cache_{place}_s"] = gained[f"{place}_s"]
        self.names = set(logs) - others
