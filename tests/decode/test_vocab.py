"""Drafts from a model of another vocabulary: the mapping, and decoding with it."""

import dataclasses
import functools
import logging
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_tokenizers
import smollm2

from fly_jax.cli import app as cli
from fly_jax.cli import generate as command
from fly_jax.config import SamplingParams
from fly_jax.decode.checkpoints.load import load_model
from fly_jax.decode.decoder_config import DecoderConfig
from fly_jax.decode.drafters import DraftContext, DraftModel, check_drafter, empty_draft
from fly_jax.decode.generate import Generator
from fly_jax.decode.model import Decoder, DecoderWeights, KVCache, LayerWeights, random_decoder
from fly_jax.decode.prepare import vocab_mapping_of
from fly_jax.decode.prompts import BUILTIN_PROMPTS
from fly_jax.decode.vocab import VocabMapping, Vocabulary
from fly_jax.errors import UserError
from fly_jax.noise import request_keys

K = 3
KINDS = {
    "byte-level": (small_tokenizers.byte_level, "<|endoftext|>"),
    "bpe": (small_tokenizers.sentencepiece_bpe, "<unk>"),
    "unigram": (small_tokenizers.sentencepiece_unigram, "<unk>"),
}


@functools.cache
def trained(kind):
    """A vocabulary whose model has five columns more than the tokenizer has tokens."""
    make, unknown = KINDS[kind]
    tokenizer = make()
    unk_token_id = tokenizer.token_to_id(unknown)
    return Vocabulary.from_tokenizer(tokenizer, size=tokenizer.get_vocab_size() + 5, unk_token_id=unk_token_id)


TARGET = trained("byte-level")
CONFIG = DecoderConfig(
    vocab_size=TARGET.size,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=128,
)
DECODER = random_decoder(CONFIG, jax.random.key(1))
TEXTS = ("The old museum of the city, and the rain over " * 5, "T", "a café, 123 metres wide")


def text_of(token):
    """As every tokenizer trained here means it: their alphabets hold the other family's marker nowhere."""
    return " " + token[1:] if token[0] in "Ġ▁" else token


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("draft", KINDS)
def test_tokens_of_the_same_text_are_mapped_and_others_are_unknown(target, draft):
    target, draft = trained(target), trained(draft)
    mapping = VocabMapping.between(target, draft)
    target_ids = {text_of(token): token_id for token, token_id in target.token_ids.items()}
    draft_ids = {text_of(token): token_id for token, token_id in draft.token_ids.items()}
    assert (mapping.target_vocab_size, mapping.draft_vocab_size) == (target.size, draft.size)
    assert mapping.num_common_tokens == len(target_ids.keys() & draft_ids.keys()) > 50
    to_target = np.full(draft.size, target.unk_token_id)
    to_draft = np.full(target.size, draft.unk_token_id)
    for text in target_ids.keys() & draft_ids.keys():
        to_target[draft_ids[text]], to_draft[target_ids[text]] = target_ids[text], draft_ids[text]
    every_target, every_draft = (jnp.arange(each.size, dtype=jnp.int32)[None] for each in (target, draft))
    np.testing.assert_array_equal(mapping.map_target_to_draft_ids(every_target)[0], to_draft)
    np.testing.assert_array_equal(mapping.map_draft_to_target_ids(every_draft)[0], to_target)
    common = mapping.constrain_draft_logits(jnp.zeros((2, draft.size), jnp.float32)) == 0
    wanted = [draft_ids[text] for text in target_ids.keys() & draft_ids.keys()]
    np.testing.assert_array_equal(np.flatnonzero(common[1]), sorted(wanted))
    assert target_ids[" the"] == mapping.draft_to_target[draft_ids[" the"]]


@pytest.mark.parametrize(
    ("make", "markers"),
    [
        (small_tokenizers.byte_level, ("Ġ",)),
        (small_tokenizers.sentencepiece_unigram, ("▁",)),
        (small_tokenizers.sentencepiece_bpe, ("Ġ", "▁")),  # " a" is two tokens
        (lambda: small_tokenizers.words(["a", "the"]), ("Ġ", "▁")),  # no marker
        (lambda: small_tokenizers.words(["the"]), ("Ġ", "▁")),  # "a" cannot be encoded at all
    ],
)
def test_the_space_marker_is_what_the_tokenizer_shows(make, markers):
    assert Vocabulary.from_tokenizer(make(), size=500).space_markers == markers


