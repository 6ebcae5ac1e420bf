import json
import shutil

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import CONFIG_JSON, TOKENS, random_tensors, write_folder, write_gguf

from fly_jax.decode.checkpoints.load import load_model
from fly_jax.decode.checkpoints.weights import EMBEDDING, HEAD
from fly_jax.decode.decoder_config import FactorRope, LinearRope, Llama3Rope
from fly_jax.decode.generate import Generator
from fly_jax.decode.model import DecoderConfig
from fly_jax.errors import UserError

QWEN3_JSON = CONFIG_JSON | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
CONFIG_JSONS = {
    "llama": CONFIG_JSON,
    "qwen2": CONFIG_JSON | {"model_type": "qwen2"},
    "qwen3": QWEN3_JSON,
}
LLAMA = DecoderConfig.from_hf(CONFIG_JSON)
LLAMA_TENSORS = random_tensors(LLAMA)


def assert_holds(decoder, tensors):
    """Every weight is where it belongs, in [in, out] layout."""
    np.testing.assert_array_equal(decoder.embedding[...], tensors["model.embed_tokens.weight"].T)
    np.testing.assert_array_equal(decoder.final_norm[...], tensors["model.norm.weight"])
    if decoder.head is None:
        assert "lm_head.weight" not in tensors
    else:
        np.testing.assert_array_equal(decoder.head[...], tensors["lm_head.weight"].T)
    for i, layer in enumerate(decoder.layers):
        w = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in tensors.items()}
        qkv = np.concatenate([w[f"self_attn.{name}_proj.weight"] for name in "qkv"])
        gate_up = np.concatenate([w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]])
        np.testing.assert_array_equal(layer.qkv[...], qkv.T)
        np.testing.assert_array_equal(layer.gate_up[...], gate_up.T)
        np.testing.assert_array_equal(layer.attention_output[...], w["self_attn.o_proj.weight"].T)
        np.testing.assert_array_equal(layer.down[...], w["mlp.down_proj.weight"].T)
        np.testing.assert_array_equal(layer.attention_norm[...], w["input_layernorm.weight"])
        np.testing.assert_array_equal(layer.mlp_norm[...], w["post_attention_layernorm.weight"])
        if layer.qkv_bias is not None:
            bias = np.concatenate([w[f"self_attn.{name}_proj.bias"] for name in "qkv"])
            np.testing.assert_array_equal(layer.qkv_bias[...], bias)
        if layer.query_norm is not None:
            np.testing.assert_array_equal(layer.query_norm[...], w["self_attn.q_norm.weight"])
            np.testing.assert_array_equal(layer.key_norm[...], w["self_attn.k_norm.weight"])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", CONFIG_JSONS)
def test_folder(kind, shards, tmp_path):
    config = DecoderConfig.from_hf(CONFIG_JSONS[kind])
    tensors = random_tensors(config)
    write_folder(tmp_path, CONFIG_JSONS[kind], tensors, shards)
    progress = []
    loaded = load_model(tmp_path, progress=lambda stage, fraction: progress.append(fraction))
    assert loaded.config == loaded.decoder.config == config
    assert loaded.name == tmp_path.name
    assert loaded.tokenizer.vocab_size == len(TOKENS)
    assert_holds(loaded.decoder, tensors)
    assert progress == sorted(progress)
    assert progress[-1] == 1.0


@pytest.mark.parametrize("kind", CONFIG_JSONS)
def test_gguf(kind, tmp_path):
    config = DecoderConfig.from_hf(CONFIG_JSONS[kind])
    tensors = random_tensors(config)
    write_gguf(tmp_path / "m.gguf", config, tensors, kind, fields={"general.name": "Tiny"}.items())
    loaded = load_model(str(tmp_path / "m.gguf"))
    assert loaded.config.rms_norm_eps == pytest.approx(config.rms_norm_eps)
    assert loaded.name == "Tiny"
    assert_holds(loaded.decoder, tensors)


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1", "BF16", "F16"])
def test_quantized_gguf(quantization, tmp_path):
    kind = gguf.GGMLQuantizationType[quantization]
    write_gguf(tmp_path / "m.gguf", LLAMA, LLAMA_TENSORS, quantization=kind)
    loaded = load_model(tmp_path / "m.gguf").decoder
    expected = LLAMA_TENSORS["model.layers.1.self_attn.o_proj.weight"]
    expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
    np.testing.assert_array_equal(loaded.layers[1].attention_output[...], expected.T)


