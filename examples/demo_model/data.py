"""The demo model's data: problems drawn from a seeded generator, split into training and evaluation by a hash.

A problem does not depend on its wording: `347 + 85` and `85 + 347` are one problem. Its key decides whether it belongs
to training or to evaluation, so no wording of an evaluation problem is ever trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from examples.demo_model import stories
from examples.demo_model.words import draw_word

DAYS = stories.DAYS
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
TASKS = ("sum", "count", "spell", "reverse", "date")
"""Tasks with a single right answer, which the evaluation measures."""

HELP = (
    "I am a small demo model. "
    "I can add numbers, count, spell and reverse words, name days and months, and tell stories."
)

_EXHAUSTED_AFTER = 20_000  # draws without a new evaluation question
_HELD_OUT_PERCENT = {"sum": 5, "count": 5, "spell": 10, "reverse": 10, "date": 15}


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its answer. `key` is the same for every wording of the same problem."""

    task: str
    key: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation to train on. A `plain` one begins with a bare question, without the mark of a user's turn."""

    problems: tuple[Problem, ...]
    system: str | None = None
    plain: bool = False


def draw_problem(task: str, rng: Random) -> Problem:
    """Draws a random problem of `task`: one of `TASKS`, or `story` or `help`."""
    return _DRAW[task](rng)


def is_held_out(problem: Problem) -> bool:
    """Checks whether the problem is kept for evaluation. A hash of its key decides, the same on every machine.

    Sums of two one-digit numbers are always trained on: all other sums build on them.
    """
    digest = blake2b(problem.key.encode(), digest_size=8).digest()
    return not problem.key.startswith("sum:small") and int.from_bytes(digest, "big") % 100 < _HELD_OUT_PERCENT.get(
        problem.task, 0
    )


def held_out_problems(task: str, count: int, seed: int) -> list[Problem]:
    """Draws `count` evaluation problems, no question twice; fewer if the task has fewer."""
    rng = Random(f"evaluate {task} {seed}")
    found: dict[str, Problem] = {}
    draws_in_vain = 0
    while len(found) < count and draws_in_vain < _EXHAUSTED_AFTER:
        problem = draw_problem(task, rng)
        new = is_held_out(problem) and problem.question not in found
        draws_in_vain = 0 if new else draws_in_vain + 1
        if new:
            found[problem.question] = problem
    return list(found.values())


def training_examples(mix: Mapping[str, float], rng: Random) -> Iterator[Example]:
    """Yields endless conversations. `mix` weighs tasks, `story`, `help` and `talk`, a longer conversation of mixed
    tasks.
    """
    kinds, weights = list(mix), list(mix.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        if kind == "talk":
            problems = tuple(_draw_trained(rng.choices(*_TALK)[0], rng) for _ in range(rng.randint(2, 12)))
        else:
            problems = (_draw_trained(kind, rng),)
        system = rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.06 else None
        yield Example(problems, system, plain=system is None and rng.random() < 0.35)


def _draw_trained(task: str, rng: Random) -> Problem:
    while True:
        problem = draw_problem(task, rng)
        if not is_held_out(problem):
            return problem


_TALK = (["sum", "count", "spell", "reverse", "date", "help"], [8, 2, 1, 1, 1, 0.5])
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Penstock's demo model.",
    "Answer the question.",
    "Be brief and exact.",
)


def _draw_sum(rng: Random) -> Problem:
    a, b = _operands(rng)
    low, high = sorted((a, b))
    wording = rng.choice(_SUM_WORDINGS)
    key = f"sum:{'small:' if high < 10 else ''}{low}+{high}"
    return Problem("sum", key, wording.format(a=a, b=b), f"{a} + {b} = {a + b}")


def _operands(rng: Random) -> tuple[int, int]:
    draw = rng.random()
    if draw < 0.5:
        return rng.randint(0, 999), rng.randint(0, 999)
    if draw < 0.8:
        return rng.randint(0, 10 ** rng.randint(1, 3) - 1), rng.randint(0, 10 ** rng.randint(1, 3) - 1)
    # Long carries: the tens add up to nine, so the ones decide whether they carry.
    tens = rng.randint(0, 9)
    a = 100 * rng.randint(0, 9) + 10 * tens + rng.randint(0, 9)
    b = 100 * rng.randint(0, 9) + 10 * (9 - tens) + rng.randint(0, 9)
    return a, b


_SUM_WORDINGS = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "what is {a} + {b}",
    "What is {a} plus {b}?",
    "What's {a} + {b}?",
    "What is {a}+{b}?",
    "What is the sum of {a} and {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}.",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a} + {b}",
    "{a}+{b}",
    "{a} plus {b}",
)


def _draw_count(rng: Random) -> Problem:
    if rng.random() < 0.06:
        return _count_to(rng.randint(2, 40), rng)
    length = rng.randint(1, 40) if rng.random() < 0.5 else rng.randint(2, 12)
    start = rng.randint(0, 200) if rng.random() < 0.7 else rng.randint(0, 10)
    step = rng.choice((2, 2, 3, 4, 5, 5, 10, 10)) if rng.random() < 0.25 else 1
    numbers = [start + step * i for i in range(length)]
    down = rng.random() < 0.25
    if down:
        numbers.reverse()
    verb = rng.choice(_DOWN_VERBS if down else _UP_VERBS)
    by = rng.choice((" by {step}s", " by {step}", " in steps of {step}")).format(step=step) if step > 1 else ""
    question = f"{verb} from {numbers[0]} to {numbers[-1]}{by}{rng.choice(('.', '.', '.', ''))}"
    key = f"count:{numbers[0]}:{numbers[-1]}:{step}"
    return Problem("count", key, question, ", ".join(map(str, numbers)))


