"""Makes the plan for `penstock plan`, and shows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli.shared.errors import CommandFailed
from penstock.cli.shared.simulated import show_simulated, simulated_as_dict
from penstock.engine.errors import EngineError
from penstock.engine.models import layer_groups
from penstock.engine.processors import num_processors
from penstock.local.console import console
from penstock.local.progress import shown
from penstock.tools.plan import (
    PUBLISHED,
    Plan,
    Simulated,
    Trace,
    as_dict,
    planned_model,
    planned_replicas,
    read_trace,
    simulate,
)
from penstock.tools.plan import plan as planned
from penstock.tools.plan.device.topology import devices_of
from penstock.worker.logs import configure_logs
from penstock.worker.settings import Settings

_GIB = 2**30
_MAX_PROCESSES = 8  # by default: each takes some GiB of memory


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command that are not settings."""

    topology: str
    tensor: int | None
    context: int
    trace: Path | None
    slices: int  # slices that serve the trace
    processes: int | None  # processes that compile; None: one per processor, up to a limit


def run(settings: Settings, wanted: PlanOptions, *, as_json: bool) -> None:
    """Plans and prints; with a trace, simulates how the slices would serve it.

    Raises:
        CommandFailed: libtpu is missing; the model is unknown, cannot be split like this, or does not fit; or a line of
            the trace is wrong, or too long for the model.
    """
    configure_logs(settings.log_level, settings.log_format, sys.stderr)  # only the plan goes to stdout
    try:
        made, simulated = _plan(settings, wanted, None if wanted.trace is None else read_trace(wanted.trace))
    except EngineError as error:
        raise CommandFailed(str(error)) from error
    if as_json:
        of_trace = {} if simulated is None else {"trace": simulated_as_dict(simulated)}
        typer.echo(json.dumps(as_dict(made) | of_trace, indent=2))
        return
    _show(console(), made)
    if simulated is not None:
        show_simulated(console(), simulated, str(wanted.trace))


def _plan(settings: Settings, wanted: PlanOptions, trace: Trace | None) -> tuple[Plan, Simulated | None]:
    config = settings.engine_config()
    model = planned_model(settings.model or "", config.dtype, config.weights)
    if trace is not None:  # fail before the minutes of compiling
        trace.check(config.max_model_len or model.max_position)
    tensor = wanted.tensor or len(devices_of(wanted.topology)) // config.expert_parallel or 1
    config = replace(config, tensor_parallel=tensor)
    with shown(f"compiling for {wanted.topology}", "programs") as report:
        made = planned(
            model,
            wanted.topology,
            config,
            context=wanted.context,
            processes=wanted.processes or min(num_processors(), _MAX_PROCESSES),
            progress=report,
        )
    if trace is None:
        return made, None
    trace.check(made.max_model_len)  # pages may hold fewer tokens than the model allows
    with shown("simulating", "requests") as report:
        return made, simulate(trace, planned_replicas(made, model, config, wanted.slices), report)


def _show(screen: Console, made: Plan) -> None:
    kinds = f"{made.tensor * made.expert} devices for one copy of the model, {made.replicas} copies"
    pages = f"pages of {made.page_size} tokens in {made.kv_dtype}"
    screen.print(f"[bold]{made.topology}[/]: {kinds}; attention {made.attention}, {pages}")
    screen.print(_memory(made))
    longest = made.max_model_len
    counted = " and ".join(f"{count:,}" for count in made.usable_pages.counts)
    held = f"{made.num_tokens:,} tokens at once in {counted} pages"
    each = f"{made.sequence_bytes(longest) / _GIB:.3f} GiB"
    screen.print(f"Pages hold {held}: {made.num_sequences(longest)} sequences of {longest:,} with {each} each.")
    if len(made.kind_bytes) > 1:
        screen.print("Kinds of pages: " + "; ".join(_kinds(made)) + ".")
    if made.num_states:
        screen.print(f"States have {made.num_states - 1:,} slots of {made.slot_bytes / 2**20:.3f} MiB each.")
    screen.print(_spare(made))
    if made.needs.has_windows:
        screen.print(f"Layers are in {made.needs.num_groups} groups; pages behind their windows are counted as free.")
    alias = "updated in place, copied nowhere" if made.cache_is_aliased else "[bold red]copied in a step[/]"
    screen.print(f"The KV cache is {alias}. Compiling took {made.compile_s:.0f} s.\n")
    screen.print(_buckets(made))
    screen.print(_steps(made))
    if made.counts_others:
        screen.print(
            "libtpu cannot print what runs here: the same without SparseCores was counted, and that may differ."
        )
    expected = "bytes, matmuls, or XLA (cycles that the compiler expects) and kernels"
    screen.print(f"[dim]A step takes the longest of {expected}, and then links. Nothing was measured.[/]")
    counted = "; ".join(f"{', '.join(names)} by {basis}" for basis, names in made.kernels.items()) or "unknown"
    screen.print(f"[dim]Kernels: {counted}. Unknown: waits within kernels, the host, the runtime.[/]")
    screen.print(f"[dim]Links: {_links(made)}.[/]")
    screen.print(f"[dim]Expected: the bound over the shares of it that others published. {_published()}.[/]")


