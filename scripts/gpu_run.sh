#!/usr/bin/env bash
# What runs on the GPU machine, in a checkout without git and without pip: one command, all checks.
#
#   OUT=folder [BENCH_COMMIT=hash] [BENCH_KIT_ENV=file] [BENCH_LIMIT_S=560] scripts/gpu_run.sh [gpu_check.py arguments]
#
# BENCH_KIT_ENV is a shell file that puts SGLang on the path. Results: gpu_check.json, gpu_check.txt, logs.tar.gz.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?set OUT to a folder for the results}"
if [ -n "${BENCH_KIT_ENV:-}" ]; then
    # shellcheck disable=SC1090
    . "$BENCH_KIT_ENV" || exit 2
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1

# The folder that makes the plugin's entry point findable on PYTHONPATH.
python3 setup.py -q egg_info || exit 2
python3 - <<'PY' || exit 2
from importlib.metadata import entry_points, version
assert any(e.name == "zos" for e in entry_points(group="sglang.srt.plugins")), "the plugin's entry point is not found"
print("sglang", version("sglang"), "torch", version("torch"))
PY

work=$(mktemp -d)
mkdir -p "$OUT"
# Stops in time for the logs to be packed; the servers are stopped by gpu_check itself.
timeout --signal=TERM --kill-after=15 "${BENCH_LIMIT_S:-560}" \
    python3 scripts/gpu_check.py --out "$work" "$@" 2>&1 | tee "$OUT/gpu_check.txt"
code=${PIPESTATUS[0]}
[ -f "$work/gpu_check.json" ] && cp "$work/gpu_check.json" "$OUT/"
tar -C "$work" -czf "$OUT/logs.tar.gz" --exclude=models --exclude=gpu_check.json .
rm -rf "$work"
exit "$code"