def _count_to(last: int, rng: Random) -> Problem:
    question = f"{rng.choice(('Count', 'Count', 'Please count', 'count'))} to {last}{rng.choice(('.', '.', ''))}"
    return Problem("count", f"count:1:{last}:1", question, ", ".join(map(str, range(1, last + 1))))


_UP_VERBS = ("Count", "Count", "Count", "Count up", "Please count", "count", "Can you count")
_DOWN_VERBS = ("Count", "Count down", "Count down", "Count backwards", "Please count down", "count down")


def _draw_spell(rng: Random) -> Problem:
    word = draw_word(rng)
    return Problem("spell", f"word:{word}", rng.choice(_SPELL_WORDINGS).format(w=word), "-".join(word))


def _draw_reverse(rng: Random) -> Problem:
    word = draw_word(rng)
    return Problem("reverse", f"word:{word}", rng.choice(_REVERSE_WORDINGS).format(w=word), word[::-1])


_SPELL_WORDINGS = (
    "Spell {w}.",
    "Spell {w}.",
    "Spell {w}",
    "spell {w}",
    "Spell the word {w}.",
    "How do you spell {w}?",
)
_REVERSE_WORDINGS = (
    "Reverse {w}.",
    "Reverse {w}.",
    "Reverse {w}",
    "reverse {w}",
    "Reverse the word {w}.",
    "What is {w} backwards?",
)


def _draw_date(rng: Random) -> Problem:
    unit, names = rng.choice((("day", DAYS), ("month", MONTHS)))
    at, after = rng.randrange(len(names)), rng.random() < 0.5
    if rng.random() < 0.35:
        return _date_list(rng, unit, names, at)
    steps = 1 if rng.random() < 0.3 else rng.randint(2, 12)
    passed = [names[(at + (i if after else -i)) % len(names)] for i in range(1, steps + 1)]
    side = "after" if after else "before"
    key = f"date:{unit}:{names[at]}:{side}:{steps}"
    if steps == 1:  # a task of its own, never held out: like small sums, neighbours are what the rest builds on
        next_or_previous = "next" if after else "previous"
        wording = rng.choice(
            (f"What {unit} comes {side} {names[at]}?", f"Which {unit} comes {side} {names[at]}?",
             f"What {unit} is {side} {names[at]}?", f"What is the {next_or_previous} {unit} {side} {names[at]}?")
        )  # fmt: skip
        return Problem("neighbour", key, wording, passed[0])
    wording = rng.choice(
        (f"What {unit} is {steps} {unit}s {side} {names[at]}?", f"Which {unit} is {steps} {unit}s {side} {names[at]}?",
         f"What {unit} comes {steps} {unit}s {side} {names[at]}?", f"{steps} {unit}s {side} {names[at]}")
    )  # fmt: skip
    return Problem("date", key, wording, f"{', '.join(passed)}: {passed[-1]}")


def _date_list(rng: Random, unit: str, names: tuple[str, ...], at: int) -> Problem:
    count = rng.randint(2, len(names))
    verb = rng.choice(("List", "Name", "list"))
    question = f"{verb} {count} {unit}s starting with {names[at]}{rng.choice(('.', '.', ''))}"
    answer = ", ".join(names[(at + i) % len(names)] for i in range(count))
    return Problem("date", f"date:{unit}:{names[at]}:list:{count}", question, answer)


def _draw_story(rng: Random) -> Problem:
    request = stories.draw_request(rng)
    question = stories.question(request, rng)
    return Problem("story", f"story:{request.hero}:{request.place}", question, stories.tell(request, rng))


def _draw_help(rng: Random) -> Problem:
    if rng.random() < 0.4:
        question = rng.choice(_GREETINGS) + rng.choice(("", "", "!", "."))
        return Problem("help", "help", question, f"Hello! {HELP}")
    question = rng.choice(_STRANGE_QUESTIONS).format(w=draw_word(rng), v=draw_word(rng), u=draw_word(rng))
    return Problem("help", "help", question, HELP)


_GREETINGS = ("Hello", "Hi", "Hi there", "hello", "Hey", "Good morning", "Hello, how are you")
_STRANGE_QUESTIONS = (
    "Who are you?",
    "What can you do?",
    "What are you?",
    "Help",
    "help me",
    "What is the {w} of {v}?",
    "What is a {w}?",
    "Why is the {w} {v}?",
    "Who made the {w}?",
    "How do I {w} a {v}?",
    "Write a {w} about {v}.",
    "Explain {w} to me.",
    "Translate {w}.",
    "Where is {w}?",
    "Do you like {w}?",
    "{w} {v} {u}",
    "The {w} {v} and the {u}",
    "Once upon a time",
)

_DRAW = {
    "sum": _draw_sum,
    "count": _draw_count,
    "spell": _draw_spell,
    "reverse": _draw_reverse,
    "date": _draw_date,
    "story": _draw_story,
    "help": _draw_help,
}
