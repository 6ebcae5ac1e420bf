"""Drawing draft tokens: the draft's processed distribution, and a token from it."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fly_jax.noise import draft_keys, request_keys, token_uniforms
from fly_jax.rule import arrays
from fly_jax.rule.edge import check_sampling_params
from fly_jax.rule.emission import inverse_cdf
from fly_jax.rule.scoring import score_rows
from fly_jax.rule.thresholds import is_greedy


def draft_token(
    logits: ArrayLike,
    key: Array,
    *,
    temperature: ArrayLike,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Draws one draft token per request, and gives the distribution it was drawn from.

    The key is folded with a tag of its own, so that the same request keys may be passed to `fly_verify`.

    Args:
      logits: `[B, V]` float32, bfloat16 or float16.
      key: one key, folded with the request's index, or `[B]` keys; fold the step and the position in before.
      temperature: `[B]` float32 or a scalar; below 1e-5 the token is the argmax.
      top_k: `[B]` int32 or a scalar; 0 is off.
      top_p: `[B]` float32 or a scalar; 1 is off.
      min_p: `[B]` float32 or a scalar; 0 is off.

    Returns:
      Token ids `[B]` int32, and `[B, V]` float32 processed probabilities (of a greedy request: at temperature 1), as
      `fly_verify` takes them for `draft_probs`.
    """
    logits = arrays.logits_of("logits", logits, ("B", "V"))
    num_requests = logits.shape[0]
    params = check_sampling_params(temperature, top_k, top_p, min_p, num_requests)
    if params is None:
        raise ValueError("temperature must be given to draw a token (0 for the argmax), got None")
    keys = draft_keys(request_keys(key, num_requests))
    target = score_rows(logits, params)
    probs = target.probabilities(jnp.arange(num_requests, dtype=jnp.int32))
    sampled, _ = inverse_cdf(probs, token_uniforms(keys))
    greedy = is_greedy(params.temperature) | ~target.valid
    return jnp.where(greedy, target.statistics.argmax, sampled), probs
