"""Log-likelihoods of given texts, against one plain forward pass over each."""

import jax
import numpy as np
import pytest

from fly_jax.decode import loglikelihood
from fly_jax.decode.loglikelihood import capacity, loglikelihood_batch
from fly_jax.decode.model import DecoderConfig, KVCache, random_decoder
from fly_jax.errors import UserError

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=300,
)
DECODER = random_decoder(CONFIG, jax.random.key(0))


def random_tokens(seed, length):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


@jax.jit
def all_logits(decoder, token_ids):
    return decoder(token_ids, KVCache.zeros(CONFIG, token_ids.shape[0], token_ids.shape[1]))[0]


def logits_of(token_ids):
    padded = np.zeros((1, 301), np.int32)
    padded[0, : len(token_ids)] = token_ids
    return np.asarray(all_logits(DECODER, padded))[0, : len(token_ids)].astype(np.float64)


def reference(context, continuation):
    logits = logits_of([*context, *continuation])[len(context) - 1 : -1]
    log_probs = logits - np.log(np.sum(np.exp(logits), 1, keepdims=True))
    value = sum(float(row[token_id]) for row, token_id in zip(log_probs, continuation, strict=True))
    return value, logits.argmax(1).tolist() == list(continuation)


def greedy_continuation(context, length):
    token_ids = list(context)
    for _ in range(length):
        token_ids.append(int(logits_of(token_ids)[-1].argmax()))
    return token_ids[len(context) :]


# Within a chunk, across chunks, at their borders, and up to the whole context of the model.
LENGTHS = [(1, 1), (5, 3), (64, 1), (63, 2), (65, 64), (130, 20), (1, 300), (300, 1), (10, 0)]


def test_it_equals_a_plain_forward_pass():
    texts = [(random_tokens(i, context), random_tokens(100 + i, rest)) for i, (context, rest) in enumerate(LENGTHS)]
    texts += [
        (context := random_tokens(50 + i, length), greedy_continuation(context, 6)) for i, length in [(0, 9), (1, 60)]
    ]
    got = loglikelihood_batch(DECODER, texts, batch_size=12)
    expected = [reference(*text) for text in texts]
    assert [each.is_greedy for each in got] == [greedy for _, greedy in expected]
    assert [each.is_greedy for each in got][-3:] == [True, True, True]  # an empty one, and the two of the model
    assert not all(each.is_greedy for each in got)
    np.testing.assert_allclose([each.value for each in got], [value for value, _ in expected], rtol=2e-5, atol=1e-5)


def test_a_text_does_not_depend_on_its_neighbours_and_nothing_recompiles():
    texts = [(random_tokens(i, 10 + 7 * i), random_tokens(10 + i, 5 + i)) for i in range(4)]
    together = loglikelihood_batch(DECODER, texts)
    compiled = loglikelihood._scoring_step._cache_size(), loglikelihood._step._cache_size()
    alone = [loglikelihood_batch(DECODER, [text], batch_size=4)[0] for text in texts]
    assert alone == together
    long = [(random_tokens(9, 200), random_tokens(8, 40))]
    assert loglikelihood_batch(DECODER, long, batch_size=4)[0].value == pytest.approx(reference(*long[0])[0], rel=2e-5)
    assert (loglikelihood._scoring_step._cache_size(), loglikelihood._step._cache_size() - 1) == compiled


def test_capacities_are_few():
    assert {capacity(length, 1000) for length in range(1, 1001)} == {256, 512, 1000}
    assert all(capacity(length, 1000) >= length for length in range(1, 1001))


@pytest.mark.parametrize(
    ("texts", "batch_size", "message"),
    [
        ([([], [1])], None, "Text 0 has no context"),
        ([([1], [2]), ([0] * 200, [1] * 102)], None, "Text 1 has 302 tokens; shorten it to at most 301"),
        ([([1], [2])] * 3, 2, "texts must be 1 to 2 (batch_size), got 3"),
        ([], None, "texts must be 1 to 1 (batch_size), got 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(texts, batch_size, message):
    with pytest.raises(UserError) as error:
        loglikelihood_batch(DECODER, texts, batch_size=batch_size)
    assert message in str(error.value)
