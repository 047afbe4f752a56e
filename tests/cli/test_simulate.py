"""`penstock simulate`."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from penstock.cli import main
from tests.pictures import faults


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


def test_a_pool_in_an_object_store_tells_of_requests(trace, capsys):
    options = ["--bytes-per-token", "1KiB", "--pool-bytes", "128MiB", "--no-sizes"]
    assert main(["simulate", trace, *options, "--pack-bytes", "16MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["object_store_requests"]["shared pool"]
    assert set(found) == {"put", "get", "head", "list"}
    assert found["put"]["least"] < found["put"]["most"]
    assert main(["simulate", trace, *options, "--pack-bytes", "16MiB"]) == 0
    assert "requests per million tokens" in capsys.readouterr().out
    assert main(["simulate", trace, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["object_store_requests"] is None


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


PRICES = ["--price-gpu-hour", "3", "--price-pool-gib-month", "0.5"]


def test_a_scaled_trace_has_the_same_hits_and_its_own_panels(trace, capsys, tmp_path):
    picture = tmp_path / "plots.svg"
    options = ["--bytes-per-token", "1KiB", "--host-bytes", "64MiB", "--pool-bytes", "4GiB"]
    more = ["--scale", "20", "--nodes", "80", *PRICES, "--plot", str(picture), "--json"]
    assert main(["simulate", trace, *options, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trace"]["populations"] == 20
    assert found["trace"]["requests"] == 2000
    assert found["trace"]["common_blocks"] == 0
    assert list(found["bounds"]) == ["no bound"]
    assert found["outcomes"]["shared pool"]["hit_ratio"] == found["bounds"]["no bound"]
    said = words_of(picture)
    assert any("on 80 nodes" in text for text in map(str.lower, said))
    assert any(text.startswith("A pool of") for text in said)
    assert faults(picture.read_text()) == []


def words_of(picture):
    return [each.text for each in ElementTree.fromstring(picture.read_text()).iter() if each.text]


def test_money_is_what_loads_save_less_what_the_pool_costs(trace, capsys):
    options = ["--bytes-per-token", "1KiB", "--pool-bytes", "1GiB", *PRICES]
    assert main(["simulate", trace, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    given, total = found["money"]["given"], found["outcomes"]["shared pool"]["total"]
    saved = total["input_tokens"] - total["computed_tokens"]
    assert given["gpu_seconds"] == pytest.approx(saved / 10_000)
    assert given["gpu_money"] == pytest.approx(saved / 10_000 / 99 * 730 * 3)
    assert given["pool_money"] == 0.5
    assert given["net"] == pytest.approx(given["gpu_money"] - 0.5)
    assert found["money"]["against"] == "no caches at all"
    assert found["money"]["verdict"].startswith("A pool of 1 GiB saves")
    assert len(found["money"]["tried"]) == len(found["sizes"]["tried"])
    assert found["money"]["assumed"]


def test_a_pool_that_saves_nothing_is_said_to(trace, capsys):
    options = ["--bytes-per-token", "1KiB", "--pool-bytes", "1GiB", *PRICES]
    assert main(["simulate", trace, *options, "--load-policy", "never"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "A pool of 1 GiB saves no prefill, and costs 0.50 a month." in said
    assert "No pool of the sizes tried pays for itself." in said


def test_prices_need_each_other_and_a_pool(trace, capsys):
    options = ["simulate", trace, "--bytes-per-token", "1KiB"]
    assert main([*options, *PRICES[:2]]) == 2
    assert "needs both --price-gpu-hour and --price-pool-gib-month" in capsys.readouterr().err
    assert main([*options, *PRICES, "--no-sizes"]) == 2
    assert "no pool to weigh" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*options, "--price-gpu-hour", "-1"])


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
