"""What the models of `benches.accuracy` learn, and what they are asked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benches import accuracy
from benches.trained import harness, questions, text, train
from benches.trained.conditions import Condition, Request
from benches.trained.questions import Question
from benches.trained.train import Recipe
from lab.engines.node import Answer


class Letters:
    """A tokenizer with a token for each character."""

    def encode(self, said: str, **_: Any) -> list[int]:
        return [ord(each) for each in said]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Remembering(Condition):
    """An engine that likes every token as much as the first of them in the alphabet."""

    name = "remembering"

    def __init__(self) -> None:
        self.batches: list[list[Request]] = []

    def ask(self, requests: Any) -> list[Answer]:
        self.batches.append(list(requests))
        return [
            Answer(each.forced, tuple(-float(t) for t in each.forced), 0, "length", 0.0)
            for each in requests
        ]

    def _prepare(self, requests: Any) -> None: ...

    def _check(self, answer: Answer) -> None: ...


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(count))


DOCUMENTS = [words(400, seed) for seed in range(3)]


def test_text_is_split_by_its_content_alone() -> None:
    documents = [f"document {number}" for number in range(200)]
    one = text.split(documents)
    other = text.split([*reversed(documents), documents[0]])
    assert one == other
    assert one.digest == other.digest
    assert sorted(one.learnt + one.held_out) == sorted(documents)
    assert 5 < len(one.held_out) < 40
    more = text.split([*documents, "a new one"])
    assert set(one.held_out) <= set(more.held_out)
    assert more.digest != one.digest


def test_docstrings_are_those_worth_learning(tmp_path: Path) -> None:
    long = "Says much. " * 40 + "Ends."
    (tmp_path / "a.py").write_text(f'"""{long}"""\ndef f():\n    """Short."""\n')
    (tmp_path / "b.py").write_text("not python")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/c.py").write_text(f'"""{long} And more."""\n')
    assert list(text.docstrings(tmp_path)) == [long]


def test_counting_pairs_knows_more_than_counting_tokens() -> None:
    learnt, held_out = [1, 2, 3, 4] * 200, [1, 2, 3, 4] * 20
    assert train.bigram_loss(learnt, held_out, 5) < 0.5
    assert train.unigram_loss(learnt, held_out, 5) == pytest.approx(1.386, abs=0.01)


def test_recipe_names_all_it_depends_on() -> None:
    source = text.split(DOCUMENTS)
    names = {
        Recipe(kind, steps=steps).digest(each)
        for kind in train.KINDS
        for steps in (10, 20)
        for each in (source, text.split(DOCUMENTS[:2]))
    }
    assert len(names) == 8


def test_the_rate_rises_stays_and_falls() -> None:
    recipe = Recipe("llama", steps=100, warm_up=10, cool_down=0.5)
    rates = [train.share_of_rate(step, recipe) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert set(rates[10:50]) == {1.0}
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] > 0


def test_questions_have_one_right_choice() -> None:
    asked = questions.questions(Letters(), DOCUMENTS, 12)
    assert asked == questions.questions(Letters(), DOCUMENTS, 12)
    openings = {each.passage[: questions.OPENING] for each in asked}
    assert len(openings) == 12
    for each in asked:
        assert len(set(each.choices)) == questions.CHOICES
        right = each.passage + each.choices[each.right]
        assert any(right in document for document in DOCUMENTS)


def test_conversations_go_through_a_document() -> None:
    led = questions.conversations(Letters(), DOCUMENTS, 20, turns=4)
    assert len({each.turns[0][: questions.OPENING] for each in led}) == 20
    for each in led:
        whole = Letters().decode([token for turn in each.turns for token in turn])
        assert any(whole in document for document in DOCUMENTS)


def test_no_passage_comes_twice_at_a_time() -> None:
    pairs = [(passage, choice) for passage in "abcde" for choice in "1234"]
    batches = list(harness.batches(pairs, 3))
    assert sorted(pair for batch in batches for pair in batch) == pairs
    for batch in batches:
        assert len({passage for passage, _ in batch}) == len(batch) <= 3


def test_lm_eval_takes_the_likeliest_choice() -> None:
    asked = [Question(f"passage {right}", ("d", "c", "a", "b"), right) for right in (2, 2, 2, 0)]
    asked = [
        Question(f"{number} {q.passage}", q.choices, q.right) for number, q in enumerate(asked)
    ]
    engine = Remembering()
    try:
        score = harness.evaluate(engine, Letters(), asked, together=3)
    except harness.HarnessMissing as error:
        pytest.skip(str(error))
    assert score.accuracy == 0.75
    assert [len(batch) for batch in engine.batches] == [3, 1] * 4
    assert score.losses == (97.0, 97.0, 97.0, 100.0)


def test_comparing_counts_what_differs() -> None:
    def outcome(tokens: tuple[int, ...], logprob: float, cached: int) -> accuracy.Outcome:
        answer = Answer(tokens, (logprob,) * len(tokens), cached, "length", 0.0)
        scored = Answer((7,), (logprob,), cached, "length", 0.0)
        score = harness.Score(0.5, 0.1, "0", (scored,), (-logprob,))
        return accuracy.Outcome(score, [accuracy.Turn((1, 2), answer)], 1.0)

    same = accuracy.compare(outcome((1, 2), -1.0, 0), outcome((1, 2), -1.0, 0))
    assert same["answers"] == same["scored"] == 1
    assert not any(value for key, value in same.items() if "differ" in key)
    bit = accuracy.compare(outcome((1, 2), -1.0, 0), outcome((1, 2), -1.5, 0))
    assert (bit["answers_differ"], bit["answers_differ_in_a_bit"]) == (0, 1)
    assert bit["largest_difference"] == 0.5
    other = accuracy.compare(outcome((1, 2), -1.0, 0), outcome((1, 3), -1.0, 128))
    assert (other["answers_differ"], other["cached_differ"]) == (1, 2)


@pytest.mark.long
def test_a_model_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(train, "FOLDER", tmp_path)
    recipe = Recipe("llama", vocabulary=300, hidden=64, context=64, batch=2, steps=30)
    source = text.Text(tuple(DOCUMENTS), (words(400, 9),))
    model = train.trained(recipe, source)
    assert model.facts["held_out_loss"] < 5
    began = (model.folder / "training.json").stat().st_mtime_ns
    assert train.trained(recipe, source) == model
    assert (model.folder / "training.json").stat().st_mtime_ns == began
