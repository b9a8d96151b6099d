"""Step times out of a server's log: only lines whose steps all ran in one mode count."""

import json

from zos_sglang.testing.bench.logtime import main, step_times

DECODE = "[t] Decode batch, #running-req: {n}, #token: 9, gen throughput (token/s): {rate}, #queue-req: 0"
SWITCH = "[t] zos-sglang: mode {} -> {}"


def line(n, rate):
    return DECODE.format(n=n, rate=rate)


def test_a_line_counts_when_the_line_before_it_belongs_to_the_same_turn():
    log = [SWITCH.format("overlap", "stock"), line(16, 100), line(16, 8000), line(16, 4000)]
    assert step_times(log) == {(16, "stock"): [2000.0, 4000.0]}


def test_a_switch_a_prefill_and_another_batch_size_each_start_over():
    log = [
        SWITCH.format("overlap", "stock"),
        *(line(16, 8000), SWITCH.format("stock", "overlap"), line(16, 8000)),
        *("[t] Prefill batch, #new-seq: 1", line(16, 8000)),
        line(64, 8000),
    ]
    assert step_times(log) == {}


def test_before_the_first_switch_the_mode_is_not_known():
    assert step_times([line(1, 500), line(1, 500)]) == {}


def test_the_command_writes_medians_and_their_ratio_to_stock(tmp_path, capsys):
    log = tmp_path / "server.log"
    stock = [SWITCH.format("off", "stock"), line(1, 500), line(1, 500), line(1, 500)]
    ours = [SWITCH.format("stock", "overlap"), line(1, 500), line(1, 625), line(1, 625)]
    log.write_text("\n".join(stock + ours))
    out = tmp_path / "out.json"
    assert main([str(log), "--out", str(out)]) == 0
    rows = {row["mode"]: row for row in json.loads(out.read_text())["logs"]["server.log"]}
    assert rows["overlap"]["median_over_stock"] == 0.8
    assert rows["stock"]["step_us"]["median"] == 2000.0
    assert "overlap" in capsys.readouterr().out


def test_a_log_without_counted_lines_is_an_error(tmp_path, capsys):
    log = tmp_path / "empty.log"
    log.write_text("nothing")
    assert main([str(log), "--out", str(tmp_path / "out.json")]) == 2
    assert "no decode lines" in capsys.readouterr().err
