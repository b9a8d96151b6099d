"""Packaging of zos-sglang. Each dependency says beside it why it is here."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="zos-sglang",
    version="0.1.0",
    description="Zero-overhead scheduling for SGLang, as an installable plugin",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # SGLang 0.5.23 needs outlines_core 0.1.26, which has no wheel for 3.13.
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["zos_sglang", "zos_sglang.*"]),
    include_package_data=True,
    package_data={
        "zos_sglang": [
            "py.typed",
            "testing/platform_entry/*.egg-info/*",
            "observe/tools/report.css",
            "observe/tools/report.js",
        ]
    },
    install_requires=[
        # The engine we patch. It brings torch, flashinfer-python and sglang-kernel
        # (the package that provides the module `sgl_kernel`) in the versions it needs.
        # The releases that hooks carry fingerprints of (upstream/versions.py).
        "sglang>=0.5.22,<0.5.24",
        # The scheduler's sockets: a bounded exit must bound how long they linger.
        "pyzmq>=25",
        # Typed, ranged, self-describing settings (settings.py).
        "pydantic>=2.7",
        # The middleware in front of /set_internal_state (mode names, HTTP 400).
        "starlette",
        # SGLang's --config files, merged before our flags are read.
        "pyyaml",
        # Tables of `python -m zos_sglang` and of the demo.
        "rich>=13",
        # Our families in SGLang's own /metrics (upstream/metrics_factory.py).
        "prometheus-client>=0.20",
    ],
    extras_require={
        # Clients and model conversion of `make demo` and scripts/.
        "demo": [
            "httpx>=0.27",  # concurrent streaming requests against two servers
            "psutil",  # stops a server with all its children
            "gguf>=0.10",  # reads the quantised demo model
        ],
        # scripts/bench_*.py beyond SGLang's own dependencies.
        "bench": [
            "httpx>=0.27",
            "psutil",
            "matplotlib>=3.8",  # the plot of bench_zos.py, which runs without it too
        ],
        # The pages as a site, `make docs`, and the test that builds it.
        "docs": [
            # Brings MkDocs 1. Its makers maintain it until May 2027; MkDocs 2 has neither plugins nor themes.
            "mkdocs-material>=9.5,<10",
        ],
        "test": [
            "httpx>=0.27",
            "psutil",
            "gguf>=0.10",
            "pytest>=8",
            "pytest-cov>=5",  # the coverage floor of settings, upstream, overlap and resident
            "pytest-xdist>=3.5",  # two servers start at a time: half an hour less
            "pytest-timeout>=2.3",  # a hang fails with both stacks, not with the CI limit
            "hypothesis>=6.100",  # property tests of the overlap core
            "matplotlib>=3.8",  # bench_zos.py's plot
            "grafana-foundation-sdk",  # Grafana's own model of a dashboard, against docs/grafana
            # Opens reports in the Chromium that the machine has; brings none of its own.
            "playwright>=1.50",
            "pillow",  # looks at the pixels of a page's picture
            "ruff>=0.6",
            "mypy>=1.10",
        ],
    },
    entry_points={
        "sglang.srt.plugins": ["zos = zos_sglang.plugin:register"],
        "console_scripts": ["zos-sglang = zos_sglang.__main__:main"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