def _links(made: Plan) -> str:
    """Says which programs hide their collectives behind other work, and which wait for them."""
    hidden = [f"{share:.0%} hidden in the {name}" for name, share in made.hidden_links.items() if share is not None]
    waiting = [name for name, share in made.hidden_links.items() if share is None]
    waited = [f"all waited for in the {', '.join(waiting)}, without an asynchronous collective"] if waiting else []
    return "; ".join([*hidden, *waited]) or "none"


def _kinds(made: Plan) -> Iterator[str]:
    """Describes pages that differ in their KV heads."""
    groups = layer_groups(made.model)
    for number, (kind, num_bytes) in enumerate(zip(groups.page_kinds, made.kind_bytes, strict=True)):
        windows = {window for window, of in zip(groups.windows, groups.kinds, strict=True) if of == number}
        seen = ", ".join("everything" if window is None else f"{window:,} tokens" for window in windows)
        heads = f"{kind.num_kv_heads} KV heads of {kind.head_dim}"
        yield f"{num_bytes / 2**20:.3f} MiB for {kind.size} layers of {heads} that see {seen}"


def _spare(made: Plan) -> str:
    """Says what is left, and which setting would use it."""
    spare = f"{made.spare_bytes / _GIB:.2f} GiB are spare"
    if made.spare_pages:
        return f"{spare}: num_pages {made.num_pages + made.spare_pages:,} would use them."
    if made.num_pages >= made.max_pages:
        return f"{spare}: the pages are all that max_num_seqs and max_model_len can use; either could be higher."
    return f"{spare}."


def _memory(made: Plan) -> Table:
    table = Table("per device", "GiB", title="HBM", title_justify="left")
    rows: list[tuple[str, int]] = [
        ("weights", made.weight_bytes),
        *([("of them padding of the vocabulary", made.vocab_padding_bytes)] if made.vocab_padding_bytes else []),
        *([("padding of their rows to whole tiles", made.lane_padding_bytes)] if made.lane_padding_bytes else []),
        ("pages", made.cache_bytes),
        *([("of them padding of heads to whole tiles", padding)] if (padding := made.page_padding_bytes) else []),
        *([("states", made.state_bytes)] if made.num_states else []),
        ("sampling state", made.sampling_bytes),
        ("temporaries of the largest function", made.temporary_bytes),
        ("compiled programs", made.code_bytes),
        ("used", made.used_bytes),
        (f"of a {made.chip.name} device", made.chip.hbm_bytes),
    ]
    for name, num_bytes in rows:
        table.add_row(name, f"{num_bytes / _GIB:.3f}")
    return table


def _buckets(made: Plan) -> Table:
    table = Table("compiled", "size", "seconds", "temporaries MiB", "HBM MB per run", "collectives", "per layer")
    for bucket in made.buckets:
        table.add_row(
            bucket.kind,
            str(bucket.size),
            "kept" if bucket.is_kept else f"{bucket.compile_s:.1f}",
            f"{bucket.temporary_bytes / 2**20:.1f}",
            f"{bucket.traffic.hbm_bytes / 1e6:,.0f}",
            _counts(bucket.traffic.collectives),
            _counts(bucket.layer_collectives),
        )
    return table


def _steps(made: Plan) -> Table:
    headings = (
        "bound ms",
        "expected ms",
        "bytes ms",
        "matmul ms",
        "XLA ms",
        "kernels ms",
        "links ms",
        "GB",
        "over ideal",
        "TFLOP",
        "tokens/s",
    )
    table = Table("step", "ms", *headings)
    kinds = (
        ("", made.decode),
        (", filtered", made.decode_filtered),
        (", one row with all options", made.decode_one_asks),
        (", all options", made.decode_all_options),
    )
    steps = [(f"decode {s.num_tokens} x {s.context}{kind}", s) for kind, found in kinds for s in found]
    for name, step in [*steps, ("prefill", made.prefill)]:
        of, total = step.time, step.seconds
        low, high = step.expected_s
        times = [of.memory_s, of.compute_s, of.xla_s, of.kernels_s, of.collective_s]
        table.add_row(
            f"{name} {step.num_tokens}" if name == "prefill" else name,
            f"{1e3 * total:.2f}",
            f"{1e3 * step.bound_s:.2f}",
            f"{1e3 * low:.1f} to {1e3 * high:.1f}" if step.context else "",
            *(f"{1e3 * value:.2f}" for value in times),
            f"{step.counted_bytes / 1e9:.2f}",
            f"{step.overhead:.3f}",
            f"{step.flops / 1e12:.2f}",
            f"{step.tokens_per_s:,.0f}",
        )
    table.caption = f"time to first token of {made.prefill.num_tokens} tokens: {1e3 * made.prefill.seconds:.1f} ms"
    return table


def _published() -> str:
    return "; ".join(
        f"{row.model} on {row.topology}, {row.batch} x {row.context}: {1e3 * row.token_s:.1f} ms, {row.share:.2f}"
        for row in PUBLISHED
    )


def _counts(kinds: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {kind}" for kind, count in sorted(kinds.items())) or "none"