def test_of_tokens_of_equal_text_the_lowest_id_counts():
    both = Vocabulary({"▁a": 3, "Ġa": 1, "b": 0}, 4, unk_token_id=2)
    mapping = VocabMapping.between(both, Vocabulary({"Ġa": 0, "b": 5, "c": 1}, 4, unk_token_id=1))
    assert mapping.draft_to_target.tolist() == [1, 2, 2, 2]
    assert mapping.target_to_draft.tolist() == [1, 0, 1, 1]  # b of the draft lies beyond its logits
    assert mapping.num_common_tokens == 1


def test_few_common_tokens_and_a_missing_unknown_token_are_said(caplog):
    names = [f"w{i}" for i in range(120)]
    target = Vocabulary({name: i for i, name in enumerate(names)}, 120, unk_token_id=0)
    with caplog.at_level(logging.WARNING, logger="fly_jax"):
        VocabMapping.between(target, dataclasses.replace(target, size=100, unk_token_id=7))
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING, logger="fly_jax"):
        mapping = VocabMapping.between(target, dataclasses.replace(target, size=99, unk_token_id=None, eos_token_id=5))
    assert mapping.target_to_draft[98:101].tolist() == [98, 5, 5]
    assert caplog.messages == [
        "The draft's tokenizer names no unknown token: its end token 5 stands for tokens that the other model lacks.",
        "The vocabularies have only 99 tokens in common (target 120, draft 99): few drafts can be accepted.",
    ]


def test_vocabularies_that_cannot_be_mapped_are_refused():
    target = Vocabulary({"a": 0, "b": 1}, 2, unk_token_id=0)
    with pytest.raises(ValueError, match="draft's vocabulary has neither unk_token_id nor eos_token_id"):
        VocabMapping.between(target, Vocabulary({"a": 0}, 1))
    with pytest.raises(ValueError, match=r"target's unknown token must be in \[0, 2\), got 2"):
        VocabMapping.between(dataclasses.replace(target, unk_token_id=2), target)
    with pytest.raises(ValueError, match="of 1 tokens has none in common with the target's of 2"):
        VocabMapping.between(target, Vocabulary({"c": 0}, 1, unk_token_id=0))


def test_the_same_tokens_are_seen_one_by_one():
    assert trained("bpe").same_tokens(dataclasses.replace(trained("bpe"), token_ids=dict(trained("bpe").token_ids)))
    swapped = {**TARGET.token_ids, "a": TARGET.token_ids["b"], "b": TARGET.token_ids["a"]}
    assert not TARGET.same_tokens(dataclasses.replace(TARGET, token_ids=swapped))
    assert TARGET.same_tokens(dataclasses.replace(TARGET, size=TARGET.size + 1))
    assert not TARGET.same_tokens(dataclasses.replace(TARGET, size=max(TARGET.token_ids.values())))


def with_weights_of(decoder, target, draft):
    """A drafter of the vocabulary `draft` that is `decoder` in every token common with `target`, and zero elsewhere."""
    mapping = VocabMapping.between(target, draft)

    def columns(matrix):
        return jnp.where(mapping.is_common[None], matrix[...][:, mapping.draft_to_target], 0)

    layers = tuple(
        LayerWeights(**{name: _array(getattr(layer, name)) for name in LayerWeights.__dataclass_fields__})
        for layer in decoder.layers
    )
    head = None if decoder.head is None else columns(decoder.head)
    weights = DecoderWeights(columns(decoder.embedding), layers, decoder.final_norm[...], head)
    config = dataclasses.replace(decoder.config, vocab_size=draft.size)
    return DraftModel(Decoder(config, weights), K, vocab_mapping=mapping)


def _array(parameter):
    return None if parameter is None else parameter[...]


def shuffled(vocabulary):
    """The same tokens under other numbers, as another family writes them, and eight columns more."""
    size = vocabulary.size + 8
    order = np.random.default_rng(0).permutation(size).tolist()
    token_ids = {re.sub("^Ġ", "▁", token): order[token_id] for token, token_id in vocabulary.token_ids.items()}
    return Vocabulary(token_ids, size, unk_token_id=order[0])


@pytest.fixture(scope="module")
def drafter():
    """Of another vocabulary, with the target's weights where it can."""
    return with_weights_of(DECODER, TARGET, trained("bpe"))


@jax.jit
def all_logits(decoder, token_ids):
    return decoder(token_ids, KVCache.zeros(decoder.config, *token_ids.shape))[0]


