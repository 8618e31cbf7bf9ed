"""The demo model's data: right answers, evaluation problems kept out of training, a lossless tokenizer, isolated
packing.
"""

from __future__ import annotations

import re
from itertools import islice, pairwise
from random import Random

import jinja2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.demo_model.data import (
    DAYS,
    MONTHS,
    TASKS,
    Example,
    Problem,
    draw_problem,
    held_out_problems,
    is_held_out,
    training_examples,
)
from examples.demo_model.packing import encode, pack
from examples.demo_model.tokenizer import ASSISTANT, END, PAD, SPECIAL_TOKENS, USER, VOCAB_SIZE, build
from penstock.engine.demo import MODEL_DIR

EVERYTHING = {
    "sum": 1.0,
    "count": 1.0,
    "spell": 1.0,
    "reverse": 1.0,
    "date": 1.0,
    "story": 1.0,
    "help": 1.0,
    "talk": 1.0,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def drawn(task: str, count: int = 300) -> list[Problem]:
    rng = Random(f"test {task}")
    return [draw_problem(task, rng) for _ in range(count)]


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def test_sums_are_right_and_repeat_the_operands() -> None:
    for problem in drawn("sum"):
        a, b = numbers(problem.question)
        assert problem.answer == f"{a} + {b} = {a + b}"
        assert max(a, b) <= 999


def test_counting_takes_equal_steps_from_the_first_number_to_the_last() -> None:
    for problem in drawn("count"):
        asked, counted = numbers(problem.question), numbers(problem.answer)
        first, last = (1, asked[0]) if " to " in problem.question and "from" not in problem.question else asked[:2]
        assert (counted[0], counted[-1]) == (first, last)
        step = asked[2] if len(asked) > 2 else 1
        assert {abs(b - a) for a, b in pairwise(counted)} <= {step}
        assert len(counted) <= 40


def test_spelling_and_reversing() -> None:
    for problem in drawn("spell"):
        word = problem.answer.replace("-", "")
        assert word in problem.question
        assert problem.answer == "-".join(word)
    for problem in drawn("reverse"):
        assert problem.answer[::-1] in problem.question


def test_days_and_months() -> None:
    for problem in drawn("date"):
        names = MONTHS if "month" in problem.question else DAYS
        start = next(i for i, name in enumerate(names) if re.search(rf"\b{name}\b", problem.question))
        count = (numbers(problem.question) or [1])[0]
        if "start" in problem.question:
            expected = ", ".join(names[(start + i) % len(names)] for i in range(count))
        else:
            step = 1 if "after" in problem.question else -1
            passed = [names[(start + step * i) % len(names)] for i in range(1, count + 1)]
            expected = f"{', '.join(passed)}: {passed[-1]}" if count > 1 else passed[0]
        assert problem.answer == expected


def test_a_story_names_its_hero_and_only_knows_the_people_in_it() -> None:
    for problem in drawn("story", 50):
        hero = problem.key.split(":")[1]
        assert f" {hero}" in problem.question
        assert f" {hero}" in problem.answer
        assert problem.answer.endswith("The end.")
        assert "{" not in problem.answer


def test_no_training_example_holds_an_evaluation_problem() -> None:
    evaluated = {problem.key for task in TASKS for problem in held_out_problems(task, 100, seed=0)}
    trained = {
        problem.key
        for example in islice(training_examples(EVERYTHING, Random(1)), 5000)
        for problem in example.problems
        if problem.task in TASKS
    }
    assert len(trained) > 1000
    assert not evaluated & trained


def test_a_task_with_few_problems_gives_all_it_has() -> None:
    questions = [problem.question for problem in held_out_problems("date", 100_000, seed=0)]
    assert 100 < len(questions) < 1000
    assert len(set(questions)) == len(questions)


def test_the_order_of_operands_makes_no_new_problem() -> None:
    by_key: dict[str, set[bool]] = {}
    for problem in drawn("sum", 3000):
        a, b = numbers(problem.question)
        assert problem.key.endswith(f":{min(a, b)}+{max(a, b)}")
        by_key.setdefault(problem.key, set()).add(is_held_out(problem))
    assert all(len(sides) == 1 for sides in by_key.values())
    assert 0.02 < np.mean([sides == {True} for sides in by_key.values()]) < 0.08


def test_the_same_seed_gives_the_same_data() -> None:
    first, second = (list(islice(training_examples(EVERYTHING, Random(7)), 50)) for _ in range(2))
    assert first == second
    assert first != list(islice(training_examples(EVERYTHING, Random(8)), 50))
    assert held_out_problems("sum", 20, seed=3) == held_out_problems("sum", 20, seed=3)


@example("<|end|>")
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = _shipped()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token_and_marks_have_the_ids_the_code_uses(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(mark) for mark in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.encode("347 + 85").tokens == ["3", "4", "7", "Ġ+Ġ", "8", "5"]
    assert not [token for token in tokenizer.get_vocab() if re.search(r"\d", token) and len(token) > 1]


def test_building_the_tokenizer_gives_all_bytes_and_marks() -> None:
    built = build(num_examples=2000)
    assert built.get_vocab_size() == VOCAB_SIZE
    text = "8 otters 🦦 naïve\n\t日本 <|end|>"
    assert built.decode(built.encode(text).ids, skip_special_tokens=False) == text


def test_a_chat_example_is_what_the_chat_template_renders(tokenizer: Tokenizer) -> None:
    problems = (drawn("sum")[0], drawn("spell")[0])
    messages = [{"role": "system", "content": "Be brief."}]
    for problem in problems:
        messages += [{"role": "user", "content": problem.question}, {"role": "assistant", "content": problem.answer}]
    template = jinja2.Template((MODEL_DIR / "chat_template.jinja").read_text())
    rendered = template.render(messages=messages, add_generation_prompt=False)
    encoded = encode(Example(problems, system="Be brief."), tokenizer)
    assert tokenizer.encode(rendered).ids == encoded.token_ids
    assert template.render(messages=messages[:2], add_generation_prompt=True).endswith("<|assistant|>")


def test_the_loss_is_on_answers_and_their_marks_only(tokenizer: Tokenizer) -> None:
    problem = drawn("sum")[0]
    question, answer = (tokenizer.encode(text).ids for text in (problem.question, problem.answer))
    chat, plain = (encode(Example((problem,), plain=plain), tokenizer) for plain in (False, True))
    assert chat.token_ids == [USER, *question, ASSISTANT, *answer, END]
    assert plain.token_ids == [*question, ASSISTANT, *answer, END]
    trained = [token for token, counts in zip(chat.token_ids, chat.trained, strict=True) if counts]
    assert trained == [ASSISTANT, *answer, END]


def test_packed_documents_keep_to_themselves(tokenizer: Tokenizer) -> None:
    examples = (encode(example, tokenizer) for example in training_examples(EVERYTHING, Random(5)))
    batch = pack(examples, num_rows=3, row_length=200)
    assert batch.token_ids.shape == (3, 200)
    assert (batch.documents > 0).mean() > 0.7
    for row in range(3):
        for document in range(1, batch.documents[row].max() + 1):
            (at,) = np.nonzero(batch.documents[row] == document)
            assert list(batch.positions[row, at]) == list(range(len(at)))
            assert batch.token_ids[row, at[-1]] == END
            assert batch.targets[row, at[-1]] == -1
            shifted = batch.token_ids[row, at[1:]]
            counted = batch.targets[row, at[:-1]]
            assert np.all((counted == shifted) | (counted == -1))
            assert counted[-1] == END
    padding = batch.documents == 0
    assert np.all(batch.token_ids[padding] == PAD)
    assert np.all(batch.targets[padding] == -1)


def _shipped() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
