"""The server starts that the scenarios share: as few as the flags allow."""

from __future__ import annotations

from zos_sglang.testing.compare.scenario import ServerConfig

# A pool that no scenario fills, chunks small enough that long prompts have several, and batch
# sizes in the log often enough to prove that requests ran together.
COMMON = ("--dtype", "float32", "--chunked-prefill-size", "256", "--decode-log-interval", "4")
ROOM = ("--max-total-tokens", "24000", "--max-running-requests", "32")

PLAIN = ServerConfig("plain", (*COMMON, *ROOM))
MIXED_CHUNK = ServerConfig("mixed-chunk", (*COMMON, *ROOM, "--enable-mixed-chunk"))
# 24 requests of some 30 + 160 tokens want 4,500 tokens; they get 1,000.
SMALL_POOL = ServerConfig(
    "small-pool",
    (
        *(*COMMON, "--max-total-tokens", "1000", "--max-running-requests", "24"),
        # Admit far more than fits, so that the pool overflows while decoding.
        *("--schedule-conservativeness", "0.1"),
    ),
)
FEW_SLOTS = ServerConfig(
    "few-slots",
    (
        *(*COMMON, "--max-total-tokens", "24000", "--max-running-requests", "6"),
        *("--enable-priority-scheduling", "--enable-return-hidden-states"),
    ),
)
# Token differences instead of cumulative text, every eighth token, and whole batches in one
# message, which makes the sampler's random stream repeatable.
STREAM_8 = ServerConfig(
    "stream-8",
    (
        *(*COMMON, *ROOM, "--stream-interval", "8", "--incremental-streaming-output"),
        *("--random-seed", "7", "--enable-tokenizer-batch-encode"),
    ),
    our_env={"ZOS_CONSECUTIVE_PREFILL": "never"},
    incremental=True,
)
DELAY_SAMPLE = ServerConfig("delay-sample", (*COMMON, *ROOM), env={"SGLANG_ENABLE_DELAY_SAMPLE": "1"})
PREFILL_WAITS = ServerConfig(
    "prefill-waits", (*COMMON, *ROOM), env={"SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP": "1"}
)
PAGED = ServerConfig("paged", (*COMMON, *ROOM, "--page-size", "16", "--enable-metrics"))
# Sampled answers repeat here, as on STREAM_8; places for 8, so that a queue can be full.
UNCACHED = ServerConfig(
    "uncached",
    (
        *(*COMMON, "--max-total-tokens", "24000", "--max-running-requests", "8", "--disable-radix-cache"),
        *("--random-seed", "7", "--enable-tokenizer-batch-encode", "--enable-return-hidden-states"),
    ),
    our_env={"ZOS_CONSECUTIVE_PREFILL": "never"},
)
# 12 requests of some 24 + 160 tokens want 140 pages; they get 50.
PAGED_TIGHT = ServerConfig(
    "paged-tight",
    (
        *(*COMMON, "--max-total-tokens", "800", "--max-running-requests", "16", "--page-size", "16"),
        *("--disable-radix-cache", "--schedule-conservativeness", "0.1"),
    ),
)
EMBEDDING = ServerConfig("embedding", (*COMMON, *ROOM, "--is-embedding"))
HICACHE = ServerConfig(
    "hicache",
    (
        *(*COMMON, "--max-total-tokens", "1500", "--max-running-requests", "16"),
        *("--enable-hierarchical-cache", "--hicache-size", "1", "--hicache-write-policy", "write_through"),
    ),
)