def test_drafts_are_the_best_common_tokens_after_what_the_draft_model_reads(drafter):
    lengths, capacity = np.asarray([12, 1, 5]), 16
    history = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, capacity), np.int32)

    @jax.jit
    def propose(drafter, history, lengths):
        context = DraftContext(
            DECODER, KVCache.zeros(CONFIG, 1, 1), history, lengths, request_keys(jax.random.key(0), 3), SamplingParams()
        )
        state = drafter.prefill(drafter.init_state(3, capacity), history, lengths - 1)
        return drafter.propose(state, context)[0]

    mapping, rows = drafter.vocab_mapping, np.arange(3)
    read = np.asarray(mapping.target_to_draft)[history]
    assert (read == trained("bpe").unk_token_id).any()
    for step in range(K):
        logits = np.asarray(all_logits(drafter.decoder, read))[rows, lengths + step - 1]
        read[rows, lengths + step] = np.where(mapping.is_common, logits, -np.inf).argmax(1)
    expected = [np.asarray(mapping.draft_to_target)[read[b, n : n + K]] for b, n in enumerate(lengths)]
    draft = propose(drafter, history, jnp.asarray(lengths, jnp.int32))
    np.testing.assert_array_equal(draft.token_ids, expected)
    assert draft.num_draft_tokens.tolist() == [K] * 3


def test_decoding_with_two_tokenizers_gives_the_targets_text(drafter):
    tokenizer = small_tokenizers.byte_level()
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    texts = Generator(DECODER, drafter=drafter, max_model_len=100).generate_batch(prompts, max_tokens=(16, 30, 12))
    whole = np.zeros((len(prompts), 100), np.int32)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        whole[i, : len(prompt) + len(text.token_ids)] = [*prompt, *text.token_ids]
    choices = np.asarray(all_logits(DECODER, whole)).argmax(2)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        start = len(prompt) - 1
        assert list(text.token_ids) == choices[i, start : start + len(text.token_ids)].tolist()
    accepted, drafted = (
        sum(int(getattr(each.counts, name)) for each in texts) for name in ("num_accepted", "num_draft_tokens")
    )
    assert 0 < accepted < drafted


def test_drafts_come_without_probabilities_whatever_the_target_draws(drafter):
    assert empty_draft(drafter, 1, CONFIG.vocab_size, SamplingParams(temperature=1.0)).draft_probs is None


def test_a_drafter_that_does_not_fit_is_refused(drafter):
    with pytest.raises(UserError, match=r"another vocabulary drafts greedily only, got .* 'probabilistic'"):
        dataclasses.replace(drafter, draft_sample_method="probabilistic")
    with pytest.raises(UserError, match=r"has 303 tokens and the target's 425; .* vocab_mapping .*, got none"):
        check_drafter(dataclasses.replace(drafter, vocab_mapping=None), DECODER)
    with pytest.raises(UserError, match=r"has 425 tokens and the target's 425; .* got one between 303 and 425"):
        check_drafter(dataclasses.replace(drafter, decoder=DECODER), DECODER)


