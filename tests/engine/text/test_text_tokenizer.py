from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import CheckpointError, ConfigError, InvalidRequest
from penstock.engine.text.conversation import Conversation
from penstock.engine.text.stream import TextStream
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level, llama2

TEXTS = ["", "the", " the é 🛁\n", "<|end|> spelled out", "<tool>é à", "\x00\u200d", "the " * 300]


@pytest.fixture(params=[byte_level, llama2], ids=["byte-level", "llama2"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(chat_template=CHAT_TEMPLATE).save_pretrained(tmp_path)
    return tmp_path


def test_ids_are_those_of_hugging_face(directory: Path) -> None:
    ours, theirs = Tokenizer.from_dir(directory), reference(directory)
    for text in TEXTS:
        assert ours.encode(text) == tuple(theirs(text)["input_ids"])
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


def test_saved_truncation_and_padding_do_not_cut_or_pad_prompts(directory: Path) -> None:
    path = directory / "tokenizer.json"
    state = json.loads(path.read_text())
    state["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(state))
    ours, theirs = Tokenizer.from_dir(directory), reference(directory)
    assert len(ours.encode("the " * 9)) > 9
    assert ours.encode("the " * 9) == tuple(theirs("the " * 9)["input_ids"])


def test_chat_is_rendered_by_the_template(directory: Path) -> None:
    messages = [{"role": "user", "content": "the é"}, {"role": "assistant", "content": "a"}]
    chat = Tokenizer.from_dir(directory).encode_chat(Conversation(messages))
    assert chat.token_ids == tuple(
        reference(directory).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )


def test_what_the_template_refuses_is_an_invalid_request_with_its_message(directory: Path) -> None:
    tokenizer = Tokenizer.from_dir(directory)
    with pytest.raises(InvalidRequest, match="not that"):
        tokenizer.encode_chat(Conversation([{"role": "user", "content": "refused"}]))


def test_without_a_chat_template_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(byte_level()).encode_chat(Conversation([{"role": "user", "content": "x"}]))


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        Tokenizer(byte_level()).encode("a\ud800")


def test_a_directory_without_tokenizer_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.from_dir(tmp_path)


def test_a_malformed_tokenizer_file_is_an_error(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=str(directory)):
        Tokenizer.from_dir(directory)


def test_a_token_with_an_id_far_above_the_others(directory: Path) -> None:
    path = directory / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["vocab"]["zzz"] = 2**31
    path.write_text(json.dumps(state))
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.vocab_size == 2**31 + 1
    assert tokenizer.decode([2**31]) == "zzz"


def test_a_chat_template_that_is_no_text_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": 5}))
    with pytest.raises(ConfigError, match="chat template 'default' must be text, not 5"):
        Tokenizer.from_dir(directory)


def test_of_several_chat_templates_the_default_is_used() -> None:
    templates = {"default": "{{ messages[0].content }}", "other": "{{ 1 // 0 }}"}
    chat = Conversation([{"role": "user", "content": "the é"}])
    tokenizer = Tokenizer(byte_level(chat_template=templates))
    assert tokenizer.encode_chat(chat).token_ids == tokenizer.encode("the é")
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(byte_level(chat_template={"other": "x"})).encode_chat(chat)


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    with pytest.raises(ConfigError, match="ByT5Tokenizer"):
        Tokenizer.from_dir(tmp_path)


def test_encoding_and_detokenizing_side_by_side() -> None:
    tokenizer = Tokenizer(llama2(chat_template=CHAT_TEMPLATE))
    text = "the a é 🛁 " * 20
    expected = tokenizer.encode(text)

    def work(_: int) -> tuple[tuple[int, ...], str]:
        tokenizer.encode_chat(Conversation([{"role": "user", "content": text}]))
        stream = TextStream(tokenizer)
        return tokenizer.encode(text), "".join(stream.push(id_)[0] for id_ in expected) + stream.finish()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(40)))
    assert set(results) == {(expected, tokenizer.decode(expected))}


def reference(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
