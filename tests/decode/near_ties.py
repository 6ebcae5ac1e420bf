"""How close the target was to the other choice where two of its texts part."""

import jax.numpy as jnp
import numpy as np

from fly_jax.decode.model import KVCache


def gap_at_first_difference(decoder, prompt, first, second):
    """The target's top-2 gap where two continuations part."""
    shared = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    assert shared is not None, "one text is a beginning of the other"
    sequence = jnp.asarray([[*prompt, *first[:shared]]], jnp.int32)
    logits, _ = decoder(sequence, KVCache.zeros(decoder.config, 1, sequence.shape[1]))
    best = np.sort(np.asarray(logits)[0, -1])
    return best[-1] - best[-2]
