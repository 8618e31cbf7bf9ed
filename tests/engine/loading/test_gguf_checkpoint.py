"""A single GGUF file is a checkpoint: weights, tokenizer, template, defaults and digest come from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from penstock.cli.checks.model import check_model
from penstock.cli.shared.serve import load_model as load_for_worker
from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from penstock.engine.loading.checkpoint import check_weights, load_model, read_model_config
from penstock.engine.loading.gguf.header import read_header
from penstock.engine.loading.identity import Identity, identify
from penstock.engine.loading.naming.resolving import resolve
from penstock.engine.loading.source import open_checkpoint
from penstock.engine.models import Decoder
from penstock.engine.models.layers import quantized
from penstock.engine.models.layers.linear import present
from penstock.engine.models.layers.quantized import Quantized
from penstock.engine.text.conversation import Conversation
from penstock.engine.text.tokenizer import Tokenizer
from penstock.tools.plan.models import planned_model
from penstock.worker.service import Model
from tests.engine.checkpoints import reference_greedy, write_checkpoint
from tests.engine.engines import EOS, SMALL, drive, write_model
from tests.engine.formats.test_quantized import weight_of
from tests.engine.loading import gguf_files
from tests.engine.loading.gguf_files import all_of, q4_k_m, write_gguf

K = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
CHAT = Conversation([{"role": "user", "content": "the thé"}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that `file` is made from, with the values of its weights."""
    path = write_model(tmp_path_factory.mktemp("of_file") / "folder", "llama", **K, tie_word_embeddings=True)
    write_gguf(path.parent / "model.gguf", path, q4_k_m)
    return path


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return folder.parent / "model.gguf"


@pytest.fixture(scope="module")
def model(file: Path) -> Decoder:
    return load_model(file, read_model_config(file))


def test_every_weight_is_that_of_the_gguf_library_bit_for_bit(folder: Path, model: Decoder) -> None:
    values = load_file(folder / "model.safetensors")
    table = values["model.embed_tokens.weight"]
    np.testing.assert_array_equal(model.embedding.columns(jnp.arange(len(table))), table)
    kinds = set()
    for layer, block in enumerate(model.blocks):
        modules = {
            "self_attn": {"q": "q", "k": "k", "v": "v", "o": "out"},
            "mlp": {"gate": "gate", "up": "up", "down": "down"},
        }
        for part, names in modules.items():
            for name, ours in names.items():
                linear = getattr(block.attention if part == "self_attn" else block.mlp, ours)
                kinds.add(linear.held.packing.code)
                expected = values[f"model.layers.{layer}.{part}.{name}_proj.weight"]
                np.testing.assert_array_equal(weight_of(linear), expected)
    assert kinds == {"int4", "int6"}


def test_a_tied_head_is_unpacked_in_pieces_where_others_are(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "PIECE", 2**13)
    model, rows = load_model(file, read_model_config(file, "float32")), jnp.ones((3, 256), jnp.float32)
    whole = model.logits(rows)
    quantized.unpack_in_pieces(model)
    assert "scan" in str(jax.make_jaxpr(model.logits)(rows))
    np.testing.assert_allclose(model.logits(rows), whole, rtol=1e-5, atol=1e-4)


def test_what_is_around_the_blocks_is_read_first(file: Path) -> None:
    """The head may then be packed before the blocks take memory."""
    seen: list[Any] = []
    load_model(file, read_model_config(file), pack_head=lambda model: seen.append(nnx.to_flat_state(nnx.state(model))))
    for path, leaf in seen[0]:
        assert isinstance(leaf.get_value(), jax.Array) == (path[0] != "blocks")


def test_what_is_held_is_little_more_than_the_file_has(file: Path, model: Decoder) -> None:
    stored = sum(tensor.num_bytes for tensor in read_header(file).tensors.values())
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert 0.9 * stored < held < 1.05 * stored
    assert check_weights(file, read_model_config(file)) == pytest.approx(held, rel=0.02)  # norms are f32 in the file


