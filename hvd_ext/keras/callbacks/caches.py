"""The numbers of the data caches of an epoch, in Keras' logs."""

from __future__ import annotations

from typing import Any

from hvd_ext.data.cache import open_caches
from hvd_ext.keras.callbacks import base


class CacheLogs(base.Callback):
    """Puts what each open `hvd_ext.DataCache` did in an epoch into its logs, for this rank; `synchronized` has it.

    For a cache with the name N: "N_cache_hits", the share of samples that memory or disk had; "N_cache_mb", what these
    took from there, in MB; "N_cache_wait_s", the seconds that the threads of the pipeline spent with loading samples or
    waited for other processes to load them. With validation these are of both.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, dict[str, Any]] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note where the counters stand."""
        self._before = {cache.name: cache.stats() for cache in open_caches()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add what the counters have gained."""
        if logs is None:
            return
        for cache in open_caches():
            now, before = cache.stats(), self._before.get(cache.name, {})
            gained = {
                key: now[key] - before.get(key, 0)
                for key in ("hits", "loaded", "memory_bytes", "disk_bytes", "load_s", "wait_s")
            }
            used = gained["hits"] + gained["loaded"]
            if used:
                logs[f"{cache.name}_cache_hits"] = gained["hits"] / used
                logs[f"{cache.name}_cache_mb"] = (gained["memory_bytes"] + gained["disk_bytes"]) / 1e6
                logs[f"{cache.name}_cache_wait_s"] = gained["load_s"] + gained["wait_s"]