@pytest.mark.parametrize("num_more", [-3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_tokens_with_other_padding_draft_probabilistically(num_more, report):
    """The draft model is the target with more or fewer padding columns: every draft is accepted, also when drawn."""
    config = dataclasses.replace(CONFIG, vocab_size=CONFIG.vocab_size + num_more)

    def fit(matrix):
        return jnp.pad(matrix[...], ((0, 0), (0, max(num_more, 0))))[:, : config.vocab_size]

    layers = tuple(
        LayerWeights(**{name: _array(getattr(layer, name)) for name in LayerWeights.__dataclass_fields__})
        for layer in DECODER.layers
    )
    head = None if DECODER.head is None else fit(DECODER.head)
    draft = Decoder(config, DecoderWeights(fit(DECODER.embedding), layers, DECODER.final_norm[...], head))
    drafter = DraftModel(draft, K, "probabilistic", padded_apart=True)
    prompt = small_tokenizers.byte_level().encode(TEXTS[0]).ids
    sampling = SamplingParams(temperature=0.05)  # the five padding columns are never drawn
    result = Generator(DECODER, drafter=drafter, max_model_len=128).generate(prompt, max_tokens=20, sampling=sampling)
    rate = float(result.counts.acceptance_rate())
    report(f"acceptance rate {rate:.3f}")
    assert rate > 0.9
    with pytest.raises(UserError, match="they must be the same, or have a vocab_mapping"):
        check_drafter(dataclasses.replace(drafter, padded_apart=False), DECODER)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, ends = tmp_path_factory.mktemp("models"), {"eos_token": "</s>", "unk_token": "<unk>"}
    byte_level = small_tokenizers.byte_level()
    return {
        "target": small_tokenizers.write_model(root / "target", byte_level, 0, eos_token="<|endoftext|>"),
        "same": small_tokenizers.write_model(root / "same", byte_level, 1, eos_token="<|endoftext|>"),
        "bpe": small_tokenizers.write_model(root / "bpe", small_tokenizers.sentencepiece_bpe(), 2, **ends),
        "nothing": small_tokenizers.write_model(
            root / "nothing", small_tokenizers.words(["museums"]), 3, eos_token="museums"
        ),
    }


def test_models_of_one_vocabulary_are_not_mapped(folders):
    target, same, bpe = (load_model(folders[name]) for name in ("target", "same", "bpe"))
    assert vocab_mapping_of(target, same) is None
    mapping = vocab_mapping_of(target, bpe)
    assert mapping.num_common_tokens > 100
    # Tokens the target lacks become its end token: it has no unknown one.
    assert mapping.draft_to_target[bpe.tokenizer.tokenizer.token_to_id("<s>")] == 0


def run(monkeypatch, capsys, folders, draft, *arguments):
    options = ["--max-tokens", "12", "--num-speculative-tokens", "4", "--raw", "--prompt", "The old museum"]
    drafting = ["--drafter", "draft-model", "--draft-model", str(folders[draft])]
    argv = ["fly-jax", "generate", "--model", str(folders["target"]), *options, *drafting, *arguments]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return exit_info.value.code or 0, *capsys.readouterr()


def test_the_command_line_says_how_much_is_common(monkeypatch, capsys, folders):
    drafters = []
    monkeypatch.setattr(command, "prepare", lambda loaded, drafter, *_, **__: drafters.append(drafter) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, capsys, folders, "bpe")
    (drafter,) = drafters
    mapping = drafter.vocab_mapping
    sizes = f"target {mapping.target_vocab_size}, draft {mapping.draft_vocab_size}"
    assert f"vocabularies: {sizes}, {mapping.num_common_tokens} tokens in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("draft", "arguments", "message"),
    [
        ("bpe", ["--draft-sample-method", "probabilistic"], "drafts greedily only, got draft_sample_method"),
        ("nothing", [], "draft model nothing: the draft's vocabulary of 4 tokens has none in common"),
    ],
)
def test_what_cannot_be_mapped_is_one_line(monkeypatch, capsys, folders, draft, arguments, message):
    status, out, err = run(monkeypatch, capsys, folders, draft, *arguments)
    assert (status, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("fly-jax: error: ")]
    assert message in line


@pytest.mark.model
def test_smollm2_under_other_numbers_drafts_what_it_accepts(report):
    loaded = smollm2.loaded()
    target = loaded.tokenizer.vocabulary(loaded.config.vocab_size)
    drafter = with_weights_of(loaded.decoder, target, shuffled(target))
    token_ids = smollm2.prompt_of([{"role": "user", "content": BUILTIN_PROMPTS[-1].text}])
    standard = smollm2.generator(drafter).generate(token_ids, max_tokens=24)
    assert standard.token_ids == smollm2.target_only(token_ids, 24).token_ids
    report(f"{drafter.vocab_mapping.num_common_tokens} tokens in common, {standard.num_cycles} cycles")
    assert drafter.vocab_mapping.num_common_tokens == target.size
    assert float(standard.counts.acceptance_rate()) == 1.0


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_common_with_smollm2_decode_to_the_same_text(kind, report):
    loaded, draft = smollm2.loaded(), trained(kind)
    mapping = VocabMapping.between(loaded.tokenizer.vocabulary(loaded.config.vocab_size), draft)
    report(f"{mapping.num_common_tokens} tokens in common")
    assert mapping.num_common_tokens > 100
    is_common, to_target = mapping.is_common.tolist(), mapping.draft_to_target.tolist()
    for token, token_id in draft.token_ids.items():
        text = re.sub("[Ġ▁]", " ", token)
        if is_common[token_id] and text.isascii():
            assert loaded.tokenizer.decode([to_target[token_id]], skip_special_tokens=False) == text
