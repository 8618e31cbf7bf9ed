"""Random models of a given size."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.loading.checkpoint import check_weights, read_model_config
from penstock.engine.text.conversation import Conversation
from penstock.engine.text.tokenizer import Tokenizer
from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.presets import preset_dir


@pytest.mark.parametrize(("name", "dtype"), [("nano", "float32"), ("nano", "bfloat16"), ("nano-moe", "float32")])
def test_a_random_model_is_a_whole_checkpoint(tmp_path: Path, name: str, dtype: str) -> None:
    directory = preset_dir(name, dtype, tmp_path)
    config = read_model_config(directory)
    assert (config.dtype, config.vocab_size) == (dtype, 512)
    check_weights(directory, config)
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.vocab_size == 512
    assert len(tokenizer.encode("tea at ten")) < len("tea at ten")
    assert tokenizer.encode_chat(Conversation([{"role": "user", "content": "hi"}])).token_ids
    stamp = directory.stat().st_mtime_ns
    assert preset_dir(name, dtype, tmp_path).stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_random_models_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(ImpossibleLoad, match="random:huge is not one of random:nano"):
        preset_dir("huge", "float32", tmp_path)
    with pytest.raises(ImpossibleLoad, match=r"--dtype of a random model must be one of .* not 'float16'"):
        preset_dir("nano", "float16", tmp_path)
