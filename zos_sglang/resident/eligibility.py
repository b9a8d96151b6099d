"""Who may ride the lane: one named reason for every refusal, one for every departure."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """Why a decode batch stays on the ordinary path. Closed: there is no `other`."""

    # The server's configuration; found once.
    SPECULATION = "speculation"
    PIPELINE_PARALLEL = "pipeline-parallel"
    DP_ATTENTION = "dp-attention"
    DISAGGREGATION = "disaggregation"
    LORA_SERVER = "lora-server"
    KV_POOL = "kv-pool"
    ATTENTION_BACKEND = "attention-backend"
    HOST_CACHE = "host-cache"
    OUTPUT_PATH = "output-path"
    SAMPLER = "sampler"
    MODEL = "model"
    DIAGNOSTICS = "diagnostics"
    SELECTION = "selection"
    UPSTREAM_LAUNCH = "upstream-launch"
    OTHER_PLUGIN = "other-plugin"
    RELEASE = "release"
    # The batch at hand.
    NOT_DECODE = "not-decode"
    #: A grammar is being compiled, and its request joins when it is ready.
    GRAMMAR = "grammar"
    #: A grammar whose mask the lane does not know how to fill.
    GRAMMAR_BACKEND = "grammar-backend"
    LOGPROBS = "logprobs"
    PENALTIES = "penalties"
    LOGIT_PROCESSOR = "logit-processor"
    HIDDEN_STATES = "hidden-states"
    LORA = "lora"
    SESSION = "session"
    MULTIMODAL = "multimodal"
    BEAM_SEARCH = "beam-search"
    REQUEST_OUTPUT = "request-output"
    CHUNKED_PREFILL = "chunked-prefill"
    ADMISSION_OPEN = "admission-open"
    ABORT_PENDING = "abort-pending"
    BATCH_SIZE = "batch-size"
    CLOSED_FOR_GOOD = "closed-for-good"
    #: A row ended with the result that was processed before this launch.
    ROW_ENDED = "row-ended"


class Departure(StrEnum):
    """Why the lane was left. Closed: there is no `other`."""

    INTAKE = "intake"
    FINISH = "finish"
    LENGTH_LIMIT = "length-limit"
    POOL_FULL = "pool-full"
    EXIT = "exit"
    FAULT = "fault"
