from rlhf_core.data.rows import read_jsonl, write_jsonl


def test_jsonl_round_trip(tmp_path):
    rows = [{"a": "ü\u2028x\r\n"}, {"a": 1}]
    write_jsonl(tmp_path / "d" / "r.jsonl", rows)
    assert read_jsonl(tmp_path / "d" / "r.jsonl") == rows