@pytest.mark.parametrize("stored", [np.float16, jnp.bfloat16, np.float64])
def test_folders_of_other_precision(stored, tmp_path):
    tensors = {name: tensor.astype(stored) for name, tensor in LLAMA_TENSORS.items()}
    write_folder(tmp_path, CONFIG_JSON, tensors)
    assert_holds(load_model(tmp_path).decoder, {name: t.astype(np.float32) for name, t in tensors.items()})


def test_bfloat16_in_memory(tmp_path):
    write_folder(tmp_path, CONFIG_JSON, LLAMA_TENSORS)
    decoder = load_model(tmp_path, dtype=jnp.bfloat16).decoder
    assert decoder.embedding[...].dtype == decoder.layers[0].qkv[...].dtype == jnp.bfloat16
    assert decoder.layers[0].mlp_norm[...].dtype == decoder.final_norm[...].dtype == jnp.float32


def test_tied_folder_may_repeat_the_head(tmp_path):
    config_json = CONFIG_JSON | {"tie_word_embeddings": True}
    tensors = LLAMA_TENSORS | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    tensors[HEAD] = tensors[EMBEDDING]
    write_folder(tmp_path, config_json, tensors)
    assert load_model(tmp_path).decoder.head is None


def test_a_head_that_differs_is_used_whatever_the_config_says(tmp_path, caplog):
    write_folder(tmp_path, CONFIG_JSON | {"tie_word_embeddings": True}, LLAMA_TENSORS)
    loaded = load_model(tmp_path)
    assert not loaded.config.tie_word_embeddings
    assert_holds(loaded.decoder, LLAMA_TENSORS)
    assert "the checkpoint has a head that differs: it is used" in caplog.text


@pytest.mark.parametrize("stored", [EMBEDDING, HEAD])
def test_the_one_matrix_of_a_tied_model_is_found_under_either_name(stored, tmp_path, caplog):
    tensors = dict(LLAMA_TENSORS)
    matrix = tensors.pop(EMBEDDING)
    del tensors[HEAD]
    write_folder(tmp_path, CONFIG_JSON | {"tie_word_embeddings": True}, tensors | {stored: matrix})
    decoder = load_model(tmp_path).decoder
    assert decoder.head is None
    np.testing.assert_array_equal(decoder.embedding[...], matrix.T)
    assert not caplog.records


def test_a_checkpoint_of_the_bare_model_leaves_out_the_prefix(tmp_path):
    bare = {name.removeprefix("model."): tensor for name, tensor in LLAMA_TENSORS.items()}
    write_folder(tmp_path, CONFIG_JSON, bare)
    assert_holds(load_model(tmp_path).decoder, LLAMA_TENSORS)


def test_a_gguf_file_and_a_folder_of_one_checkpoint_have_the_same_head(tmp_path):
    write_gguf(tmp_path / "m.gguf", LLAMA, LLAMA_TENSORS)
    write_folder(tmp_path, CONFIG_JSON | {"tie_word_embeddings": True}, LLAMA_TENSORS)
    folder, file = (load_model(path).decoder for path in (tmp_path, tmp_path / "m.gguf"))
    np.testing.assert_array_equal(folder.head[...], file.head[...])


