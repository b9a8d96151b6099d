#!/usr/bin/env python3
"""Makes the pictures of two pages of docs (observability, how-it-works) from real runs. About seven minutes.

    python scripts/make_docs_images.py [--out docs/images] [--work FOLDER]
    python scripts/make_docs_images.py --timelines    # docs/how-it-works.md, from docs/traces; no server

Five real servers one after the other, with a tiny model and the virtual GPU of
`zos_sglang.testing.slow_device`: a step keeps the device for 15 ms, and selecting a batch takes 6 ms longer
than it would. So overlap shows on a machine without a GPU, and the times are those of no real GPU.

Needs the extra `test` of setup.py and Chromium. metrics.png needs Prometheus too (Debian's package has it);
without it that picture stays as it is.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from rich.console import Console

from zos_sglang.observe.tools.top_view import view
from zos_sglang.testing import slow_device
from zos_sglang.testing.distribution import distribution
from zos_sglang.testing.docs import picture, timeline
from zos_sglang.testing.models import make_tiny
from zos_sglang.testing.server import HOST, ServerProcess, free_port
from zos_sglang.testing.slow_device import Pace

ROOT = Path(__file__).parents[1]
PACE = Pace(us=15_000, prefill_us=15_000, host_us=6_000)
#: One layer: the real forward is small beside the rest of a step.
ARGS = ("--json-model-override-args", '{"num_hidden_layers": 1}', "--enable-metrics")
ROWS, CLIENTS = 16, 12
#: Seconds of traffic in each mode for metrics.png.
EACH_S = 30
PANELS = ("Steps by path", "Steps not overlapped", "Launch interval and device time", "Wait for the result")
MODES = ("sync", "overlap", "resident")
#: Excerpts of traces, which the timelines are drawn from; kept, so that anybody can look at them.
TRACES = ROOT / "docs" / "traces"


# ------------------------------------------------------------ a server and its traffic


@contextmanager
def server(work: Path, name: str, mode: str) -> Iterator[ServerProcess]:
    """A server with the virtual GPU that writes its trace to `work/NAME.json`; ended by SIGTERM."""
    found_by = distribution(work, "slow-device", "1.0", slow_device.ENTRY)
    pace = work / "pace.json"
    slow_device.set_pace(pace, PACE)
    env = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), found_by["PYTHONPATH"]]),
        "ZOS_TRACE": str(work / f"{name}.json"),
        slow_device.FILE: str(pace),
    }
    model = make_tiny("qwen3", ROOT / ".cache" / "tiny-qwen3")
    found = ServerProcess(model, mode=mode, env=env, args=ARGS, log=work / f"{name}.log", cpu=True)
    found.start()
    try:
        steady(found.url, 20)  # what is slow once
        yield found
    finally:
        found.stop(grace_s=60)


def post(url: str, path: str, body: Any) -> Any:
    answer = httpx.post(url + path, json=body, timeout=120, trust_env=False)
    answer.raise_for_status()
    return answer.json()


def generate(url: str, text: str | list[str], tokens: int) -> None:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    post(url, "/generate", {"text": text, "sampling_params": params})


def steady(url: str, tokens: int) -> None:
    """One batch, all rows there from the first step to the last."""
    generate(url, [f"request {row}" for row in range(ROWS)], tokens)


def traffic(url: str, seconds: float) -> None:
    """Requests that come and go."""
    until = time.monotonic() + seconds

    def client(number: int) -> None:
        while time.monotonic() < until:
            generate(url, f"client {number}", 40 + 10 * number)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))


def switch(url: str, mode: str) -> None:
    """To `mode`, with the records of the mode before forgotten."""
    for values in ({"zos_mode": mode}, {"zos_record_reset": 1}):
        assert post(url, "/set_internal_state", {"server_args": values}) == [True]


def tool(*words: str) -> str:
    """What `python -m zos_sglang WORDS` prints."""
    command = [sys.executable, "-m", "zos_sglang", *words]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


# ------------------------------------------------------------ pictures


@contextmanager
def browser() -> Iterator[Any]:
    """A page in the machine's Chromium."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise SystemExit("no Chromium on this machine; `make browser` installs it as root")
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=flags)
        yield chromium.new_page(viewport={"width": 1240, "height": 900})
        chromium.close()


def save(picture: bytes, path: Path) -> None:
    """As a PNG of 256 colours, the rare ones of legends among them."""
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    few = whole.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def picture_of_top(page: Any, url: str, mode: str, out: Path) -> None:
    """`top --once` in the middle of a batch."""
    switch(url, mode)
    batch = threading.Thread(target=steady, args=(url, 600))
    batch.start()
    time.sleep(3)
    frame = json.loads(tool("top", url, "--once", "--json"))
    batch.join()
    width = 124
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(view(frame, width))
    title = f"python -m zos_sglang top {url}"
    # The font of rich's own style is on the web.
    svg = console.export_svg(title=title).replace("Fira Code", "DejaVu Sans Mono")
    page.set_content(f"<body style='margin:0;width:1240px'>{svg}</body>")
    save(page.locator("svg").screenshot(), out / f"top-{mode}.png")


