"""What the target thinks of given texts: teacher-forced log-probabilities, a batch of texts at a time.

In the shape descriptions, `B` denotes texts, `T` the tokens of a step and `L` the capacity of the cache.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fly_jax.decode.drafters import empty_cache
from fly_jax.decode.model import Decoder, KVCache
from fly_jax.errors import UserError

CHUNK = 64
"""Tokens a step: texts of any length share its compilations."""

SHORTEST_CAPACITY = 256
"""Tokens of the smallest cache. It grows by doubling, because each capacity is compiled for."""


@dataclasses.dataclass(frozen=True)
class Loglikelihood:
    """What the target thinks of a continuation.

    Attributes:
      value: nats, at most 0: the sum of the log-probabilities of its tokens, each after the tokens before it.
      is_greedy: whether each of them is the target's first choice, lowest index on ties.
    """

    value: float
    is_greedy: bool


def capacity(num_tokens: int, most: int) -> int:
    """Room for `num_tokens` in one of few sizes, `most` at the largest: compiled once for texts of similar length."""
    size = SHORTEST_CAPACITY
    while size < num_tokens:
        size *= 2
    return min(size, most)


def loglikelihood_batch(
    decoder: Decoder,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int | None = None,
) -> list[Loglikelihood]:
    """The log-likelihoods of continuations, each after its own context.

    Args:
      decoder: the target.
      texts: token ids of each context, at least one, and of its continuation, which may be empty.
      batch_size: rows to compile for; with fewer texts the rest is padding. None: the number of texts.

    Returns:
      One for each text, in their order.

    Raises:
      UserError: a text has no context, or more tokens (without its last, which is only predicted) than the target's
        context; or there are more texts than `batch_size`.
    """
    size = len(texts) if batch_size is None else batch_size
    if not 1 <= len(texts) <= size:
        raise UserError(f"texts must be 1 to {max(size, 1)} (batch_size), got {len(texts)}.")
    most = decoder.config.max_position_embeddings
    lengths = np.zeros(size, np.int32)
    for i, (context, continuation) in enumerate(texts):
        # The last token is predicted, never fed.
        lengths[i] = len(context) + len(continuation) - 1
        if not context:
            raise UserError(f"Text {i} has no context: begin it with a token, such as the model's own first one.")
        if lengths[i] > most:
            raise UserError(f"Text {i} has {lengths[i] + 1} tokens; shorten it to at most {most + 1}.")
    num_chunks = -(-int(lengths.max()) // CHUNK)
    token_ids = np.zeros((size, num_chunks * CHUNK + 1), np.int32)
    is_scored = np.zeros((size, num_chunks * CHUNK), bool)
    for i, (context, continuation) in enumerate(texts):
        token_ids[i, : lengths[i] + 1] = [*context, *continuation]
        is_scored[i, len(context) - 1 : lengths[i]] = True
    log_probs, is_first = _score(decoder, token_ids, is_scored, lengths, most)
    return [
        Loglikelihood(float(np.sum(row[scored], dtype=np.float64)), bool(np.all(first[scored])))
        for row, first, scored in list(zip(log_probs, is_first, is_scored, strict=True))[: len(texts)]
    ]


def _score(
    decoder: Decoder, token_ids: np.ndarray, is_scored: np.ndarray, lengths: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of every token but the first that `is_scored` `[B, chunks * T]`: its log-probability, and whether it is the best.

    Args:
      decoder: the target.
      token_ids: `[B, chunks * T + 1]` int32.
      is_scored: `[B, chunks * T]` bool, whether the token after each one counts; the rest of the result is 0 and False.
      lengths: `[B]` int32, how many tokens of each text are fed.
      most: the target's context.
    """
    log_probs, is_first = np.zeros(is_scored.shape, np.float32), np.zeros(is_scored.shape, bool)
    cache = empty_cache(decoder, len(token_ids), max(capacity(int(lengths.max()), most), CHUNK))
    for begin in range(0, is_scored.shape[1], CHUNK):
        chunk = slice(begin, begin + CHUNK)
        count = np.clip(lengths - begin, 0, CHUNK).astype(np.int32)
        # Most of a context needs no head, which is where a small model's time goes.
        if is_scored[:, chunk].any():
            next_ids = token_ids[:, begin + 1 : begin + CHUNK + 1]
            cache, *scores = _scoring_step(decoder, cache, token_ids[:, chunk], next_ids, count)
            log_probs[:, chunk], is_first[:, chunk] = jax.device_get(scores)
        else:
            cache = _step(decoder, cache, token_ids[:, chunk], count)
    return log_probs, is_first


@functools.partial(jax.jit, donate_argnames=("cache",))
def _step(decoder: Decoder, cache: KVCache, token_ids: Array, num_tokens: Array) -> KVCache:
    """Feeds `num_tokens` `[B]` of `token_ids` `[B, T]`."""
    return decoder.hidden(token_ids, cache)[1].advance(num_tokens)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _scoring_step(
    decoder: Decoder, cache: KVCache, token_ids: Array, next_ids: Array, num_tokens: Array
) -> tuple[KVCache, Array, Array]:
    """`_step`, with the log-probabilities of `next_ids` `[B, T]` and whether each is the best: `[B, T]` both."""
    logits, cache = decoder(token_ids, cache)
    chosen = jnp.take_along_axis(logits, next_ids[:, :, None], 2)[:, :, 0]
    log_probs = chosen - jax.nn.logsumexp(logits, 2)
    return cache.advance(num_tokens), log_probs, jnp.argmax(logits, 2) == next_ids
