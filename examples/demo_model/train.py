"""Trains the demo model: `python -m examples.demo_model.train`. It resumes from its last checkpoint.

Every step trains on both short rows (sums, spelling, short counts) and long ones (stories, long counts, conversations).
The batch of step n depends only on the seed and n, so an interrupted run continues as if nothing had happened.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from examples.demo_model.attention import PackedAttention
from examples.demo_model.config import DEMO_CONFIG
from examples.demo_model.data import training_examples
from examples.demo_model.export import export
from examples.demo_model.packing import Batch, encode, pack
from examples.demo_model.tokenizer import build as build_tokenizer
from penstock.engine.demo import MODEL_DIR
from penstock.engine.models.decoder import Decoder

SHORT_ROWS, SHORT_LENGTH = 24, 128
LONG_ROWS, LONG_LENGTH = 2, 512
# Short counts teach where to stop: without them the model counts past the end for thousands of steps.
SHORT_MIX = {"sum": 0.28, "count": 0.36, "spell": 0.1, "reverse": 0.14, "date": 0.1, "help": 0.02}
LONG_MIX = {"count": 0.45, "story": 0.35, "talk": 0.2}
WARMUP_STEPS = 200
CHECKPOINT_EVERY_S = 120.0


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Contents of a checkpoint; `params` and `opt_state` are pytrees of f32 arrays."""

    params: Any
    opt_state: Any
    step: int


def train(num_steps: int, learning_rate: float, seed: int, workdir: Path, output: Path) -> None:
    """Trains up to `num_steps` in total and writes the checkpoint to `output`, in Hugging Face format."""
    tokenizer = _tokenizer(workdir)
    graphdef, params = nnx.split(Decoder(DEMO_CONFIG, rngs=nnx.Rngs(seed)))
    optimizer = _optimizer(num_steps, learning_rate)
    state = restore(workdir, TrainingState(params, optimizer.init(params), 0))
    step_fn = jax.jit(partial(_train_step, graphdef, optimizer), donate_argnums=(0, 1))
    params, opt_state, saved_at = state.params, state.opt_state, time.monotonic()
    pending: list[jax.Array] = []
    with _progress() as progress:
        task = progress.add_task("training", total=num_steps, completed=state.step, loss=float("nan"))
        for step in range(state.step, num_steps):
            batches = step_batches(step, seed, tokenizer)
            params, opt_state, loss = step_fn(params, opt_state, *batches)
            pending.append(loss)
            if len(pending) == 20 or step + 1 == num_steps:
                mean_loss = float(np.mean(jax.device_get(pending)))
                pending.clear()
                progress.update(task, completed=step + 1, loss=mean_loss)
                if not progress.console.is_terminal:
                    progress.console.print(f"step {step + 1} loss {mean_loss:.4f}", highlight=False)
            if time.monotonic() - saved_at > CHECKPOINT_EVERY_S or step + 1 == num_steps:
                save(workdir, TrainingState(params, opt_state, step + 1))
                saved_at = time.monotonic()
    export(nnx.merge(graphdef, params), tokenizer, output)


def _optimizer(num_steps: int, learning_rate: float) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, WARMUP_STEPS, num_steps, learning_rate * 0.01)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.98, weight_decay=0.05, mask=partial(jax.tree.map, lambda leaf: leaf.ndim > 1)),
    )


def _train_step(
    graphdef: Any, optimizer: optax.GradientTransformation, params: Any, opt_state: Any, short: Batch, long: Batch
) -> tuple[Any, Any, jax.Array]:
    loss, grads = jax.value_and_grad(partial(_loss, graphdef))(params, (short, long))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def _loss(graphdef: Any, params: Any, batches: tuple[Batch, Batch]) -> jax.Array:
    """Returns the mean cross-entropy over the counted targets of all batches, whose rows lie on one flat token axis."""
    model = nnx.merge(graphdef, params)
    token_ids, targets, positions = (
        jnp.concatenate([getattr(batch, name).reshape(-1) for batch in batches])
        for name in ("token_ids", "targets", "positions")
    )
    short, long = (jnp.asarray(batch.documents) for batch in batches)
    attend = PackedAttention((short, *jnp.split(long, LONG_ROWS)))  # long rows one by one: their scores fit in cache
    hidden, _ = model(token_ids, positions, (None,) * DEMO_CONFIG.num_layers, attend)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), jnp.maximum(targets, 0))
    counted = targets >= 0
    return jnp.sum(losses * counted) / jnp.sum(counted)


def step_batches(step: int, seed: int, tokenizer: Tokenizer) -> tuple[Batch, Batch]:
    """Returns the short and the long rows of one step."""
    rng = Random(f"train {seed} {step}")
    short = (encode(example, tokenizer) for example in training_examples(SHORT_MIX, rng))
    long = (encode(example, tokenizer) for example in training_examples(LONG_MIX, rng))
    return pack(short, SHORT_ROWS, SHORT_LENGTH), pack(long, LONG_ROWS, LONG_LENGTH)


def _tokenizer(workdir: Path) -> Tokenizer:
    """Returns the tokenizer that this run began with: a resumed run keeps it even if the generator has changed."""
    path = workdir / "tokenizer.json"
    if not path.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        build_tokenizer().save(str(path))
    return Tokenizer.from_file(str(path))


def save(workdir: Path, state: TrainingState) -> None:
    """Writes the state as a whole or not at all: to a new file, which then replaces the old one."""
    leaves = jax.device_get(jax.tree.leaves((state.params, state.opt_state)))
    partial_path = workdir / "state.partial.npz"
    np.savez(partial_path, step=state.step, **{f"leaf{i}": leaf for i, leaf in enumerate(leaves)})
    partial_path.replace(workdir / "state.npz")


def restore(workdir: Path, fresh: TrainingState) -> TrainingState:
    """Returns the saved state in the shape of `fresh`, or `fresh` if there is none."""
    path = workdir / "state.npz"
    if not path.exists():
        return fresh
    leaves, treedef = jax.tree.flatten((fresh.params, fresh.opt_state))
    with np.load(path) as saved:
        params, opt_state = jax.tree.unflatten(treedef, [jnp.asarray(saved[f"leaf{i}"]) for i in range(len(leaves))])
        return TrainingState(params, opt_state, int(saved["step"]))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps in all")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at the peak")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--workdir", type=Path, default=Path(".cache/demo_model"), help="resumable checkpoint")
    parser.add_argument("--output", type=Path, default=MODEL_DIR, help="folder for the checkpoint")
    arguments = parser.parse_args()
    train(arguments.steps, arguments.learning_rate, arguments.seed, arguments.workdir, arguments.output)


if __name__ == "__main__":
    main()