def pictures_of_report(page: Any, work: Path, mode: str, out: Path) -> None:
    """The report of a trace: its first screens for mode overlap, the timeline alone for every mode."""
    print(tool("report", str(work / f"{mode}.json"), "-o", str(work / f"{mode}.html")), end="")
    page.goto((work / f"{mode}.html").as_uri())
    page.wait_for_load_state("networkidle")
    save(page.locator("#timeline").screenshot(), out / f"timeline-{mode}.png")
    if mode == "overlap":
        box = page.locator("section").nth(2).bounding_box()
        clip = {"x": 0, "y": 0, "width": 1240, "height": box["y"] + box["height"] + 8}
        save(page.screenshot(full_page=True, clip=clip), out / "report.png")


# ------------------------------------------------------------ Prometheus


class Prometheus:
    """A Prometheus that scrapes one server every second."""

    def __init__(self, command: str, work: Path, target: str) -> None:
        config, data = work / "prometheus.yml", work / "prometheus"
        scrape = {"job_name": "sglang", "static_configs": [{"targets": [target]}]}
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
        self.url = f"http://{HOST}:{free_port()}"
        listen = f"--web.listen-address={self.url.removeprefix('http://')}"
        with (work / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [command, f"--config.file={config}", f"--storage.tsdb.path={data}", listen],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def query(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        """Series of an expression of the dashboard, with its variables put in."""
        for name, value in {"$model_name": ".*", "$instance": ".*", "$__rate_interval": "10s"}.items():
            expr = expr.replace(name, value)
        params = {"query": expr, "start": f"{start}", "end": f"{end}", "step": "1"}
        answer = httpx.get(f"{self.url}/api/v1/query_range", params=params, trust_env=False)
        answer.raise_for_status()
        return list(answer.json()["data"]["result"])

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def picture_of_metrics(prometheus: Prometheus, url: str, out: Path) -> None:
    """Four panels' own queries, asked of Prometheus over a run through three modes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    start, begins = time.time(), []
    for mode in MODES:
        switch(url, mode)
        begins.append(time.time() - start)
        traffic(url, EACH_S)
    end = time.time()
    dashboard = json.loads((ROOT / "docs" / "grafana" / "zos-sglang.json").read_text())
    panels = {panel["title"]: panel for panel in dashboard["panels"]}
    figure, axes = plt.subplots(2, 2, figsize=(11, 5.6), dpi=100)
    for title, axis in zip(PANELS, axes.flat, strict=True):
        seconds = panels[title]["fieldConfig"]["defaults"]["unit"] == "s"
        for target in panels[title]["targets"]:
            for series in prometheus.query(target["expr"], start, end):
                label = target["legendFormat"]
                for name, value in series["metric"].items():
                    label = label.replace("{{" + name + "}}", value)
                values = [float(value) * (1000 if seconds else 1) for _, value in series["values"]]
                if not any(values):
                    continue
                axis.plot([when - start for when, _ in series["values"]], values, label=label)
        for begin, mode in zip(begins, MODES, strict=True):
            axis.axvline(begin, color="#999999", linewidth=0.8)
            axis.text(begin + 1, 0.97, mode, transform=axis.get_xaxis_transform(), va="top", fontsize=8)
        axis.set_title(title + (", ms" if seconds else ", a second"), fontsize=10)
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, end - start)
        axis.margins(y=0.25)
        axis.legend(fontsize=8)
    figure.supxlabel("seconds", fontsize=9)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    save(drawn.getvalue(), out / "metrics.png")


def timelines(out: Path) -> None:
    """Pictures of docs/how-it-works.md."""
    for name, (data, draw) in timeline.pictures(TRACES).items():
        picture.write(out / name, data, draw)
        print(f"{out / name}: {(out / name).stat().st_size / 1000:.0f} kB")


def make(work: Path, out: Path) -> None:
    with browser() as page:
        for mode in timeline.TITLES:
            with server(work, mode, mode) as running:
                traffic(running.url, 6)
                steady(running.url, 80)
            timeline.excerpt(work / f"{mode}.json", TRACES / f"{mode}.json")
            if mode in MODES:
                pictures_of_report(page, work, mode, out)
        timelines(out)
        with server(work, "modes", "sync") as running:
            for mode in MODES:
                picture_of_top(page, running.url, mode, out)
            if command := shutil.which("prometheus"):
                prometheus = Prometheus(command, work, running.url.removeprefix("http://"))
                try:
                    picture_of_metrics(prometheus, running.url, out)
                finally:
                    prometheus.stop()
            else:
                print("no Prometheus on this machine: metrics.png stays as it is")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--work", type=Path, help="for traces, pages and logs (default: a temporary folder)")
    parser.add_argument("--timelines", action="store_true", help="only draw what docs/traces has")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.timelines:
        timelines(args.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        make(work.resolve(), args.out)


if __name__ == "__main__":
    main()
