"""Mappings between vocabularies beside those of vLLM's own `VocabMapping`, id for id."""

import functools
import importlib.util
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_tokenizers

if "FLY_JAX_VLLM_SOURCE" not in os.environ:
    pytest.skip("FLY_JAX_VLLM_SOURCE is the folder that holds vLLM 0.33's vllm/", allow_module_level=True)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from fly_jax.decode.vocab import VocabMapping, Vocabulary  # noqa: E402

pytestmark = pytest.mark.vllm


def smollm2():
    from fly_jax.decode.checkpoints.default import default_model_path
    from fly_jax.decode.checkpoints.gguf import codec_from_gguf, open_gguf

    path = default_model_path()
    return codec_from_gguf(open_gguf(path)[1], path).tokenizer


# The tokenizer, its unknown token and its end of a text, and by how much the model is wider than the tokenizer.
TOKENIZERS = {
    "smollm2": (smollm2, "<|endoftext|>", "<|im_end|>", 0),
    "byte-level": (small_tokenizers.byte_level, None, "<|im_end|>", 7),
    "byte-level, narrow": (small_tokenizers.byte_level, "<|endoftext|>", None, -50),
    "other byte-level": (functools.partial(small_tokenizers.byte_level, 300, ("<unk>",)), "<unk>", None, 0),
    "bpe": (small_tokenizers.sentencepiece_bpe, "<unk>", "</s>", 3),
    "unigram": (small_tokenizers.sentencepiece_unigram, "<unk>", "</s>", 0),
    "words": (functools.partial(small_tokenizers.words, ["the", "museum", "and", "a"]), "museum", None, 1),
}


@functools.cache
def sides(name):
    """The same tokenizer for vLLM, which takes transformers', and for us."""
    make, unk_token, eos_token, wider = TOKENIZERS[name]
    tokenizer = make()
    size = tokenizer.get_vocab_size() + wider
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk_token, eos_token=eos_token)
    unk_token_id, eos_token_id = (
        None if token is None else tokenizer.token_to_id(token) for token in (unk_token, eos_token)
    )
    assert (theirs.unk_token_id, theirs.eos_token_id) == (unk_token_id, eos_token_id)
    ours = Vocabulary.from_tokenizer(tokenizer, size=size, unk_token_id=unk_token_id, eos_token_id=eos_token_id)
    return theirs, ours


def own_mapping(target, draft):
    # Not at the top: it turns Triton's interpreter on, and every test file is imported in every run.
    import own_vllm

    (their_target, our_target), (their_draft, our_draft) = sides(target), sides(draft)
    return own_vllm.VocabMapping(their_target, their_draft, our_target.size, our_draft.size, "cpu")


@pytest.mark.parametrize("target", TOKENIZERS)
@pytest.mark.parametrize("draft", TOKENIZERS)
def test_every_id_is_mapped_as_vllm_does(target, draft, report):
    theirs, ours = own_mapping(target, draft), VocabMapping.between(sides(target)[1], sides(draft)[1])
    report(f"{ours.num_common_tokens} tokens in common")
    assert ours.num_common_tokens == theirs.intersection_size > 0
    every_target, every_draft = np.arange(sides(target)[1].size), np.arange(sides(draft)[1].size)
    np.testing.assert_array_equal(
        ours.map_target_to_draft_ids(jnp.asarray(every_target, jnp.int32)),
        theirs.map_target_to_draft_ids(torch.from_numpy(every_target)),
    )
    np.testing.assert_array_equal(
        ours.map_draft_to_target_ids(jnp.asarray(every_draft, jnp.int32)),
        theirs.map_draft_to_target_ids(torch.from_numpy(every_draft)),
    )
    logits = np.random.default_rng(0).normal(0, 3, (4, len(every_draft))).astype(np.float32)
    np.testing.assert_array_equal(
        jax.jit(ours.constrain_draft_logits)(logits), theirs.constrain_draft_logits(torch.from_numpy(logits))
    )


def test_without_unknown_and_end_tokens_both_refuse():
    import own_vllm

    tokenizer = small_tokenizers.byte_level()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with pytest.raises(ValueError, match="has neither unk_token_id nor eos_token_id"):
        own_vllm.VocabMapping(theirs, sides("bpe")[0], 420, 300, "cpu")
    with pytest.raises(ValueError, match="has neither unk_token_id nor eos_token_id"):
        VocabMapping.between(Vocabulary.from_tokenizer(tokenizer, size=420), sides("bpe")[1])


@pytest.mark.parametrize(
    ("target", "draft"),
    [("byte-level", "byte-level"), ("byte-level", "bpe"), ("byte-level", "unigram"), ("bpe", "unigram")],
)
def test_both_warn_about_the_same(target, draft, caplog):
    def said(build, *words):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            build()
        return [[word in message for word in words] for message in caplog.messages]

    theirs = said(lambda: own_mapping(target, draft), "has no unk_token_id", "Very small vocabulary intersection")
    ours = said(lambda: VocabMapping.between(sides(target)[1], sides(draft)[1]), "no unknown token", "tokens in common")
    assert ours == theirs
    assert len(ours) == (target == "byte-level") + (draft == "byte-level") + (draft == "unigram")