@pytest.fixture(scope="module")
def served(file: Path) -> Model:
    """Loads a file as `penstock worker --model FILE` does."""
    return load_for_worker(str(file), replace(SMALL, dtype="float32"))


def test_a_worker_gives_the_greedy_tokens_of_the_same_values(folder: Path, served: Model) -> None:
    prompts = {"short": (5, 9, 77), "chunked": tuple(range(40, 70))}
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    assert isinstance(served.engine, Engine)
    results = drive(served.engine, [Request(name, prompt, params) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert results[name, 0].token_ids == reference_greedy(folder, list(prompt), 40)


def test_a_worker_has_tokenizer_template_and_ends_from_the_file(folder: Path, served: Model) -> None:
    original = Tokenizer.from_dir(folder)
    assert served.text.encode_chat(CHAT) == original.encode_chat(CHAT)
    assert served.text.encode("the thé <tool>") == original.encode("the thé <tool>")
    assert served.defaults == GenerationDefaults(eos_token_ids=(EOS,))
    assert served.identity is not None
    assert served.identity.template == identify(folder, original.templates, original.rules()).template


def test_a_generation_config_beside_the_file_has_the_last_word(file: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7, "eos_token_id": null}')
    defaults = read_generation_defaults(open_checkpoint(tmp_path / "model.gguf"))
    assert defaults.sampling == SamplingParams(temperature=0.25, top_k=7)
    assert defaults.eos_token_ids == (EOS,)
    assert defaults.source == "metadata of the GGUF file and generation_config.json beside it: temperature, top_k"


def test_doctor_finds_nothing_wrong_with_the_file(file: Path) -> None:
    found = {finding.name: finding for finding in check_model(str(file), "auto")}
    assert {name: finding.status for name, finding in found.items()} == dict.fromkeys(found, "ok")
    assert found["model"].detail == f"llama, 2 layers, 128 positions, in {file}"
    assert found["tokenizer"].detail == "267 tokens, with a chat template"
    assert found["generation"].detail.startswith("temperature 1, top_p 1")
    assert found["generation"].detail.endswith(f"(from metadata of the GGUF file); ends at [{EOS}]")


ORACLES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
}


@pytest.mark.parametrize("family", ORACLES)
def test_transformers_reads_the_file_as_the_same_model(tmp_path: Path, family: str) -> None:
    """So the tests' writer and our reader can't be wrong together."""
    folder = write_checkpoint(tmp_path / "folder", family, hidden_size=64, **ORACLES[family])
    file = write_gguf(tmp_path / "model.gguf", folder, all_of("Q8_0"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    values = load_file(folder / "model.safetensors")
    assert values.keys() <= theirs.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(theirs[name].numpy(), value, err_msg=name)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small folder, quickly made into files."""
    return write_checkpoint(tmp_path / "folder", "llama", hidden_size=32, intermediate_size=32)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path, small: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    file = write_gguf(alone / "model.gguf", small, all_of("Q8_0"))
    assert resolve(str(alone)) == alone
    assert resolve(str(file)) == file
    assert read_model_config(alone) == read_model_config(file) == planned_model(str(file))
    shutil.copy(file, alone / "other.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files, model\.gguf among them: name the one to load"):
        read_model_config(alone)
    with pytest.raises(CheckpointError, match=r"a file whose name ends in \.gguf"):
        resolve(str(alone / "missing.gguf"))


def test_types_follow_the_file_or_the_setting(tmp_path: Path, small: Path) -> None:
    dtypes = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "bfloat16"}
    for kind, dtype in dtypes.items():
        file = write_gguf(tmp_path / f"{kind}.gguf", small, all_of(kind))
        assert read_model_config(file).dtype == dtype
        assert read_model_config(file, "float32").dtype == "float32"
        if kind != "Q8_0":  # rows of keys are in order, whatever part of them is read
            name = "model.layers.1.self_attn.k_proj.weight"
            expected, found = load_file(small / "model.safetensors")[name], open_checkpoint(file).weights().tensor(name)
            assert found[:].dtype == dtype
            np.testing.assert_array_equal(found[3:9, 4:20].astype(np.float32), expected[3:9, 4:20])


def test_floats_can_be_quantized_while_they_are_loaded(tmp_path: Path, small: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", small, all_of("F16"))
    config = read_model_config(plain, "float32", "int8")
    keys = present(
        *(load_model(path, read_model_config(path, "float32", "int8")).blocks[1].attention.k for path in (plain, small))
    )
    assert config.is_packed
    assert all(isinstance(linear.held, Quantized) for linear in keys)
    ours, of_folder = (linear.arrays["codes"] for linear in keys)
    np.testing.assert_array_equal(ours, of_folder)  # rows in order
    with pytest.raises(ConfigError, match="weights = int8 is for checkpoints that are not quantized"):
        read_model_config(write_gguf(tmp_path / "q.gguf", small, all_of("Q8_0")), "auto", "int8")


def identified(file: Path) -> Identity:
    return identify(file, {}, "rules")


def test_the_digest_is_of_what_the_file_holds(tmp_path: Path, small: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", small, all_of("Q8_0"), **{"general.name": "one"})
    renamed = write_gguf(tmp_path / "renamed.gguf", small, all_of("Q8_0"), **{"general.name": "other"})
    assert identified(renamed) == identified(file)
    header = read_header(file)
    data = bytearray(file.read_bytes())
    data[header.tensors["output.weight"].start + 40] ^= 1
    (tmp_path / "weights.gguf").write_bytes(data)
    longer = write_gguf(tmp_path / "longer.gguf", small, all_of("Q8_0"), context_length=99)
    types = write_gguf(tmp_path / "types.gguf", small, all_of("Q4_0"))
    found = {identified(path).weights for path in (file, tmp_path / "weights.gguf", longer, types)}
    assert len(found) == 4


Q8 = all_of("Q8_0")
HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {  # metadata
    "split": ({"split.count": 3}, CheckpointError, "has split.count = 3; the name of such a file ends in its number"),
    "rope": (
        {"rope.scaling.type": "odd", "rope.scaling.factor": 2.0},
        ConfigError,
        "type = 'odd': expected none, linear",
    ),
    "no factor": ({"rope.scaling.type": "yarn"}, ConfigError, "rope.scaling.factor = None: expected a number above 0"),
    "log": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_log_multiplier": 1.0},
        ConfigError,
        "rope.scaling.yarn_log_multiplier = 1.0: is not supported",
    ),
    "value": ({"attention.value_length": 4}, ConfigError, "attention.value_length = 4: expected None or"),
    "bidirectional": ({"attention.causal": False}, ConfigError, "attention.causal = False: expected None or True"),
    "layers": ({"block_count": 3}, CheckpointError, "the checkpoint lacks: model.layers.2.self_attn.o_proj"),
    "fewer layers": ({"block_count": 1}, CheckpointError, "no place for: model.layers.1"),
    "many layers": ({"block_count": 2**31}, ConfigError, "metadata of model.gguf: num_hidden_layers must be at most"),
    "no layers": ({"block_count": 0}, ConfigError, "llama.block_count = 0: expected a positive whole number"),
    "heads": ({"attention.head_count": None}, ConfigError, "attention.head_count = None: expected a positive whole"),
    "head size": (dict.fromkeys(HEAD, 32), CheckpointError, "_proj.weight has shape"),
    "kv heads": ({"attention.head_count_kv": [2, 1]}, ConfigError, r"head_count_kv = \[2, 1\]: layers that differ"),
    "epsilon": (
        {"attention.layer_norm_rms_epsilon": -1.0},
        ConfigError,
        "metadata of model.gguf: rms_norm_eps must be",
    ),
    "width": ({"embedding_length": 64}, CheckpointError, "has shape"),
    "experts": (
        {"expert_count": 3, "expert_used_count": 2},
        CheckpointError,
        "lacks tensors of the model: model.layers",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_metadata_that_the_weights_contradict_or_that_asks_for_more_is_refused(
    tmp_path: Path, small: Path, case: str
) -> None:
    metadata, kind, message = WRONG[case]
    file = write_gguf(tmp_path / "model.gguf", small, Q8, **metadata)
    with pytest.raises(kind, match=message):
        check_weights(file, read_model_config(file))


def spoiled(file: Path, name: str, place: int, data: bytes) -> None:
    held = bytearray(file.read_bytes())
    start = read_header(file).tensors[name].start + place
    held[start : start + len(data)] = data
    file.write_bytes(held)


def renamed(file: Path, old: str, new: str) -> None:
    """Replaces a text in the header."""
    before, after = (len(name).to_bytes(8, "little") + name.encode() for name in (old, new))
    assert len(before) == len(after)
    file.write_bytes(file.read_bytes().replace(before, after))


def retyped(file: Path, name: str, kind: int) -> None:
    """Changes the type that a header has for a tensor."""
    data = file.read_bytes()
    at = data.index(name.encode()) + len(name) + 4 + 16
    file.write_bytes(data[:at] + kind.to_bytes(4, "little") + data[at + 4 :])


IQ4_NL, I8 = gguf.GGMLQuantizationType.IQ4_NL, gguf.GGMLQuantizationType.I8
NAN = np.array([np.nan], np.float16).tobytes()
DAMAGE: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "architecture": (
        lambda file: renamed(file, "llama", "mamba"),
        ConfigError,
        "general.architecture = 'mamba' is not",
    ),
    "missing": (
        lambda file: renamed(file, "blk.1.attn_v.weight", "blk.1.attn_w.weight"),
        CheckpointError,
        "lacks tensors of the model: model.layers.1.self_attn.v_proj.weight",
    ),
    "surplus": (
        lambda file: renamed(file, "output.weight", "outpuT.weight"),
        CheckpointError,
        r"no place for: outpuT.weight \(model.gguf\)",
    ),
    "type": (lambda file: retyped(file, "blk.0.ffn_up.weight", IQ4_NL), ConfigError, "ffn_up.weight is of type IQ4_NL"),
    "integers": (lambda file: retyped(file, "blk.0.ffn_up.weight", I8), ConfigError, "ffn_up.weight is of type I8"),
    "scale": (
        lambda file: spoiled(file, "blk.1.ffn_down.weight", 34, NAN),
        CheckpointError,
        "tensor model.layers.1.mlp.down_proj.weight has 1 of 32 scales that are not finite, in model.gguf",
    ),
    "scale of a token": (
        lambda file: spoiled(file, "token_embd.weight", 0, NAN),
        CheckpointError,
        "tensor model.embed_tokens.weight has 1 of 120 scales that are not finite, in model.gguf",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    damage, kind, message = DAMAGE[case]
    small = write_checkpoint(tmp_path / "folder", "llama", hidden_size=32, intermediate_size=32)
    file = write_gguf(tmp_path / "model.gguf", small, Q8)
    damage(file)
    with pytest.raises(kind, match=message):
        load_model(file, read_model_config(file))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["rope_freqs.weight"], r"rope_freqs.weight must be at most 4096 floats in a row, not \[5000\] of F32"),
        (["rope_factors_long.weight"], "has rope_factors_long.weight without what belongs to them"),
    ],
)
def test_rotary_factors_that_cannot_be_are_refused(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], message: str
) -> None:
    factors = {name: np.ones(5000, np.float32) for name in names}
    monkeypatch.setattr(gguf_files, "_rope_factors", lambda config: factors)
    file = write_gguf(tmp_path / "model.gguf", small, Q8)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read_model_config(file)


def test_a_quantized_norm_is_refused(tmp_path: Path, small: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", small, lambda name: "Q8_0" if "norm" in name else "F32")
    with pytest.raises(CheckpointError, match=r"norm.weight has shape \[34\], expected \[32\]"):
        check_weights(file, read_model_config(file))
