"""Logits, token ids and chat texts against transformers, in float32 on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import smollm2 as real_model
from flax import nnx
from tiny_models import TOKENS, write_tokenizer

from fly_jax.decode.checkpoints.default import MODEL_NAME, default_model_path
from fly_jax.decode.checkpoints.load import load_model
from fly_jax.decode.model import KVCache

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_head_dim": ("llama", {"head_dim": 24}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
}


def torch_logits(model, token_ids):
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(token_ids, np.int64))).logits.float().numpy()


def jax_logits(decoder, token_ids, prompt_length):
    """A prompt in one step, then steps of up to 9 tokens."""
    graphdef, state = nnx.split(decoder)
    step = jax.jit(lambda state, token_ids, cache: nnx.merge(graphdef, state)(token_ids, cache))
    batch_size, num_tokens = token_ids.shape
    cache = KVCache.zeros(decoder.config, batch_size, num_tokens)
    starts = [0, *range(prompt_length, num_tokens, 9)]
    logits = []
    for start, stop in zip(starts, [*starts[1:], num_tokens], strict=True):
        piece, cache = step(state, jnp.asarray(token_ids[:, start:stop], jnp.int32), cache)
        cache = cache.advance(jnp.full(batch_size, stop - start, jnp.int32))
        logits.append(np.asarray(piece))
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("case", CASES)
def test_random_models(case, tmp_path, report):
    model_type, overrides = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        # Norms and biases start at constants: a loader that dropped them would not be noticed.
        scale = 0.3 if parameter.ndim == 1 else 0.15
        parameter.data = (parameter.data if "norm" in name else 0.0) + scale * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    decoder = load_model(tmp_path).decoder
    token_ids = np.random.default_rng(1).integers(0, SMALL["vocab_size"], (2, 300))
    expected, actual = torch_logits(model, token_ids), jax_logits(decoder, token_ids, prompt_length=280)
    error = np.abs(actual - expected).max()
    report(f"max abs difference {error:.1e}, logits' standard deviation {expected.std():.2f}")
    assert error < 2e-4
    assert (actual.argmax(-1) == expected.argmax(-1)).mean() == 1.0


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_folders(name, tmp_path):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, name)).eval()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    write_tokenizer(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    token_ids = np.random.default_rng(1).integers(0, SMALL["vocab_size"], (1, 50))
    actual = jax_logits(load_model(tmp_path).decoder, token_ids, prompt_length=41)
    np.testing.assert_allclose(actual, torch_logits(model.float(), token_ids), atol=1e-5)


TEXT = (
    "Speculative decoding lets a small model propose several tokens, which the large model then checks in one "
    "pass. def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
    "Schöne Grüße aus 東京 🗼, it's 3.14159 o'clock!  They'll've paid $1,234.56 for the 2nd one.\n\n\t\tEnd."
)
MESSAGES = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Hi <|im_end|> there"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": TEXT},
    ],
]


@pytest.fixture(scope="module")
def smollm2():
    return real_model.loaded()


@pytest.fixture(scope="module")
def transformers_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(default_model_path().parent, gguf_file=MODEL_NAME)


@pytest.mark.model
def test_smollm2_logits(smollm2, report):
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        default_model_path().parent, gguf_file=MODEL_NAME, dtype=torch.float32
    ).eval()
    text = smollm2.tokenizer.apply_chat_template(MESSAGES[1])
    token_ids = np.asarray([smollm2.tokenizer.encode(text)])
    expected = torch_logits(reference, token_ids)
    actual = jax_logits(smollm2.decoder, token_ids, prompt_length=100)
    error = np.abs(actual - expected).max()
    report(f"{token_ids.size} tokens, max abs difference {error:.1e}, logits' std {expected.std():.2f}")
    assert error < 1e-3
    assert (actual.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.model
@pytest.mark.parametrize("text", [*TEXT.split(". "), TEXT, "<|im_start|>user\nHi<|im_end|>\n", "", "naïve \u200b x²"])
def test_smollm2_token_ids(smollm2, transformers_tokenizer, text):
    token_ids = smollm2.tokenizer.encode(text)
    assert token_ids == transformers_tokenizer(text)["input_ids"]
    decoded = smollm2.tokenizer.decode(token_ids, skip_special_tokens=False)
    assert decoded == transformers_tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.model
@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_smollm2_chat_template(smollm2, transformers_tokenizer, messages, add_generation_prompt):
    expected = transformers_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt) == expected
