"""Where draft tokens come from: prompt lookup, a draft model, or the target with layers skipped.

A drafter is a pytree (a draft model's weights are leaves) with three pure functions that run inside the jitted step.
In the shape descriptions, `B` denotes requests, `K` draft tokens per request, `V` the vocabulary and `L` the capacity
of histories and caches.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from fly_jax.config import SamplingParams
from fly_jax.decode.model import Decoder, KVCache
from fly_jax.decode.sampling import draft_token
from fly_jax.decode.vocab import VocabMapping
from fly_jax.errors import UserError
from fly_jax.kernels import row_statistics

DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """Proposed tokens.

    Attributes:
      token_ids: `[B, K]` int32, every one in [0, V), also past `num_draft_tokens`.
      num_draft_tokens: `[B]` int32, 0 to K.
      draft_probs: `[B, K, V]` float32, the distribution each token was drawn from; None when drafting is
        deterministic.
    """

    token_ids: Array
    num_draft_tokens: Array
    draft_probs: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What a drafter may look at.

    Attributes:
      decoder: the target.
      cache: the target's, filled up to and without the last token of each history (`cache.length == length - 1`).
      history: `[B, L]` int32, prompt and emitted tokens.
      length: `[B]` int32, how many there are; at least 1.
      keys: `[B]` keys of the step that will verify the drafts.
      sampling: how the target samples.
    """

    decoder: Decoder
    cache: KVCache
    history: Array
    length: Array
    keys: Array
    sampling: SamplingParams


class Drafter(Protocol):
    """What the decoding loop needs of a drafter."""

    @property
    def num_speculative_tokens(self) -> int:
        """K."""

    @property
    def draft_sample_method(self) -> str:
        """Either "greedy", or "probabilistic": drafts then come with `draft_probs` unless the target is greedy."""

    def init_state(self, batch_size: int, capacity: int) -> Any:
        """A new state for `batch_size` requests of up to `capacity` tokens: a pytree of arrays, or None."""

    def prefill(self, state: Any, token_ids: Array, num_tokens: Array) -> Any:
        """The state after the next `num_tokens` `[B]` of `token_ids` `[B, T]` of each prompt but its last token."""

    def propose(self, state: Any, context: DraftContext) -> tuple[Draft, Any, KVCache]:
        """Drafts what follows each history.

        Returns:
          The draft, the new state, and the target's cache: the same length; what lies beyond it is free to change.
        """


def empty_draft(drafter: Drafter | None, batch_size: int, vocab_size: int, sampling: SamplingParams) -> Draft:
    """A draft of no tokens, with the shapes that `drafter` proposes (K = 0 without one)."""
    k = 0 if drafter is None else drafter.num_speculative_tokens
    with_probs = drafter is not None and _draws(drafter.draft_sample_method, sampling)
    return Draft(
        jnp.zeros((batch_size, k), jnp.int32),
        jnp.zeros((batch_size,), jnp.int32),
        jnp.zeros((batch_size, k, vocab_size), jnp.float32) if with_probs else None,
    )


