"""Tiny random models on disk: Hugging Face folders and GGUF files."""

import json

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from fly_jax.decode.checkpoints.weights import expected_shapes

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2"), ("12", "3"), ("Ġ", "Ġ")]
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = CONTROL_TOKENS + ALPHABET + ["".join(merge) for merge in MERGES]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CONFIG_JSON = {
    "model_type": "llama",
    "vocab_size": len(TOKENS) + 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_tensors(config, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in expected_shapes(config).items()}


def byte_level_tokenizer():
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return tokenizer


def write_tokenizer(folder, **tokenizer_config):
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE, **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_folder(folder, config_json, tensors, shards=1):
    (folder / "config.json").write_text(json.dumps(config_json))
    write_tokenizer(folder)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file_name in sorted(set(weight_map.values())):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file_name}, folder / file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _interleave(rows, num_heads):
    """llama.cpp's order of query and key rows: (pair, half) instead of (half, pair) within a head."""
    head_dim = rows.shape[0] // num_heads
    order = [head * head_dim + half * head_dim // 2 + pair
             for head in range(num_heads) for pair in range(head_dim // 2) for half in range(2)]  # fmt: skip
    return rows[order]


def write_gguf(
    path, config, tensors, architecture="llama", drop=(), fields=(), extra=(), quantization=None, split_max_tensors=0
):
    """Writes a model under llama.cpp's names. `fields` and `extra` add to the metadata and the tensors."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    values = {f"{architecture}.{name}": value for name, value in values.items()}
    values |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3 if token in CONTROL_TOKENS else 1 for token in TOKENS],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|endoftext|>"),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    values |= dict(fields)
    for name, value in values.items():
        if name not in drop:
            _add_field(writer, name, value)
    for name, values_ in {**_gguf_tensors(config, tensors, architecture), **dict(extra)}.items():
        if name in drop:
            continue
        if quantization is not None and values_.ndim == 2 and values_.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quantize(values_, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, values_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_field(writer, name, value):
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](name, value)


def _gguf_tensors(config, tensors, architecture):
    renamed = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        renamed["output.weight"] = tensors["lm_head.weight"]
    for name, values in tensors.items():
        if not name.startswith("model.layers."):
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        if architecture == "llama" and module == "self_attn.q_proj":
            values = _interleave(values, config.num_heads)
        if architecture == "llama" and module == "self_attn.k_proj":
            values = _interleave(values, config.num_kv_heads)
        renamed[f"blk.{layer}.{GGUF_LAYER_NAMES[module]}.{kind}"] = values
    return renamed