@pytest.mark.parametrize("part", [1, 2])
def test_split_gguf(part, tmp_path):
    write_gguf(tmp_path / "m.gguf", LLAMA, LLAMA_TENSORS, split_max_tensors=12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert_holds(load_model(tmp_path / f"m-0000{part}-of-00002.gguf").decoder, LLAMA_TENSORS)


def test_split_gguf_that_is_not_whole(tmp_path):
    write_gguf(tmp_path / "m.gguf", LLAMA, LLAMA_TENSORS, split_max_tensors=12)
    first, second = sorted(tmp_path.iterdir())
    shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(UserError, match=r"renamed.gguf is one of 2 parts .* must end in -00001-of-00002.gguf"):
        load_model(tmp_path / "renamed.gguf")
    second.unlink()
    with pytest.raises(UserError, match=r"one of 2 parts of a model: m-00002-of-00002.gguf must lie beside it"):
        load_model(first)
    shutil.copy(first, second)
    with pytest.raises(UserError, match=r"The 2 parts of .* hold 24 tensors, not 21"):
        load_model(first)


def test_gguf_rope_scaling(tmp_path):
    factors = np.linspace(1, 8, 4, dtype=np.float32)
    write_gguf(tmp_path / "f.gguf", LLAMA, LLAMA_TENSORS, extra={"rope_freqs.weight": factors}.items())
    config = load_model(tmp_path / "f.gguf").config
    assert config.rope_scaling == FactorRope(tuple(factors.tolist()))
    np.testing.assert_allclose(config.rope_frequencies(), LLAMA.rope_frequencies() / factors, rtol=1e-6)
    fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "l.gguf", LLAMA, LLAMA_TENSORS, fields=fields.items())
    assert load_model(tmp_path / "l.gguf").config.rope_scaling == LinearRope(4.0)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rope_in_config_json(spelling):
    kind_name = "type" if spelling == "rope_scaling" else "rope_type"
    linear = DecoderConfig.from_hf(CONFIG_JSON | {spelling: {kind_name: "linear", "factor": 2}})
    assert linear.rope_scaling == LinearRope(2.0)
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    llama3 = DecoderConfig.from_hf(CONFIG_JSON | {spelling: {"rope_type": "llama3", "rope_theta": 5e5, **values}})
    assert llama3.rope_scaling == Llama3Rope(**values)
    assert llama3.rope_theta == 5e5
    plain = DecoderConfig.from_hf(CONFIG_JSON | {"rope_theta": 5e5}).rope_frequencies()
    # Wavelengths of 6.3, 170, 4500 and 120000 positions: the first is kept, those beyond 64 are divided.
    np.testing.assert_allclose(llama3.rope_frequencies(), plain / [1, 8, 8, 8], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported: this decoder runs llama, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: this decoder computes 'silu' only"),
        ({"quantization_config": {"bits": 4}}, "quantized Hugging Face folders are not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a number, got None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"hidden_size": None}, "hidden_size must be an integer, got None"),
        ({"vocab_size": "many"}, "vocab_size must be an integer, got 'many'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be positive, got 0"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    ],
)
def test_bad_config_json(change, message):
    with pytest.raises(UserError, match=message):
        DecoderConfig.from_hf(CONFIG_JSON | change)


def _without(name):
    return {key: tensor for key, tensor in LLAMA_TENSORS.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (_without("model.norm.weight"), "lacks model.norm.weight: it is incomplete"),
        (_without("lm_head.weight"), "lacks lm_head.weight"),
        ({"other": np.ones(1, np.float32)}, "lacks model.embed_tokens.weight, .* and 18 more tensors"),
        (LLAMA_TENSORS | {"model.layers.0.mlp.up_proj.bias": np.ones(48, np.float32)}, "has .*up_proj.bias, which"),
        (
            LLAMA_TENSORS | {"model.norm.weight": np.ones(33, np.float32)},
            r"norm.weight has shape \[33\], but .* \[32\]",
        ),
        (LLAMA_TENSORS | {"model.norm.weight": np.ones(32, np.int8)}, "norm.weight is stored as I8"),
    ],
)
def test_bad_tensors(tensors, message, tmp_path):
    write_folder(tmp_path, CONFIG_JSON, tensors)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


def _remove(name):
    return lambda folder: (folder / name).unlink()


def _replace(name, text):
    return lambda folder: (folder / name).write_text(text)


