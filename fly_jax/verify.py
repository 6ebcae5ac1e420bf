"""FLy verification of draft tokens as one pure function, in four stages: score, accept, defer, emit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fly_jax.config import FlyConfig
from fly_jax.noise import Noise, verify_noise
from fly_jax.rule import edge
from fly_jax.rule.acceptance import accept
from fly_jax.rule.deferral import defer
from fly_jax.rule.edge import Inputs
from fly_jax.rule.emission import emit
from fly_jax.rule.scoring import score_draft, score_target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verification:
    """The outcome of verifying up to `K` draft tokens for each of `B` requests.

    Attributes:
      token_ids: `[B, K + 1]` int32: the kept drafts and the token after them, then -1.
      num_tokens: `[B]` int32: `num_accepted + 1`.
      num_accepted: `[B]` int32: kept draft tokens, deferred ones included.
      natively_accepted: `[B, K]` bool: the decision of standard verification at every position below
        `num_draft_tokens`, past the stop too; False beyond.
      deferred: `[B, K]` bool: kept although rejected natively; inside the accepted prefix only.
      entropy: `[B, K]` float32, nats: the target's top-k entropy, not renormalised, wherever only the gate decides
        about a deferral, past the stop too; NaN elsewhere.
      invalid: `[B]` bool: the row the last token came from was not a distribution (NaN, nothing above -inf, or +inf for
        a sampling request); that token is the argmax over the finite entries, or 0.
    """

    token_ids: Array
    num_tokens: Array
    num_accepted: Array
    natively_accepted: Array
    deferred: Array
    entropy: Array
    invalid: Array


def fly_verify(
    target_logits: ArrayLike,
    draft_token_ids: ArrayLike,
    *,
    config: FlyConfig | None = FlyConfig(),  # noqa: B008 - frozen
    num_draft_tokens: ArrayLike | None = None,
    draft_probs: ArrayLike | None = None,
    draft_logits: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    draft_temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    key: Array | None = None,
    noise: Noise | None = None,
    vocab_size: ArrayLike | None = None,
) -> Verification:
    """Verifies draft tokens against the target's logits; with a config, keeps some the target would reject.

    FLy is lossy: it does not preserve the target distribution, and calling this is opting in, since FLy with its
    defaults is the default. With `config=None` it is standard verification, which emits the target distribution, up to
    the float32 grid of its uniforms and sums: about 1e-7 for an acceptance and for the probability of a token, and in
    total variation at most `(min(V, 128) + V / 128) * 2**-24` a token (1e-6 at V = 16, 8e-5 at V = 150,000).

    `jax.jit(fly_verify)` needs no static arguments; vmap, scan, while_loop and shard_map over requests work as well.
    In the shapes `B` is the number of requests, `K` the most draft tokens of one, `V` the vocabulary. Values that live
    on the device are never errors: ids outside the vocabulary are rejected, lengths are clipped, ranges are clamped.

    Args:
      target_logits: `[B, K + 1, V]` float32, bfloat16 or float16. Row i scores draft token i; row
        `num_draft_tokens` gives the bonus token.
      draft_token_ids: `[B, K]` int32. -1, like any id outside the vocabulary, is a placeholder: never kept.
      config: FLy's settings, or None for standard lossless verification.
      num_draft_tokens: `[B]` int32, how many drafts each request has; None is K.
      draft_probs: `[B, K, Vd]` float32, bfloat16 or float16, the distribution each draft token was sampled from, after
        the draft's own temperature and masks. Neither this nor `draft_logits` means one-hot drafts: greedy drafting, or
        n-grams.
      draft_logits: `[B, K, Vd]`, logits of that distribution, divided here by `draft_temperature`. Where `Vd` differs
        from `V`, columns beyond the smaller do not exist, in any row.
      temperature: `[B]` float32 or a scalar; below 1e-5 the request is greedy. None: every request is.
      draft_temperature: `[B]` float32 or a scalar; None is `temperature`. Below 1e-5 a request's drafts were greedy, so
        that they are one-hot.
      top_k: `[B]` int32 or a scalar; 0 is off.
      top_p: `[B]` float32 or a scalar; 1 is off.
      min_p: `[B]` float32 or a scalar; 0 is off. Applied first, then top-k, then top-p.
      key: a `jax.random` key, folded with the request's index, or `[B]` keys: then a request's result depends on no
        other. Under vmap and shard_map pass keys for the requests: an index is that within the call. Consumed; fold the
        step in before. Drafts must come from another stream (`fly_jax.noise.draft_keys`).
      noise: the noise itself instead of a key: `VerifyNoise`, or `VllmV2Noise` to replay vLLM V2's.
      vocab_size: int or traced scalar; columns at or beyond it do not exist. None is V.

    Returns:
      The verification; every request emits exactly `num_accepted + 1` tokens, all inside the vocabulary.

    Raises:
      TypeError, ValueError: an argument's kind, dtype, shape or static value is wrong.

    References:
      FLy: https://arxiv.org/abs/2511.22972; standard verification: https://arxiv.org/abs/2211.17192. Where the paper is
      silent this follows vLLM 0.33's V1 runner.
    """
    rows = edge.flatten(target_logits, draft_token_ids, draft_probs=draft_probs, draft_logits=draft_logits)
    return fly_verify_rows(
        rows.target_logits,
        rows.row_index,
        draft_token_ids,
        draft_row_index=rows.draft_row_index,
        config=config,
        num_draft_tokens=num_draft_tokens,
        draft_probs=rows.draft_probs,
        draft_logits=rows.draft_logits,
        temperature=temperature,
        draft_temperature=draft_temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        key=key,
        noise=noise,
        vocab_size=vocab_size,
    )


def fly_verify_rows(
    target_logits: ArrayLike,
    row_index: ArrayLike,
    draft_token_ids: ArrayLike,
    *,
    draft_row_index: ArrayLike | None = None,
    bonus_token_ids: ArrayLike | None = None,
    config: FlyConfig | None = FlyConfig(),  # noqa: B008 - frozen
    num_draft_tokens: ArrayLike | None = None,
    draft_probs: ArrayLike | None = None,
    draft_logits: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    draft_temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    key: Array | None = None,
    noise: Noise | None = None,
    vocab_size: ArrayLike | None = None,
) -> Verification:
    """`fly_verify` on flattened rows, as serving engines have them; the logits are not copied.

    Args:
      target_logits: `[N, V]`, rows in any order.
      row_index: `[B, K + 1]` int32: which row scores which position (`fly_jax.layout` makes it from vLLM's cumulative
        counts). Entries past a request's bonus row are ignored, and so is the bonus row itself when `bonus_token_ids`
        is given; they may hold anything. The others are distinct.
      draft_token_ids: `[B, K]` int32.
      draft_row_index: `[B, K]` int32: which row of the draft distribution is whose; None is `row_index[:, :K]`. Entries
        past a request's drafts are ignored; the others are distinct where `draft_logits` are divided by different
        temperatures.
      bonus_token_ids: `[B]` int32: the token after a fully kept draft, when the caller has sampled it; goes through
        as it is.
      config: as in `fly_verify`, and so are all that follow, but `draft_probs` and `draft_logits` are `[M, Vd]`.
      num_draft_tokens: `[B]` int32.
      draft_probs: `[M, Vd]`.
      draft_logits: `[M, Vd]`.
      temperature: `[B]` float32 or a scalar.
      draft_temperature: `[B]` float32 or a scalar.
      top_k: `[B]` int32 or a scalar.
      top_p: `[B]` float32 or a scalar.
      min_p: `[B]` float32 or a scalar.
      key: one key or `[B]` keys.
      noise: `VerifyNoise` or `VllmV2Noise`.
      vocab_size: int or traced scalar.

    Returns:
      As `fly_verify`.

    Raises:
      TypeError, ValueError: as `fly_verify`.
    """
    edge.check_kind(config)
    inputs = edge.inputs_of(
        target_logits,
        row_index,
        draft_token_ids,
        draft_row_index=draft_row_index,
        bonus_token_ids=bonus_token_ids,
        num_draft_tokens=num_draft_tokens,
        draft_probs=draft_probs,
        draft_logits=draft_logits,
        temperature=temperature,
        draft_temperature=draft_temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        vocab_size=vocab_size,
    )
    edge.check_threshold(config, inputs.draft_token_ids.shape[0])
    return _verify(edge.with_randomness(inputs, key, noise), config)


# Compiled as a whole even when the caller does not: op by op the first call takes many times as long.
@jax.jit
def _verify(inputs: Inputs, config: FlyConfig | None) -> Verification:
    # Decisions have no gradient, and the GPU kernel no rule for one: a loss beside them can still be differentiated.
    inputs = jax.tree.map(jax.lax.stop_gradient, inputs)
    num_requests, num_positions = inputs.draft_token_ids.shape
    if num_requests == 0:
        return _nothing(num_positions)
    noise = _noise(inputs)
    target = score_target(inputs, 1 if config is None else config.entropy_top_k)
    draft = score_draft(inputs)
    native = accept(inputs, target, draft, noise)
    deferral = defer(inputs, target, native, config)
    kept = jnp.cumprod(native.accepted | deferral.deferred, axis=1, dtype=jnp.int32) > 0
    num_accepted = jnp.sum(kept, axis=1, dtype=jnp.int32)
    token, invalid = emit(inputs, target, draft, noise, num_accepted)

    position = jnp.arange(num_positions + 1, dtype=jnp.int32)[None]
    drafts = jnp.pad(inputs.draft_token_ids, ((0, 0), (0, 1)))
    last = position == num_accepted[:, None]
    token_ids = jnp.where(position < num_accepted[:, None], drafts, jnp.where(last, token[:, None], -1))
    return Verification(
        token_ids=token_ids,
        num_tokens=num_accepted + 1,
        num_accepted=num_accepted,
        natively_accepted=native.accepted,
        deferred=deferral.deferred & kept,
        entropy=deferral.entropy,
        invalid=invalid,
    )


def _noise(inputs: Inputs) -> Noise | None:
    """What is drawn from: given, or made of the keys; None where every request is greedy."""
    if inputs.sampling is None or inputs.sampling.keys is None:
        return None if inputs.sampling is None else inputs.sampling.noise
    return verify_noise(inputs.sampling.keys, inputs.draft_token_ids.shape[1])


def _nothing(num_positions: int) -> Verification:
    def empty(dtype: Any, *shape: int) -> Array:
        return jnp.zeros((0, *shape), dtype)

    return Verification(
        token_ids=empty(jnp.int32, num_positions + 1),
        num_tokens=empty(jnp.int32),
        num_accepted=empty(jnp.int32),
        natively_accepted=empty(bool, num_positions),
        deferred=empty(bool, num_positions),
        entropy=empty(jnp.float32, num_positions),
        invalid=empty(bool),
    )
