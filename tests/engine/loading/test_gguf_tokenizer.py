"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was made from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CohereTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.loading.gguf.header import GGUFHeader, read_header
from penstock.engine.loading.gguf.tokenizer import SPLITS, end_token_ids, sampling_fields, tokenizer_of
from tests.engine.loading.gguf_files import add_tokenizer
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level, llama2

CORPUS = [
    "The 1234567 quick brown foxes' tails, they'll jump over 12 lazy dogs; I'VE seen them jumping!  \n\n  Really?\r\n",
    "naïve Ångström étude, e\u0301tude \N{GRINNING FACE} 東京タワー привет мир \u2014 \u201cquotes\u201d… a//c x=1\t\t",
    "    def f(x):\n        return x**2  # 3.14159 CamelCaseWord HTTPServer snake_case ½ ²\n",
]
TEXTS = [*CORPUS, "", " ", " leading", "trailing ", "a  b   c", "zzz\x00\x7f", "<|start|>user<tool> é à<|end|>"]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def header_of(
    path: Path,
    tokenizer: Any,
    vocab_size: int = 0,
    pre: str = "gpt-2",
    architecture: str = "llama",
    name: str = "",
    **flags: bool,
) -> GGUFHeader:
    writer = GGUFWriter(path, architecture)
    writer.add_name(name)
    add_tokenizer(writer, tokenizer, vocab_size, pre, **flags)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_header(path)


@pytest.fixture(scope="module")
def learned() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of byte-level BPE."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    vocab = dict(model["vocab"])
    for special in ("<|endoftext|>", "<s>", "<|end|>"):
        vocab[special] = len(vocab)
    return vocab, [tuple(pair) for pair in model["merges"]]


ORIGINALS: dict[str, Any] = {"gpt-2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer, "command-r": CohereTokenizer}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_ids_are_those_of_the_original(
    tmp_path: Path, learned: tuple[dict[str, int], list[tuple[str, str]]], pre: str
) -> None:
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    original = ORIGINALS[pre](*learned, **special)
    found = tokenizer_of(header_of(tmp_path / "model.gguf", original, pre=pre))
    assert found.get_vocab() == original.get_vocab()
    for text in TEXTS:
        expected = original(text, add_special_tokens=False)["input_ids"]
        assert found(text)["input_ids"] == expected, text
        assert found.decode(expected) == original.decode(expected)


