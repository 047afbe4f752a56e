"""`penstock simulate`."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from penstock.cli import main


@pytest.fixture
def trace(tmp_path):
    lines = [
        {
            "timestamp": number * 1000,
            "input_length": 512 * (3 + number // 20),
            "output_length": 1,
            "hash_ids": [number % 20 * 100 + block for block in range(3 + number // 20)],
        }
        for number in range(100)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def test_json_tells_of_private_caches_a_pool_and_both(trace, capsys):
    options = ["--bytes-per-token", "1KiB", "--host-bytes", "64MiB", "--pool-bytes", "128MiB"]
    assert main(["simulate", trace, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["outcomes"]) == ["private caches", "shared pool", "both"]
    private, shared, both = (each["hit_ratio"] for each in found["outcomes"].values())
    assert private < shared == found["bounds"]["no bound"] == both
    assert set(found["outcomes"]["both"]["ttft"]) == {"p10", "p50", "p90", "p99", "p100"}
    assert found["sizes"]["tried"][-1]["hit_ratio"] == shared
    assert found["trace"]["requests"] == 100


def test_engines_load_as_they_are_told_and_from_a_slow_pool_hardly_at_all(trace, capsys):
    options = ["--bytes-per-token", "1MiB", "--pool-bytes", "1TiB", "--no-sizes", "--json"]

    def outcome(*more):
        assert main(["simulate", trace, *options, "--nodes", "1", *more]) == 0
        return json.loads(capsys.readouterr().out)["outcomes"]["shared pool"]

    # 512 MiB a block, which takes 51 ms to compute.
    slow, fast = ("--pool-bandwidth", "2GiB"), ("--pool-bandwidth", "100GiB")
    assert outcome(*slow)["hit_ratio"] < 0.05
    assert outcome(*fast)["hit_ratio"] > 0.5
    assert outcome(*slow, "--load-policy", "always")["hit_ratio"] > 0.5
    never = outcome(*fast, "--load-policy", "never")
    assert never["hit_ratio"] == 0
    assert outcome(*slow)["ttft"]["p90"] <= 1.03 * never["ttft"]["p90"]
    assert outcome(*fast)["ttft"]["p50"] < 0.5 * never["ttft"]["p50"]


def test_a_table_for_people_and_a_picture(trace, capsys, tmp_path):
    picture = tmp_path / "plots.svg"
    options = ["--bytes-per-token", "1KiB", "--pool-bytes", "8MiB", "--plot", str(picture)]
    assert main(["simulate", trace, *options]) == 0
    printed = capsys.readouterr().out
    assert "shared pool" in printed
    assert "private caches" not in printed
    assert "servers of 64 GiB" in printed
    texts = [each.text for each in ElementTree.fromstring(picture.read_text()).iter() if each.text]
    assert any("over its capacity" in text for text in texts)
    assert {"lru", "s3fifo", "prefix", "Belady"} <= set(texts)


def test_a_model_says_what_a_token_takes(trace, capsys, tmp_path):
    model = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}
    more = {"num_key_value_heads": 2, "intermediate_size": 9, "max_position_embeddings": 99}
    model.write_text(json.dumps({"model_type": "llama", **sizes, **more}))
    assert main(["simulate", trace, "--model", str(model), "--no-sizes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fleet"]["bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert found["outcomes"] == {}
    assert found["sizes"] is None


def test_wrong_usage_says_what_is_wrong(trace, capsys, tmp_path):
    assert main(["simulate", str(tmp_path / "none"), "--bytes-per-token", "1KiB"]) == 2
    assert "cannot read the trace" in capsys.readouterr().err
    assert main(["simulate", trace, "--bytes-per-token", "1KiB", "--pool-bytes", "5KiB"]) == 2
    assert "holds no block" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", trace])
