"""`prometheus_client` in its multiprocess mode, as SGLang's processes use it, in one test's own folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector

from zos_sglang.observe.metrics import Classes

#: Labels as SGLang's collector has them: ranks are numbers.
LABELS = {"model_name": "tiny", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}


class Scrape:
    """What a GET of /metrics would find."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self.folder))
        return registry

    def text(self) -> str:
        return generate_latest(self._registry()).decode()

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Values by sample name and labels, without those of `LABELS`, which each sample must have."""
        common = {(name, str(value)) for name, value in LABELS.items()}
        found = {}
        for family in self._registry().collect():
            for sample in family.samples:
                labels = set(sample.labels.items())
                assert common <= labels, sample
                found[(sample.name, frozenset(labels - common))] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, frozenset(labels.items())))


@contextmanager
def multiprocess(folder: Path) -> Iterator[Scrape]:
    """`prometheus_client` chooses at its import where values live; here it is chosen anew for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
        patch.setattr(values, "ValueClass", values.MultiProcessValue())
        yield Scrape(folder)


def classes() -> Classes:
    """`prometheus_client`'s classes with a registry of their own: families can be made again and again."""
    registry = CollectorRegistry()
    return Classes(
        counter=partial(prometheus_client.Counter, registry=registry),
        gauge=partial(prometheus_client.Gauge, registry=registry),
        histogram=partial(prometheus_client.Histogram, registry=registry),
    )