def empty_cache(decoder: Decoder, batch_size: int, capacity: int) -> KVCache:
    """A cache for `batch_size` requests of up to `capacity` tokens, in the dtype of the weights."""
    return KVCache.zeros(decoder.config, batch_size, capacity, decoder.embedding[...].dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Drafts what followed the last occurrence of the history's own ending (n-gram lookup).

    The longest ending of `prompt_lookup_max` down to `prompt_lookup_min` tokens that occurs before counts, at its
    most recent occurrence (vLLM takes the earliest one); nothing is proposed where none does.

    Attributes:
      num_speculative_tokens: K.
      prompt_lookup_max: the longest ending looked up.
      prompt_lookup_min: the shortest.

    Raises:
      UserError: a number is out of range.
    """

    num_speculative_tokens: int = dataclasses.field(metadata={"static": True})
    prompt_lookup_max: int = dataclasses.field(default=3, metadata={"static": True})
    prompt_lookup_min: int = dataclasses.field(default=1, metadata={"static": True})

    def __post_init__(self) -> None:
        _check_num_speculative_tokens(self.num_speculative_tokens)
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise UserError(
                f"prompt_lookup_min must be at least 1 and at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}."
            )

    @property
    def draft_sample_method(self) -> str:
        """Lookup draws nothing."""
        return "greedy"

    def init_state(self, batch_size: int, capacity: int) -> None:
        """The history is all it needs."""

    def prefill(self, state: None, token_ids: Array, num_tokens: Array) -> None:
        """The history is all it needs."""

    def propose(self, state: None, context: DraftContext) -> tuple[Draft, None, KVCache]:
        """See `Drafter.propose`."""
        history, last = context.history, context.length[:, None] - 1
        index = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
        # matched[b, p] = how many tokens up to and including p equal those up to and including the last one.
        matched = jnp.zeros(history.shape, jnp.int32)
        unbroken = index < last
        for offset in range(self.prompt_lookup_max):
            tail = jnp.take_along_axis(history, jnp.maximum(last - offset, 0), 1)
            shifted = jnp.pad(history, ((0, 0), (offset, 0)))[:, : history.shape[1]]
            unbroken &= (index >= offset) & (shifted == tail)
            matched += unbroken.astype(jnp.int32)
        # One integer maximum finds the longest match and, among equals, the most recent.
        best = jnp.max(matched * history.shape[1] + index, 1, keepdims=True)
        end = best % history.shape[1]
        found = best // history.shape[1] >= self.prompt_lookup_min
        # Where the continuation reaches the end of the history, it is what begins after the match: the text is taken to
        # go on with the same period.
        period = jnp.maximum(last - end, 1)
        source = end + 1 + jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)[None] % period
        token_ids = jnp.take_along_axis(history, jnp.minimum(source, history.shape[1] - 1), 1)
        return Draft(token_ids, jnp.where(found, self.num_speculative_tokens, 0)[:, 0]), None, context.cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts with a model of its own, one token at a time, on a cache of its own.

    Attributes:
      decoder: a decoder over the target's vocabulary, or over another one with `vocab_mapping`.
      num_speculative_tokens: K.
      draft_sample_method: "greedy", or "probabilistic": drawn as the target samples.
      vocab_mapping: between the target's vocabulary and the decoder's, which only drafts greedily then; None if they
        are the same.
      padded_apart: whether only the padding columns of the two models' logits differ in number: the tokens are the
        same, and the draft's logits are cut or filled up (with -inf) to the target's columns.

    Raises:
      UserError: a setting is out of range, or excluded by another.
    """

    decoder: Decoder
    num_speculative_tokens: int = dataclasses.field(metadata={"static": True})
    draft_sample_method: str = dataclasses.field(default="greedy", metadata={"static": True})
    vocab_mapping: VocabMapping | None = None
    padded_apart: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        _check_num_speculative_tokens(self.num_speculative_tokens)
        _check_draft_sample_method(self.draft_sample_method)
        if self.vocab_mapping is not None and self.draft_sample_method != "greedy":
            raise UserError(
                f"A draft model of another vocabulary drafts greedily only, got draft_sample_method "
                f"{self.draft_sample_method!r}: set it to 'greedy'."
            )

    def init_state(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache."""
        return empty_cache(self.decoder, batch_size, capacity)

    def prefill(self, state: KVCache, token_ids: Array, num_tokens: Array) -> KVCache:
        """See `Drafter.prefill`."""
        _, state = self.decoder.hidden(self._own_ids(token_ids), state)
        return state.advance(num_tokens)

    def propose(self, state: KVCache, context: DraftContext) -> tuple[Draft, KVCache, KVCache]:
        """See `Drafter.propose`."""
        # After a fully accepted draft the cache lacks the last draft token as well as the token emitted after it, so
        # the last two tokens are always fed. A history of one token has no second: what is fed after it is
        # overwritten by the first draft token.
        first = jnp.maximum(context.length - 2, 0)
        token_ids = jnp.take_along_axis(context.history, first[:, None] + jnp.arange(2, dtype=jnp.int32)[None], 1)
        hidden, state = self.decoder.hidden(self._own_ids(token_ids), dataclasses.replace(state, length=first))
        newest = (context.length - 1 - first)[:, None, None]
        logits = self.decoder.logits(jnp.take_along_axis(hidden, newest, 1))[:, 0]
        state = dataclasses.replace(state, length=context.length)
        mapping, constrain = self.vocab_mapping, None
        if mapping is not None:
            constrain = mapping.constrain_draft_logits
        elif self.padded_apart:
            constrain = functools.partial(_with_columns, context.decoder.config.vocab_size)
        draft, state = _draft_one_by_one(self.decoder, logits, state, context, self, constrain=constrain)
        if mapping is not None:
            draft = dataclasses.replace(draft, token_ids=mapping.map_draft_to_target_ids(draft.token_ids))
        return draft, state, context.cache

    def _own_ids(self, token_ids: Array) -> Array:
        # A padding column of the target has no counterpart: `Decoder` reads the last token instead.
        return token_ids if self.vocab_mapping is None else self.vocab_mapping.map_target_to_draft_ids(token_ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerSkip:
    """Drafts with the target itself, some layers skipped, on the target's own cache.

    What it writes there lies beyond the verified tokens, and verification writes over it.

    Attributes:
      skip_layers: indices of the layers left out, see `default_skip_layers`.
      num_speculative_tokens: K.
      draft_sample_method: "greedy", or "probabilistic": drawn as the target samples.

    Raises:
      UserError: a setting is out of range.
    """

    skip_layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    num_speculative_tokens: int = dataclasses.field(metadata={"static": True})
    draft_sample_method: str = dataclasses.field(default="greedy", metadata={"static": True})

    def __post_init__(self) -> None:
        _check_num_speculative_tokens(self.num_speculative_tokens)
        _check_draft_sample_method(self.draft_sample_method)

    def init_state(self, batch_size: int, capacity: int) -> None:
        """The target's cache is all it needs."""

    def prefill(self, state: None, token_ids: Array, num_tokens: Array) -> None:
        """The target's cache is all it needs."""

    def propose(self, state: None, context: DraftContext) -> tuple[Draft, None, KVCache]:
        """See `Drafter.propose`."""
        token_ids = jnp.take_along_axis(context.history, context.length[:, None] - 1, 1)
        logits, cache = context.decoder(token_ids, context.cache, skip_layers=self.skip_layers)
        cache = dataclasses.replace(cache, length=context.length)
        draft, cache = _draft_one_by_one(context.decoder, logits[:, 0], cache, context, self, self.skip_layers)
        return draft, None, dataclasses.replace(cache, length=context.cache.length)


def _with_columns(num_columns: int, logits: Array) -> Array:
    """`logits` `[B, V]` with as many columns as asked for: padding is cut off, or added as -inf."""
    missing = num_columns - logits.shape[1]
    return (
        logits[:, :num_columns] if missing <= 0 else jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    )


def default_skip_layers(num_layers: int) -> tuple[int, ...]:
    """The layers `LayerSkip` leaves out unless told: a run of 2 in 15 that starts 2/5 of the way up.

    For the 30 layers of SmolLM2-135M these are 12 to 15, the best run found there.

    Raises:
      UserError: there is only one layer.
    """
    if num_layers < 2:
        raise UserError("Layer skipping needs a model of at least 2 layers, this one has 1.")
    start = round(num_layers * 2 / 5)
    return tuple(range(start, start + max(1, round(num_layers * 2 / 15))))


def check_drafter(drafter: Drafter, decoder: Decoder) -> None:
    """Refuses a drafter that does not fit the target.

    Raises:
      UserError: vocabularies of different size with no mapping or with that of others, or a skipped layer that the
        target does not have.
    """
    if isinstance(drafter, DraftModel):
        ours, theirs, mapping = drafter.decoder.config.vocab_size, decoder.config.vocab_size, drafter.vocab_mapping
        mapped = (theirs, theirs) if mapping is None else (mapping.draft_vocab_size, mapping.target_vocab_size)
        if mapped != (ours, theirs) and not (mapping is None and drafter.padded_apart):
            given = "none" if mapping is None else f"one between {mapped[0]} and {mapped[1]}"
            raise UserError(
                f"The draft model's vocabulary has {ours} tokens and the target's {theirs}; they must be the same, "
                f"or have a vocab_mapping between them, got {given}."
            )
    if isinstance(drafter, LayerSkip):
        check_skip_layers(drafter.skip_layers, decoder.config.num_layers)


def check_skip_layers(skip_layers: Sequence[int], num_layers: int) -> None:
    """Refuses layers that do not exist, are named twice, or are all there are.

    Raises:
      UserError: one of these.
    """
    wrong = [layer for layer in skip_layers if not 0 <= layer < num_layers]
    if wrong:
        raise UserError(f"skip_layers must be between 0 and {num_layers - 1}, got {wrong[0]}.")
    if not 1 <= len(set(skip_layers)) == len(skip_layers) < num_layers:
        raise UserError(f"skip_layers must name 1 to {num_layers - 1} different layers, got {list(skip_layers)}.")


def _draft_one_by_one(
    decoder: Decoder,
    logits: Array,
    cache: KVCache,
    context: DraftContext,
    drafter: Drafter,
    skip_layers: tuple[int, ...] = (),
    constrain: Callable[[Array], Array] | None = None,
) -> tuple[Draft, KVCache]:
    """K draft tokens from the `[B, V]` logits of the first and K - 1 single-token steps; `constrain` acts on each."""
    draw = _drawing(context, drafter.draft_sample_method, constrain)

    def step(carry: tuple[Array, KVCache], position: Array) -> tuple[tuple[Array, KVCache], Any]:
        logits, cache = carry
        token_ids, probs = draw(logits, position)
        logits, cache = decoder(token_ids[:, None], cache, skip_layers=skip_layers)
        return (logits[:, 0], cache.advance(jnp.ones_like(cache.length))), (token_ids, probs)

    steps = jnp.arange(drafter.num_speculative_tokens - 1, dtype=jnp.int32)
    (logits, cache), drawn = lax.scan(step, (logits, cache), steps)
    last = draw(logits, jnp.int32(drafter.num_speculative_tokens - 1))
    token_ids, probs = jax.tree.map(
        lambda stacked, newest: jnp.moveaxis(jnp.concatenate([stacked, newest[None]]), 0, 1), drawn, last
    )
    count = jnp.full(context.length.shape, drafter.num_speculative_tokens, jnp.int32)
    return Draft(token_ids, count, probs), cache


def _drawing(
    context: DraftContext, draft_sample_method: str, constrain: Callable[[Array], Array] | None
) -> Callable[[Array, Array], tuple[Array, Array | None]]:
    """A function of `[B, V]` logits and the draft position: `[B]` token ids, and `[B, V]` probabilities if it draws."""
    sampling = context.sampling
    temperature = sampling.temperature

    def take_best(logits: Array, position: Array) -> tuple[Array, None]:
        return row_statistics(logits if constrain is None else constrain(logits)).argmax, None

    if temperature is None or not _draws(draft_sample_method, sampling):
        return take_best

    def draw(logits: Array, position: Array) -> tuple[Array, Array | None]:
        keys = jax.vmap(jax.random.fold_in, (0, None))(context.keys, position)
        return draft_token(
            logits if constrain is None else constrain(logits),
            keys,
            temperature=temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )

    return draw


def _draws(draft_sample_method: str, sampling: SamplingParams) -> bool:
    return draft_sample_method == "probabilistic" and sampling.temperature is not None


def _check_num_speculative_tokens(value: int) -> None:
    if value < 1:
        raise UserError(f"num_speculative_tokens must be at least 1, got {value}.")


def _check_draft_sample_method(value: str) -> None:
    if value not in DRAFT_SAMPLE_METHODS:
        raise UserError(f"draft_sample_method must be one of {', '.join(DRAFT_SAMPLE_METHODS)}, got {value!r}.")
