"""What the compiled programs hold in memory: no copy, no probabilities and no residual of all rows."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from conftest import FULL_COMPILATION

import fly_jax

B, K, V = 4, 8, 151936
ROWS = B * (K + 1)


def compile_call(mode, dtype, options):
    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    call = {"target_logits": shape(B, K + 1, V, dtype=dtype), "draft_token_ids": shape(B, K, dtype=jnp.int32)}
    if mode != "greedy":
        call |= {"temperature": shape(B), "key": jax.eval_shape(lambda: jax.random.key(0))}
    if mode == "draft probabilities":
        call["draft_probs"] = shape(B, K, V)
    if mode == "draft logits":
        call["draft_logits"] = shape(B, K, V)
    if mode == "masks":
        call |= {"top_k": shape(B, dtype=jnp.int32), "top_p": shape(B), "min_p": shape(B)}
    return jax.jit(fly_jax.fly_verify, compiler_options=FULL_COMPILATION | options).lower(**call).compile()


def materialised(text):
    """The arrays written to memory, as (shape, instruction): those of computations that are not fused into one loop."""
    fused = set(re.findall(r"calls=%([\w.-]+)", text))
    inside = False
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line)
        if header:
            inside = header.group(1) not in fused
        found = re.match(r"\s+(?:ROOT )?%[\w.-]+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if inside and found and found.group(2) not in ("parameter", "get-tuple-element", "bitcast"):
            yield tuple(int(size) for size in found.group(1).split(",") if size), found.group(2)


MODES = ["greedy", "one-hot drafts", "draft probabilities", "draft logits", "masks"]

# In [B, V] float32 arrays. Greedy: where rows are not distributions, the rows their tokens come from. Sampling: p, q
# and the residual of those rows; XLA of jax 0.12 keeps one more.
MOST_TEMPORARIES = {"greedy": 1.2} if jax.__version_info__ < (0, 12) else {"greedy": 2.2}
MOST_WHEN_SAMPLING = 3.2 if jax.__version_info__ < (0, 12) else 4.2


OPTIONS = fly_jax.compiler_options()
QUICK = [("greedy", jnp.float32, {}), ("draft probabilities", jnp.float32, {}), ("draft logits", jnp.bfloat16, OPTIONS)]
ALL = [(mode, *how) for mode in MODES for how in ((jnp.float32, {}), (jnp.bfloat16, OPTIONS))]
SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in ALL if each not in QUICK]


@pytest.mark.parametrize(("mode", "dtype", "options"), QUICK + SLOW)
def test_no_array_of_all_rows_is_ever_written(mode, dtype, options):
    compiled = compile_call(mode, dtype, options)
    assert max(math.prod(shape) for shape, _ in materialised(compiled.as_text())) < B * K * V
    arrays = compiled.memory_analysis().temp_size_in_bytes / (B * V * 4)
    assert arrays <= MOST_TEMPORARIES.get(mode, MOST_WHEN_SAMPLING)


def test_arrays_of_all_rows_would_be_seen():
    text = (
        jax.jit(lambda logits: jax.nn.softmax(logits) @ jnp.ones((V, 2)), compiler_options=FULL_COMPILATION)
        .lower(jax.ShapeDtypeStruct((ROWS, V), jnp.float32))
        .compile()
        .as_text()
    )
    assert max(math.prod(shape) for shape, _ in materialised(text)) >= ROWS * V
