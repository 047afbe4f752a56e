"""Spans of loads on the real vLLM, beside vLLM's own, as one collector gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.engines.node import Node
from penstock.vllm.scheduler.spans import SPAN
from tests.collector import Collector
from tests.e2e.conftest import BLOCK, tokens

pytestmark = pytest.mark.e2e

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def test_a_load_is_in_the_trace_that_the_request_came_with(
    llama: Path, start: Callable[..., Node], collector: Collector, tmp_path: Path
) -> None:
    prompt = tokens(3 * BLOCK + 20, seed=1)
    with start(
        llama,
        pool=f"file://{tmp_path}/pool?size=1GiB",
        settings={"penstock.otlp_endpoint": collector.url},
        otlp_traces_endpoint=f"{collector.url}/v1/traces",
        env={
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        },
    ) as node:
        node.ask(prompt)
        node.wait_for("stored_blocks", 3)
        node.forget()
        node.ask(prompt, trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        assert node.stop() == 0
    # All that was left was sent as the engine ended.
    spans = collector.spans(SPAN, "llm_request")
    ours = [each for each in spans if each.name == SPAN]
    assert ours[0].attributes["penstock.outcome"] == "missed"
    [loaded] = [each for each in ours if each.trace_id == TRACE]
    assert loaded.parent_id == PARENT
    assert loaded.attributes["penstock.outcome"] == "loaded"
    assert loaded.attributes["penstock.loaded_tokens"] == 3 * BLOCK
    assert loaded.attributes["penstock.loaded_blocks"] == 3
    assert loaded.attributes["penstock.tier"] == "pool"
    # vLLM's own span of the request has ours within its time.
    [request] = [each for each in spans if (each.name, each.trace_id) == ("llm_request", TRACE)]
    assert request.began <= loaded.began
    assert loaded.ended <= request.ended
