"""lm-eval asks: a task over `questions`, and an engine under a condition as its model.

`benches/setup_accuracy.sh` puts lm-eval into a folder of its own, where only this module looks.
What .venv has stays as it is and comes first.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benches.shared.rows import groups
from benches.trained.conditions import Condition, Request
from benches.trained.questions import Question, encode
from lab.engines.node import Answer

FOLDER = Path(__file__).parents[2] / "target" / "lm-eval"
TASK = "penstock_continuations"


class HarnessMissing(RuntimeError):
    """lm-eval is not installed."""


@dataclass(frozen=True)
class Score:
    """What lm-eval says, and what the engine answered to each of its requests."""

    accuracy: float
    stderr: float
    version: str
    answers: tuple[Answer, ...]
    losses: tuple[float, ...]
    """Nats of each token of the right continuations."""


def evaluate(
    condition: Condition,
    tokenizer: Any,
    asked: Sequence[Question],
    together: int,
) -> Score:
    """Has lm-eval put all questions. It chooses the continuation that is likeliest as a whole.

    The engine gets so many requests `together`.

    Raises:
        HarnessMissing: run benches/setup_accuracy.sh first.
    """
    try:
        sys.path.append(str(FOLDER))
        import lm_eval  # type: ignore[import-not-found]
        from lm_eval.api.model import LM  # type: ignore[import-not-found]
        from lm_eval.api.task import ConfigurableTask  # type: ignore[import-not-found]
    except ImportError as error:
        raise HarnessMissing(f"{error}: run benches/setup_accuracy.sh first") from error
    finally:
        # Engines that are started later inherit the path.
        sys.path.remove(str(FOLDER))
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    answers: dict[tuple[str, str], Answer] = {}

    class Engine(LM):  # type: ignore[misc]
        """The engine, as lm-eval wants to see it."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            pairs = [request.args for request in requests]
            for chosen in batches(pairs, together):
                asked = [_request(tokenizer, *pair) for pair in chosen]
                answers.update(zip(chosen, condition.ask(asked), strict=True))
            # Whether the engine would say the same by itself is what no metric of the task uses.
            return [(sum(answers[pair].logprobs), False) for pair in pairs]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            raise NotImplementedError

    found = lm_eval.simple_evaluate(
        model=Engine(),
        tasks=[ConfigurableTask(config=task(asked))],
        log_samples=False,
    )["results"][TASK]
    return Score(
        found["acc,none"],
        found["acc_stderr,none"],
        lm_eval.__version__,
        tuple(answers[each.passage, choice] for each in asked for choice in each.choices),
        tuple(
            -logprob
            for each in asked
            for logprob in answers[each.passage, each.choices[each.right]].logprobs
        ),
    )


def batches(pairs: Sequence[tuple[str, str]], together: int) -> Iterator[Sequence[tuple[str, str]]]:
    """All pairs of passage and continuation, so many at a time, no passage twice at a time."""
    rounds: dict[int, list[tuple[str, str]]] = {}
    met: Counter[str] = Counter()
    for pair in pairs:
        rounds.setdefault(met[pair[0]], []).append(pair)
        met[pair[0]] += 1
    for each in rounds.values():
        yield from groups(each, together)


def _request(tokenizer: Any, passage: str, continuation: str) -> Request:
    forced = tuple(encode(tokenizer, continuation))
    return Request(tuple(encode(tokenizer, passage)), len(forced), forced)


class Documents(list[dict[str, Any]]):
    """What lm-eval reads of a dataset."""

    features: ClassVar = {"passage": str, "choices": list, "right": int}


def task(asked: Sequence[Question]) -> dict[str, Any]:
    """The task as lm-eval configures it: one of four continuations, without examples."""

    def documents(**_: Any) -> dict[str, Documents]:
        return {
            "test": Documents(
                {"passage": each.passage, "choices": list(each.choices), "right": each.right}
                for each in asked
            )
        }

    return {
        "task": TASK,
        "custom_dataset": documents,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{passage}}",
        "doc_to_choice": "choices",
        "doc_to_target": "right",
        "target_delimiter": "",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
