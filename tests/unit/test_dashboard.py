"""docs/grafana: the dashboard asks for what there is, and Grafana's own model knows every field of it."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins, runtime
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.unit.prometheus_case import LABELS
from zos_sglang.observe.metric_families import FAMILIES, Family, Kind

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "zos-sglang.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]

#: Words of PromQL that the dashboard uses; a misspelled one is in no list here.
WORDS = set(["sum", "max", "rate", "increase", "histogram_quantile", "sort_desc", "by", "on", "group_left"])
#: Labels that Prometheus, or SGLang's collector, puts on every series.
EVERYWHERE = {"instance", *LABELS}

_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)\s*\{(?P<labels>[^}]*)\}")
_MATCHER = re.compile(r'(?P<label>\w+)\s*(?P<how>=~|!~|!=|=)\s*"(?P<value>[^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|group_left)\s*\((?P<labels>[^)]*)\)")


def exposed() -> dict[str, Family]:
    """Families by the names of their samples."""
    found = {}
    for family in FAMILIES:
        parts = ("_bucket", "_sum", "_count") if family.kind is Kind.HISTOGRAM else ("",)
        found.update({family.name + part: family for part in parts})
    return found


def labels_of(name: str, family: Family) -> set[str]:
    return {*EVERYWHERE, *family.labels, *({"le"} if name.endswith("_bucket") else ())}


def complaints(expr: str) -> list[str]:
    """What an expression names that is not there."""
    found, known, series = [], exposed(), set[str]()
    for selector in _SELECTOR.finditer(expr):
        family = known.get(selector["name"])
        if family is None:
            found.append(f"no family {selector['name']}")
            continue
        series |= labels_of(selector["name"], family)
        for matcher in _MATCHER.finditer(selector["labels"]):
            label, value = matcher["label"], matcher["value"]
            if label not in labels_of(selector["name"], family):
                found.append(f"no label {label} in {family.name}")
            elif label in family.labels and (wrong := set(value.split("|")) - set(family.labels[label])):
                found.append(f"no {label} {wrong}")
    grouping = {label.strip() for group in _GROUPING.finditer(expr) for label in group["labels"].split(",")}
    found += [f"no label {label} to group by" for label in grouping - {""} - series]
    rest = _GROUPING.sub(" ", _SELECTOR.sub(" ", expr))
    rest = re.sub(r"\[[^\]]*\]", " ", rest)
    found += [f"unknown word {word}" for word in re.findall(r"[a-zA-Z_:][\w:]*", rest) if word not in WORDS]
    return found


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=[f"{t}-{q['refId']}" for t, q in QUERIES])
def test_every_query_names_what_there_is(title: str, target: dict[str, Any]) -> None:
    expr = target["expr"]
    assert complaints(expr) == []
    assert expr.count("(") == expr.count(")")
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    groups = [set(re.findall(r"\w+", group["labels"])) for group in _GROUPING.finditer(expr)]
    assert shown <= set().union(*groups), f"the legend of {title} shows a label that is summed away"
    for selector in _SELECTOR.finditer(expr):
        assert {"model_name", "instance"} <= {one["label"] for one in _MATCHER.finditer(selector["labels"])}
    for counter in re.finditer(r"(\w+) *\(zos_\w+_(?:total|bucket|sum|count)\b", expr):
        assert counter[1] in {"rate", "increase"}, "a counter is shown by its growth"


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("sum(rate(zos_step_total{}[1m]))", "no family"),
        ('zos_mode{reason="x"}', "no label reason in"),
        ('rate(zos_steps_total{path=~"sync|sideways"}[1m])', "no path"),
        ("sum by (cause) (rate(zos_steps_total{}[1m]))", "to group by"),
        ("sums(zos_mode{})", "unknown word sums"),
        ("zos_mode", "unknown word zos_mode"),
    ],
)
def test_a_wrong_query_is_found(expr: str, complaint: str) -> None:
    assert complaint in " ".join(complaints(expr))


def test_every_family_is_on_the_dashboard() -> None:
    asked = " ".join(target["expr"] for _, target in QUERIES)
    assert [
        family.name for family in FAMILIES if f"{family.name}{{" not in asked.replace("_bucket", "")
    ] == []


def test_the_variables_ask_for_what_there_is() -> None:
    variables = {one["name"]: one["query"] for one in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "model_name", "instance"}
    for name in ("model_name", "instance"):
        query = re.fullmatch(r"label_values\((.*), (\w+)\)", variables[name])
        assert query is not None and query[2] == name
        assert complaints(query[1] if "{" in query[1] else query[1] + "{}") == []


def test_rows_and_places() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Why not", "Time", "Lane", "Health"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
    assert all(panel["description"] for panel in PANELS)


# ------------------------------------------------------------ Grafana's model of a dashboard


def lost(source: Any, read: Any, where: str = "") -> list[str]:
    """Places of `source` that are missing or different in `read`, which may have defaults beside."""
    if isinstance(source, dict) and isinstance(read, dict):
        found = [f"{where}/{key}" for key in source if key not in read]
        for key in source.keys() & read.keys():
            found += lost(source[key], read[key], f"{where}/{key}")
        return found
    if isinstance(source, list) and isinstance(read, list) and len(source) == len(read):
        return [
            one
            for i, pair in enumerate(zip(source, read, strict=True))
            for one in lost(*pair, f"{where}/{i}")
        ]
    return [] if source == read else [where]


def read_by_grafana(dashboard: dict[str, Any]) -> Any:
    """The dashboard as Grafana's SDK reads it, written again: what it does not know is gone."""
    plugins.register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(copy.deepcopy(dashboard)), cls=JSONEncoder))


def test_grafana_knows_every_field() -> None:
    plugins.register_default_plugins()
    for panel in PANELS:  # the fields of a panel type that it does not know would be taken as they are
        assert runtime.Runtime().panelcfg_config(panel["type"]) is not None
    assert lost(DASHBOARD, read_by_grafana(DASHBOARD)) == []


@pytest.mark.parametrize("place", ["panel", "options", "query"])
def test_a_field_that_grafana_does_not_know_is_found(place: str) -> None:
    wrong = copy.deepcopy(DASHBOARD)
    panel = next(one for one in wrong["panels"] if one["type"] == "timeseries")
    {"panel": panel, "options": panel["options"], "query": panel["targets"][0]}[place]["expresion"] = "x"
    (found,) = lost(wrong, read_by_grafana(wrong))
    assert found.endswith("/expresion")