def _duplicate(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    save_file(LLAMA_TENSORS, folder / "model-0.safetensors")
    assert "model-1.safetensors" in index["weight_map"].values()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove("config.json"), "config.json is missing"),
        (_replace("config.json", "{"), "config.json is not readable JSON"),
        (_replace("config.json", "[]"), "config.json must hold a JSON object, got list"),
        (_remove("model.safetensors.index.json"), "has neither model.safetensors nor"),
        (_replace("model.safetensors.index.json", "{}"), "has no weight_map"),
        (_remove("model-1.safetensors"), "model-1.safetensors, named in model.safetensors.index.json, is missing"),
        (_replace("model-1.safetensors", "nonsense"), "model-1.safetensors is not a readable safetensors file"),
        (_duplicate, "is in model-0.safetensors and in model-1.safetensors"),
        (_remove("tokenizer.json"), "tokenizer.json is missing"),
        (_replace("tokenizer.json", "{}"), "tokenizer.json is not a readable tokenizer"),
    ],
)
def test_damaged_folders(damage, message, tmp_path):
    write_folder(tmp_path, CONFIG_JSON, LLAMA_TENSORS, shards=2)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path, caplog):
    config_json = CONFIG_JSON | {"vocab_size": len(TOKENS) - 1}
    write_folder(tmp_path, config_json, random_tensors(DecoderConfig.from_hf(config_json)))
    loaded = load_model(tmp_path)
    assert f"the tokenizer has {len(TOKENS)} tokens but the model {len(TOKENS) - 1}: a prompt" in caplog.text
    decoding = Generator(loaded.decoder, max_model_len=16)
    assert len(decoding.generate(loaded.tokenizer.encode("hello"), max_tokens=2).token_ids) == 2
    with pytest.raises(UserError, match=f"has the token id {len(TOKENS) - 1}, but the model has only"):
        decoding.generate([1, len(TOKENS) - 1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drop": ["blk.1.ffn_up.weight"]}, "lacks model.layers.1.mlp.up_proj.weight"),
        ({"drop": ["token_embd.weight"]}, "lacks token_embd.weight"),
        ({"drop": ["llama.block_count"]}, "lacks the field llama.block_count"),
        ({"drop": ["tokenizer.ggml.merges"]}, "lacks the field tokenizer.ggml.merges"),
        ({"drop": ["tokenizer.ggml.eos_token_id", "tokenizer.chat_template"]}, "names no eos_token_id"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(32, np.float32)}.items()}, "has .*q_proj.bias, which this decoder"),
        ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}.items()}, "rope_freqs must have head_dim / 2 = 4"),
        ({"fields": {"llama.block_count": 3}.items()}, "lacks model.layers.2.input_layernorm.weight, .* and 6 more"),
        ({"fields": {"llama.attention.value_length": 4}.items()}, "attention.value_length=4 is not supported"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}.items()}, "rope.scaling.type='yarn' is not supported"),
        ({"fields": {"llama.expert_count": 8}.items()}, "expert_count=8 is not supported"),
        ({"fields": {"tokenizer.ggml.bos_token_id": 10**6}.items()}, "bos_token_id=1000000 is not below"),
        ({"fields": {"tokenizer.ggml.add_bos_token": True}.items()}, "asks to add its bos_token .* does not name it"),
        ({"fields": {"tokenizer.ggml.merges": ["x qq"]}.items()}, "holds an inconsistent vocabulary"),
        (
            {"fields": {"llama.attention.head_count_kv": [2, 1]}.items()},
            r"must be one integer for all layers, got \[2, 1\]",
        ),
        ({"fields": {"llama.attention.head_count": 0}.items()}, "num_heads must be a positive integer, got 0"),
        ({"fields": {"tokenizer.ggml.token_type": [1, 1]}.items()}, "tokens but 2 token types"),
        ({"extra": {"rope_freqs.weight": np.zeros(4, np.float32)}.items()}, "must give positive, finite frequencies"),
        ({"architecture": "gpt2"}, "holds the architecture 'gpt2': this decoder runs llama, qwen2, qwen3"),
    ],
)
def test_bad_gguf(arguments, message, tmp_path):
    write_gguf(tmp_path / "m.gguf", LLAMA, LLAMA_TENSORS, **arguments)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.1, 0.2, 0.5, 0.99])
def test_cut_off_gguf(fraction, tmp_path):
    write_gguf(tmp_path / "m.gguf", LLAMA, LLAMA_TENSORS)
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(UserError, match=r"m.gguf is not a readable GGUF file"):
        load_model(tmp_path / "m.gguf")


def test_damaged_text_in_gguf(tmp_path):
    write_gguf(tmp_path / "m.gguf", LLAMA, LLAMA_TENSORS)
    content = (tmp_path / "m.gguf").read_bytes().replace(b"<|im_start|>", b"<|im_star\xff|>", 1)
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"m.gguf is not a readable GGUF file .*utf-8"):
        load_model(tmp_path / "m.gguf")


def test_bad_paths(tmp_path):
    with pytest.raises(UserError, match=r"nothing.gguf is not a file"):
        load_model(tmp_path / "nothing.gguf")
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"model.bin is neither a .gguf file nor a folder"):
        load_model(tmp_path / "model.bin")
    shutil.copy(tmp_path / "model.bin", tmp_path / "zip.gguf")
    with pytest.raises(UserError, match=r"zip.gguf is not a readable GGUF file"):
        load_model(tmp_path / "zip.gguf")
    with pytest.raises(UserError, match="dtype must be float32 or bfloat16, got float16"):
        load_model(tmp_path, dtype=jnp.float16)
