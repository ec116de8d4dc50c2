"""Planted faults: small mistakes, each in a patch, and a command that shows which of them the tests notice."""

from __future__ import annotations
