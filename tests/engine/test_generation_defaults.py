from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import SamplingParams
from penstock.engine.errors import CheckpointError
from penstock.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from penstock.engine.loading.source import open_checkpoint
from penstock.parameters import SamplingParameters, declared


def read(
    directory: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None = None
) -> GenerationDefaults:
    (directory / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_generation_defaults(open_checkpoint(directory))


def test_without_a_file_sampling_is_plain(tmp_path: Path) -> None:
    assert read(tmp_path, None, {"eos_token_id": 7}) == GenerationDefaults(eos_token_ids=(7,))


def test_the_end_of_a_model_beside_a_vision_tower_is_its_texts(tmp_path: Path) -> None:
    text = {"text_config": {"eos_token_id": [7, 9]}}
    assert read(tmp_path, None, text).eos_token_ids == (7, 9)
    assert read(tmp_path, None, {"eos_token_id": 5, **text}).eos_token_ids == (5,)


def test_what_the_file_states_is_kept(tmp_path: Path) -> None:
    stated: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}
    defaults = read(tmp_path, {"do_sample": True, "eos_token_id": [3, 4, 3], **stated})
    assert defaults == GenerationDefaults((3, 4), SamplingParams(**stated))


@pytest.mark.parametrize("fields", [{"do_sample": False}, {"do_sample": False, "temperature": 0.7}])
def test_a_file_that_says_not_to_sample_is_greedy(fields: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, fields).sampling == SamplingParams(temperature=0.0)


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": None}, {"do_sample": True}])
def test_a_file_that_does_not_say_so_samples(do_sample: dict[str, Any], tmp_path: Path) -> None:
    """Many files hold nothing but token ids."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, **do_sample}
    assert read(tmp_path, ids).sampling == SamplingParams(temperature=1.0)
    assert read(tmp_path, {**ids, "temperature": 0.7, "top_k": 9}).sampling == SamplingParams(temperature=0.7, top_k=9)


def test_defaults_say_what_holds_and_where_it_is_stated(tmp_path: Path) -> None:
    assert read(tmp_path, None).source is None
    assert read(tmp_path, {"eos_token_id": 2}).source == "generation_config.json"
    defaults = read(tmp_path, {"top_p": 0.5, "temperature": None, "eos_token_id": 2})
    assert defaults.source == "generation_config.json: top_p"
    assert json.loads(defaults.spelled()) == {
        "temperature": 1.0, "top_p": 0.5, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "eos_token_ids": [2],
    }  # fmt: skip


def test_a_later_parameter_that_changes_nothing_is_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker says of its defaults decides whether it may join others, those of an earlier version included."""
    known = declared(SamplingParameters)
    later = {**known, "min_p": replace(known["min_p"], since="0.2")}
    monkeypatch.setattr("penstock.engine.generation_defaults.declared", lambda _: later)
    said = json.loads(read(tmp_path, {"eos_token_id": 2}).spelled())
    assert said.keys() == {"temperature", "top_p", "top_k", "repetition_penalty", "eos_token_ids"}
    assert json.loads(read(tmp_path, {"min_p": 0.1, "eos_token_id": 2}).spelled())["min_p"] == 0.1


def test_absent_and_null_fields_filter_nothing(tmp_path: Path) -> None:
    defaults = read(tmp_path, {"do_sample": True, "top_k": None, "temperature": None}, {"eos_token_id": [1, 2]})
    assert defaults == GenerationDefaults(eos_token_ids=(1, 2))


def test_what_is_not_honoured_is_listed(tmp_path: Path) -> None:
    defaults = read(tmp_path, {"num_beams": 4, "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [5]})
    assert defaults.ignored == ("num_beams=4", "suppress_tokens=[5]")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": "40"}, "top_k"),
        ({"do_sample": True, "temperature": -1}, "temperature"),
        ({"do_sample": "yes"}, "do_sample"),
        ({"eos_token_id": 10**20}, "eos_token_id.*100000000000000000000"),
        ({"eos_token_id": list(range(40))}, "eos_token_id lists 40 token ids, the limit is 32"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature.*nan"),
        ({"top_p": 10**400}, "top_p"),
    ],
)
def test_values_that_make_no_sense_are_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path, fields)


def test_malformed_json(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_generation_defaults(open_checkpoint(tmp_path))


def test_end_ids_beyond_the_vocabulary_are_dropped() -> None:
    sampling = SamplingParams(top_k=5)
    assert GenerationDefaults((3, 100, 4), sampling).within(100) == GenerationDefaults((3, 4), sampling)
