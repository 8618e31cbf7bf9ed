"""Measures the demo model on held-out problems: `python -m examples.demo_model.evaluate`.

An answer counts if greedy decoding gives it exactly, including the end mark. Greedy decoding gives a certain answer if
and only if each of its tokens is the most likely one after the tokens before it, so one forward pass over question and
answer decides it, with no decoding loop.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from examples.demo_model.attention import PackedAttention
from examples.demo_model.data import TASKS, Example, Problem, held_out_problems
from examples.demo_model.packing import Batch, Encoded, encode, lay_out
from penstock.engine.demo import MODEL_DIR
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.models.decoder import Decoder

_BATCH_TOKENS = 8192
_LENGTH_STEP = 64  # row lengths are rounded up to it, so that few shapes compile


@dataclass(frozen=True, slots=True)
class Score:
    """Numbers of a task's questions that were answered exactly, as a chat turn and as a bare prompt."""

    task: str
    num_questions: int
    num_problems: int  # fewer than questions if several wordings ask the same
    chat_correct: int
    plain_correct: int
    chat_wrong: tuple[str, ...]  # the questions


def evaluate(folder: Path, tasks: Sequence[str], num_questions: int, seed: int) -> list[Score]:
    """Returns one score per task for the checkpoint in `folder`. `tasks` are some of `TASKS`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_model(folder, read_model_config(folder))
    scores = []
    for task in tasks:
        problems = held_out_problems(task, num_questions, seed)
        chat, plain = (_answered(model, tokenizer, problems, plain=plain) for plain in (False, True))
        wrong = tuple(problem.question for problem, right in zip(problems, chat, strict=True) if not right)
        num_problems = len({problem.key for problem in problems})
        scores.append(Score(task, len(problems), num_problems, int(chat.sum()), int(plain.sum()), wrong))
    return scores


def _answered(model: Decoder, tokenizer: Tokenizer, problems: list[Problem], *, plain: bool) -> np.ndarray:
    """Checks whether greedy decoding gives each answer; bool `[num_problems]`."""
    encoded = [encode(Example((problem,), plain=plain), tokenizer) for problem in problems]
    longest = max(len(example.token_ids) for example in encoded)
    row_length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    num_rows = _BATCH_TOKENS // row_length
    padding: list[list[Encoded]] = [[] for _ in range(-len(encoded) % num_rows)]
    rows = [[example] for example in encoded] + padding
    graphdef, params = nnx.split(model)
    exact = [
        np.asarray(_exact_rows(graphdef, params, lay_out(rows[start : start + num_rows], row_length)))
        for start in range(0, len(rows), num_rows)
    ]
    return np.concatenate(exact)[: len(problems)]


@partial(jax.jit, static_argnums=0)
def _exact_rows(graphdef: Any, params: Any, batch: Batch) -> jax.Array:  # bool [num_rows]
    model = nnx.merge(graphdef, params)
    attend = PackedAttention((jnp.asarray(batch.documents),))
    caches = (None,) * model.config.num_layers
    hidden, _ = model(jnp.ravel(batch.token_ids), jnp.ravel(batch.positions), caches, attend)
    predicted = jnp.argmax(model.logits(hidden), axis=-1).reshape(batch.targets.shape)
    return jnp.all((predicted == batch.targets) | (batch.targets < 0), axis=1)


def _report(scores: list[Score], seed: int) -> dict[str, Any]:
    tasks = {
        score.task: {
            "questions": score.num_questions,
            "problems": score.num_problems,
            "chat_correct": score.chat_correct,
            "plain_correct": score.plain_correct,
        }
        for score in scores
    }
    versions = {package: version(package) for package in ("jax", "flax", "tokenizers")}
    return {"decoding": "greedy, exact match", "seed": seed, "tasks": tasks, "versions": versions}


def _table(scores: list[Score]) -> Table:
    table = Table("task", "questions", "problems", "chat", "plain prompt", title="held-out problems answered exactly")
    for score in scores:
        chat, plain = (f"{n / score.num_questions:.2%}" for n in (score.chat_correct, score.plain_correct))
        table.add_row(score.task, str(score.num_questions), str(score.num_problems), chat, plain)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="checkpoint folder; the report goes there too")
    parser.add_argument("--questions", type=int, default=1000, help="per task, or as many as it has")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of questions")
    parser.add_argument(
        "--show-wrong", type=int, default=0, help="how many wrongly answered questions to show per task"
    )
    arguments = parser.parse_args()
    scores = evaluate(arguments.model, TASKS, arguments.questions, arguments.seed)
    (arguments.model / "EVALUATION.json").write_text(json.dumps(_report(scores, arguments.seed), indent=2) + "\n")
    console = Console()
    console.print(_table(scores))
    for score in scores:
        for question in score.chat_wrong[: arguments.show_wrong]:
            console.print(f"{score.task}: {question}")


if __name__ == "__main__":
    main()
