"""Holds the what-if model against measurement: `scripts/check_model.py`.

Data flows one way: a result of bench_zos (`waves`) or step records (`records`) become cases, one a setting
and mode, each with inputs that other modes gave; `compare` predicts and judges, `cli` writes and prints.
"""