def test_texts_are_split_as_transformers_splits_them() -> None:
    both = SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert {"llama-bpe", "tekken", "gpt-4o", "qwen2", "dbrx"} <= both
    assert {pre: SPLITS[pre] for pre in both} == {pre: (GGUF_PRE_TOKENIZER_SPLITS[pre],) for pre in both}


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    """Returns SentencePiece's pieces in the order in which they are merged."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.pre_tokenizer = pre_tokenizers.Split(SPACE, behavior="merged_with_next")
    backend.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learned = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(token for token, _ in learned)]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_merges_what_its_algorithm_merges(tmp_path: Path, pieces: list[str], has_prefix: bool) -> None:
    vocab = {piece: id_ for id_, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    original = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    header = header_of(tmp_path / "model.gguf", original, add_space_prefix=has_prefix)
    found = tokenizer_of(header)
    for text in [*CORPUS, " two  spaces", "ok"]:
        expected = merged(SPACE * has_prefix + text.replace(" ", SPACE), vocab)
        assert found(text)["input_ids"] == [vocab["<s>"], *expected], text
        assert found.decode(expected) == text


def merged(text: str, vocab: dict[str, int]) -> list[int]:
    """Encodes by SentencePiece's BPE: the best neighbours that make a piece merge first; what is left is spelt in
    bytes.
    """
    parts = list(text)
    while True:
        ranks = [vocab.get(first + second, 10**9) for first, second in pairwise(parts)]
        if not ranks or min(ranks) == 10**9:
            break
        at = ranks.index(min(ranks))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [id_ for part in parts for id_ in ([vocab[part]] if part in vocab else bytes_of(part, vocab))]


def bytes_of(part: str, vocab: dict[str, int]) -> list[int]:
    return [vocab[f"<0x{byte:02X}>"] for byte in part.encode()]


def test_special_and_users_tokens_are_found_whole_and_the_template_comes_along(tmp_path: Path) -> None:
    original = byte_level(chat_template=CHAT_TEMPLATE)
    found = tokenizer_of(header_of(tmp_path / "model.gguf", original, vocab_size=300))
    assert found.get_vocab() == original.get_vocab()  # without what pads it
    for text in TEXTS:
        assert found(text)["input_ids"] == original(text)["input_ids"], text
    assert found.chat_template == CHAT_TEMPLATE
    assert set(found.all_special_tokens) >= {"<|end|>"}
    assert found.decode([264, 265], skip_special_tokens=True) == original.decode([264, 265], skip_special_tokens=True)


PHI3 = "<s><|system|>\nthe a<|end|>\n<|user|>\n a <unk> b<|end|>\n\n<|assistant|>\n</s> the"


@pytest.mark.parametrize(
    ("architecture", "name", "swallows"),
    [("phi3", "", True), ("phi3", "Phi 3 mini", True), ("llama", "Phi-3-mini, llamafied", True), ("llama", "x", False)],
)
def test_the_added_tokens_of_phi3_swallow_the_space_behind_them(
    tmp_path: Path, architecture: str, name: str, swallows: bool
) -> None:
    """Otherwise each turn would have three more tokens. A GGUF file does not say so."""
    original = llama2()
    backend = original.backend_tokenizer
    tokens = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    backend.add_special_tokens(
        [AddedToken(token, rstrip=swallows and token != tokens[0], normalized=False) for token in tokens]
    )
    backend.add_tokens([AddedToken("</s>", rstrip=swallows, normalized=False)])
    header = header_of(tmp_path / "model.gguf", original, architecture=architecture, name=name)
    found = tokenizer_of(header)
    for text in (PHI3, "the a", " <|end|> \t b <|endoftext|> a"):
        assert found(text)["input_ids"] == original(text)["input_ids"], text


def test_templates_for_special_cases_come_along_too(tmp_path: Path) -> None:
    given = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    tokenizer = byte_level()
    tokenizer.chat_template = given
    assert tokenizer_of(header_of(tmp_path / "model.gguf", tokenizer)).chat_template == {
        "default": "a",
        "tool_use": "b",
    }


def test_begin_and_end_are_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = byte_level(bos_token="<|start|>")
    plain = tokenizer("he")["input_ids"]
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    cases = {"gpt-2": plain, "llama-bpe": [ids[0], *plain]}
    for number, (pre, expected) in enumerate(cases.items()):
        found = tokenizer_of(header_of(tmp_path / f"{number}.gguf", tokenizer, pre=pre))
        assert found("he")["input_ids"] == expected
    both = header_of(tmp_path / "both.gguf", tokenizer, add_bos_token=True, add_eos_token=True)
    assert tokenizer_of(both)("he")["input_ids"] == [ids[0], *plain, ids[1]]


def described(tmp_path: Path, **fields: Any) -> GGUFHeader:
    """Writes a vocabulary of few tokens; `fields` are metadata, with `__` for a dot."""
    tokens = ["a", "b", "ab", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|eot_id|>"]
    metadata = {
        "general.architecture": "qwen2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        **{key.replace("__", "."): value for key, value in fields.items()},
    }
    return GGUFHeader(tmp_path / "model.gguf", metadata, {})


def test_control_tokens_that_end_turns_end_answers(tmp_path: Path) -> None:
    assert end_token_ids(described(tmp_path)) == (0, 3, 4)
    assert end_token_ids(described(tmp_path, tokenizer__ggml__eot_token_id=2)) == (0, 2, 3, 4)
    harmony = described(tmp_path, tokenizer__ggml__token_type=[1, 1, 1, 1, 3, 3, 3, 1])
    assert end_token_ids(harmony) == (0, 5, 6)  # <|end|> ends a part of an answer there


def test_recommended_sampling_is_taken_over(tmp_path: Path) -> None:
    assert sampling_fields(described(tmp_path)) == {"do_sample": True}
    found = sampling_fields(described(tmp_path, general__sampling__temp=0.6, general__sampling__top_k=20))
    assert found == {"temperature": 0.6, "top_k": 20, "do_sample": True}
    assert sampling_fields(described(tmp_path, general__sampling__temp=0.0)) == {"do_sample": False}


N = 20_000
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "pre": ({"tokenizer__ggml__pre": "viking"}, ConfigError, "tokenizer.ggml.pre = 'viking' is not supported"),
    "no pre": ({"tokenizer__ggml__pre": None}, ConfigError, "tokenizer.ggml.pre = None is not supported"),
    "model": ({"tokenizer__ggml__model": "t5"}, ConfigError, "tokenizer.ggml.model = 't5' is not supported"),
    "no model": ({"tokenizer__ggml__model": None}, CheckpointError, "tokenizer.ggml.model must be text, not None"),
    "no tokens": ({"tokenizer__ggml__tokens": []}, CheckpointError, "has 0 tokenizer.ggml.tokens"),
    "tokens": ({"tokenizer__ggml__tokens": [1]}, CheckpointError, "tokens must be an array of str, not"),
    "types": ({"tokenizer__ggml__token_type": [1]}, CheckpointError, "8 tokenizer.ggml.tokens and 1 tokenizer.ggml"),
    "eos": ({"tokenizer__ggml__eos_token_id": 8}, CheckpointError, "eos_token_id = 8, and there are 8 tokens"),
    "flag": ({"tokenizer__ggml__add_bos_token": 3}, CheckpointError, "add_bos_token must be true or false, not 3"),
    "control tokens": (
        {"tokenizer__ggml__tokens": ["a"] * N, "tokenizer__ggml__token_type": [3] * N, "tokenizer__ggml__merges": []},
        CheckpointError,
        "has 20000 special and added tokens, at most 16384 may be",
    ),
    "long token": (
        {"tokenizer__ggml__model": "llama", "tokenizer__ggml__merges": [], "tokenizer__ggml__tokens": ["a" * 999] * 8},
        CheckpointError,
        "tokens of up to 999 characters, 7992 in all",
    ),
    "scores": (
        {"tokenizer__ggml__model": "llama", "tokenizer__ggml__merges": [], "tokenizer__ggml__scores": [0.5]},
        CheckpointError,
        "has 1 scores of 8 tokens",
    ),
    "a token twice": (
        {"tokenizer__ggml__tokens": ["a", "b", "ab", "x", "y", "b", "z", "zz"]},
        CheckpointError,
        "has token 'b' twice, as 1 and as 5",
    ),
    "a piece twice": (
        {
            "tokenizer__ggml__model": "llama",
            "tokenizer__ggml__tokens": ["a", "b", "ab", "x", "y", "ab", "z", "zz"],
            "tokenizer__ggml__merges": ["a b"],
        },
        CheckpointError,
        "has token 'ab' twice, as 2 and as 5",
    ),
    "merge": ({"tokenizer__ggml__merges": ["a b", "ab"]}, CheckpointError, "merges has no pair at 1"),
    "merged": ({"tokenizer__ggml__merges": ["b b"]}, CheckpointError, "describes no tokenizer that can be made"),
    "template": ({"tokenizer__chat_template": 5}, CheckpointError, "tokenizer.chat_template must be text, not 5"),
}


def test_tokens_that_are_no_text_may_be_there_twice(tmp_path: Path) -> None:
    tokens = ["a", "b", "ab", "<pad>", "<pad>", "unused", "unused", "ab"]
    types = [1, 1, 1, 3, 3, 5, 5, 5]
    fields = {"tokens": tokens, "token_type": types, "eos_token_id": 3}
    found = tokenizer_of(described(tmp_path, **{f"tokenizer__ggml__{key}": value for key, value in fields.items()}))
    assert found("ab")["input_ids"] == [2]


@pytest.mark.parametrize("case", WRONG)
def test_what_describes_no_tokenizer_is_refused(tmp_path: Path, case: str) -> None:
    fields, kind, message = WRONG[case]
    with pytest.raises(kind, match=message.replace("(", r"\(")):
        tokenizer_of(described(tmp_path, **fields))
