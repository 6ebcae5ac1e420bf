"""What holds for every verification, and the faults users met in other implementations."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FULL_COMPILATION
from jax import lax
from jax.sharding import PartitionSpec as P

import fly_jax

B, K, V, W = 8, 5, 33, 2
JOINED = jax.jit(fly_jax.fly_verify)


def make_call(seed=0, batch=B, drafts="probs", sampling=True):
    """A batch in which acceptances, deferrals and rejections all happen."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (batch, K + 1, V)).astype(np.float32)
    rank = rng.choice(3, (batch, K), p=[0.7, 0.2, 0.1])
    ids = np.take_along_axis(np.argsort(-logits[:, :K], axis=-1), rank[..., None], axis=-1)[..., 0]
    call = {
        "target_logits": logits,
        "draft_token_ids": ids.astype(np.int32),
        "num_draft_tokens": rng.choice([K, K, K, 3, 0], batch).astype(np.int32),
        "config": fly_jax.FlyConfig(W, np.full(batch, 0.3, np.float32)),
    }
    if sampling:
        call["temperature"] = rng.choice([0.0, 0.6, 1.0], batch).astype(np.float32)
        call["noise"] = fly_jax.VerifyNoise(
            (1 - rng.random((batch, K))).astype(np.float32) ** 2, (1 - rng.random((batch, 2))).astype(np.float32)
        )
        if drafts == "probs":
            weights = np.exp(logits[:, :K] + rng.normal(0, 1, (batch, K, V)))
            call["draft_probs"] = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    return call


def with_key(call, key):
    return {**call, "noise": None, "key": key}


def one_request(*rows, drafts, **options):
    """A call with one request; greedy unless options say otherwise."""
    return jax.device_get(
        fly_jax.fly_verify(np.array([rows], np.float32), np.array([drafts], np.int32).reshape(1, -1), **options)
    )


def sampling(drafts, u=0.5, final=0.5):
    """Options that make a one-request call sample, with constant noise."""
    return {
        "temperature": np.ones(1, np.float32),
        "noise": fly_jax.VerifyNoise(np.full((1, drafts), u, np.float32), np.full((1, 2), final, np.float32)),
    }


# The example of the semantics, section 9: argmax 5, 7, 9 with top-3 entropies near 1.0, 0.2 and 0.1.
def example(**options):
    row = np.full((3, 10), -20.0, np.float32)
    row[0, [5, 4, 3]] = [1.0, 0.5, 0.4]
    row[1, [7, 1]] = [4.0, 0.9]
    row[2, [9, 1]] = [4.0, 0.0]
    bonus = np.eye(10, dtype=np.float32)[8]
    options = {"drafts": [4, 7, 9], "config": fly_jax.FlyConfig(1, 0.3, 3), **options}
    return one_request(*row, bonus, **options)


def test_example_defers_and_emits_four_tokens():
    result = example()
    assert result.token_ids.tolist() == [[4, 7, 9, 8]]
    assert result.deferred.tolist() == [[True, False, False]]
    assert result.natively_accepted.tolist() == [[False, True, True]]
    assert 0.9 < result.entropy[0, 0] < 1.1
    assert np.isnan(result.entropy[0, 1:]).all()


@pytest.mark.parametrize(
    "change",
    [
        {"config": fly_jax.FlyConfig(1, 1.5, 3)},
        {"drafts": [4, 6, 9]},
        {"num_draft_tokens": np.array([1], np.int32)},
        {"config": None},
    ],
    ids=["threshold above H", "window rejected", "window past the draft", "standard"],
)
def test_example_emits_one_token_otherwise(change):
    assert example(**change).token_ids.tolist() == [[5, -1, -1, -1]]


@pytest.mark.parametrize("drafts", ["one-hot", "probs"])
@pytest.mark.parametrize("seed", range(6))
def test_output_is_well_formed(seed, drafts):
    call = make_call(seed, drafts=drafts)
    result = jax.device_get(JOINED(**call))
    r = result.num_accepted
    np.testing.assert_array_equal(result.num_tokens, r + 1)
    assert (r <= call["num_draft_tokens"]).all()
    column = np.arange(K + 1)
    emitted = column[None] <= r[:, None]
    assert ((result.token_ids >= 0) & (result.token_ids < V))[emitted].all()
    assert (result.token_ids[~emitted] == -1).all()
    kept = column[None, :K] < r[:, None]
    np.testing.assert_array_equal(result.token_ids[:, :K][kept], call["draft_token_ids"][kept])
    np.testing.assert_array_equal((result.natively_accepted | result.deferred)[kept], True)
    assert not (result.deferred & ~kept).any()
    assert not (result.deferred & result.natively_accepted).any()
    past = column[None, :K] >= call["num_draft_tokens"][:, None]
    assert not result.natively_accepted[past].any()
    chex.assert_type(
        [result.token_ids, result.num_tokens, result.num_accepted, result.entropy], [int, int, int, np.float32]
    )


@pytest.mark.parametrize("drafts", ["one-hot", "probs"])
def test_infinite_threshold_is_standard_verification(drafts):
    call = make_call(1, drafts=drafts)
    lossless = jax.device_get(JOINED(**{**call, "config": None}))
    off = jax.device_get(JOINED(**{**call, "config": fly_jax.FlyConfig(W, np.full(B, np.inf, np.float32))}))
    assert np.isnan(lossless.entropy).all()
    chex.assert_trees_all_equal(dataclasses.replace(off, entropy=lossless.entropy), lossless)


@pytest.mark.parametrize("drafts", ["one-hot", "probs"])
def test_never_accepts_less_than_standard(drafts):
    longer = 0
    for seed in range(10):
        call = make_call(seed, drafts=drafts)
        fly = jax.device_get(JOINED(**call))
        lossless = jax.device_get(JOINED(**{**call, "config": None}))
        np.testing.assert_array_equal(fly.natively_accepted, lossless.natively_accepted)
        assert (fly.num_accepted >= lossless.num_accepted).all()
        longer += (fly.num_accepted > lossless.num_accepted).sum()
    assert longer > 0


def test_threshold_is_per_request():
    call = make_call(2)
    theta = np.where(np.arange(B) % 2, np.inf, 0).astype(np.float32)
    result = jax.device_get(JOINED(**{**call, "config": fly_jax.FlyConfig(W, theta)}))
    assert result.deferred[::2].any()
    assert not result.deferred[1::2].any()


def test_a_result_depends_on_its_own_key_only():
    """Others added, removed, permuted: nothing changes (vLLM 6038, 9441)."""
    call = make_call(3)
    keys = jax.random.split(jax.random.key(7), B)
    result = jax.device_get(JOINED(**with_key(call, keys)))
    order = np.random.default_rng(0).permutation(B)

    def take(index):
        return jax.tree.map(lambda leaf: leaf[index], with_key(call, keys))

    chex.assert_trees_all_equal(jax.device_get(JOINED(**take(order))), jax.tree.map(lambda leaf: leaf[order], result))
    few = order[:3]
    chex.assert_trees_all_equal(jax.device_get(JOINED(**take(few))), jax.tree.map(lambda leaf: leaf[few], result))


def test_noise_does_not_depend_on_the_padding_of_drafts():
    call = with_key(make_call(4), jax.random.split(jax.random.key(1), B))
    more = 3
    padded = {
        **call,
        "target_logits": np.pad(call["target_logits"], ((0, 0), (0, more), (0, 0)), constant_values=np.nan),
        "draft_token_ids": np.pad(call["draft_token_ids"], ((0, 0), (0, more)), constant_values=1),
        "draft_probs": np.pad(call["draft_probs"], ((0, 0), (0, more), (0, 0)), constant_values=np.nan),
    }
    result, same = jax.device_get((JOINED(**call), JOINED(**padded)))
    np.testing.assert_array_equal(same.token_ids[:, : K + 1], result.token_ids)
    assert (same.token_ids[:, K + 1 :] == -1).all()
    np.testing.assert_array_equal(same.natively_accepted[:, :K], result.natively_accepted)


def test_one_key_is_folded_with_the_request():
    call = make_call(5)
    same = jax.tree.map(lambda leaf: np.repeat(leaf[:1], B, axis=0), {**call, "config": None, "noise": None})
    same.update(temperature=np.full(B, 3.0, np.float32), num_draft_tokens=np.zeros(B, np.int32))
    tokens = jax.device_get(JOINED(**same, key=jax.random.key(0)).token_ids[:, 0])
    assert len(set(tokens.tolist())) > 1
    other = jax.device_get(JOINED(**same, key=jax.random.key(1)).token_ids[:, 0])
    assert (tokens != other).any()  # the seed is not ignored (vLLM 6038)


def test_one_trace_for_any_values(count_traces):
    verify, traces = count_traces(fly_jax.fly_verify)
    for seed in range(3):
        call = make_call(seed)
        call["config"] = fly_jax.FlyConfig(W, np.full(B, seed, np.float32))
        verify(**call, vocab_size=np.int32(V - seed))
    assert len(traces) == 1


def test_vmap():
    calls = [make_call(seed) for seed in range(2)]
    separately = jax.tree.map(lambda *leaves: np.stack(leaves), *[jax.device_get(JOINED(**call)) for call in calls])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *calls)
    chex.assert_trees_all_equal(
        jax.device_get(jax.jit(jax.vmap(lambda call: fly_jax.fly_verify(**call)))(stacked)), separately
    )


def test_scan_and_while_loop():
    calls = [make_call(seed) for seed in range(2)]
    separately = jax.tree.map(lambda *leaves: np.stack(leaves), *[jax.device_get(JOINED(**call)) for call in calls])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *calls)
    _, scanned = jax.jit(lambda calls: lax.scan(lambda carry, call: (carry, fly_jax.fly_verify(**call)), None, calls))(
        stacked
    )
    chex.assert_trees_all_equal(jax.device_get(scanned), separately)

    def step(state):
        i, total = state
        result = fly_jax.fly_verify(**jax.tree.map(lambda leaf: leaf[i], stacked))
        return i + 1, total + jnp.sum(result.num_tokens, dtype=jnp.int32)

    stacked = jax.tree.map(jnp.asarray, stacked)
    _, total = jax.jit(lambda: lax.while_loop(lambda state: state[0] < 2, step, (jnp.int32(0), jnp.int32(0))))()
    assert int(total) == separately.num_tokens.sum()


def test_shard_map_over_requests():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one device")
    mesh = jax.make_mesh((2,), ("requests",), (jax.sharding.AxisType.Auto,), devices=devices[:2])
    call = with_key(make_call(6), jax.random.split(jax.random.key(3), B))
    sharded = jax.jit(
        jax.shard_map(
            lambda call: fly_jax.fly_verify(**call), mesh=mesh, in_specs=P("requests"), out_specs=P("requests")
        )
    )
    chex.assert_trees_all_equal(jax.device_get(sharded(call)), jax.device_get(JOINED(**call)))


def test_a_loss_beside_it_can_be_differentiated():
    call = with_key(make_call(6), jax.random.split(jax.random.key(3), B))
    logits = jnp.asarray(call.pop("target_logits"))

    def loss(logits):
        verification = fly_jax.fly_verify(logits, **call)
        return jnp.sum(jnp.square(logits) * weights(verification)), verification

    def weights(verification):
        return verification.num_accepted.astype(jnp.float32)[:, None, None]

    gradient, verification = jax.jit(jax.grad(loss, has_aux=True))(logits)
    np.testing.assert_allclose(gradient, 2 * logits * weights(verification), rtol=1e-6)


def test_x64_changes_nothing():
    """`test_kernels_triton.py` has the modules imported so as well."""
    call = with_key(make_call(0), jax.random.wrap_key_data(np.arange(2 * B, dtype=np.uint32).reshape(B, 2)))
    off = jax.device_get(JOINED(**call))
    with jax.enable_x64(True):
        on = jax.device_get(JOINED(**call))
    chex.assert_trees_all_equal_shapes_and_dtypes(on, off)
    chex.assert_trees_all_equal(on, off)


@pytest.mark.parametrize("temperature", [0.0123, 0.3, 7.7, np.inf])
def test_zero_threshold_opens_every_valid_gate(temperature):
    """H is never negative, not by rounding either: XLA's product with a reciprocal, for a division, made it so."""
    rng = np.random.default_rng(1)
    batch = 64
    logits = rng.normal(0, 40, (batch, 3, V)).astype(np.float32)
    logits[:, 1, 3] = 500.0
    logits[:, 0] = np.sort(logits[:, 0], axis=-1)
    verify = jax.jit(fly_jax.fly_verify, compiler_options=FULL_COMPILATION)
    result = jax.device_get(
        verify(
            target_logits=logits,
            draft_token_ids=np.tile(np.array([0, 3], np.int32), (batch, 1)),
            temperature=np.full(batch, temperature, np.float32),
            noise=fly_jax.VerifyNoise(
                np.tile(np.array([1.0, 1e-3], np.float32), (batch, 1)), np.full((batch, 2), 0.5, np.float32)
            ),
            config=fly_jax.FlyConfig(1, 0.0),
            vocab_size=np.int32(V - 1),
        )
    )
    assert not result.natively_accepted[:, 0].any()
    assert result.natively_accepted[:, 1].all()
    assert (result.entropy[:, 0] >= 0).all()
    assert result.deferred[:, 0].all()


# Faults met elsewhere.


@pytest.mark.parametrize("options", [{}, sampling(2)], ids=["greedy", "sampling"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, -np.inf], ids=["NaN", "-NaN", "nothing"])
def test_invalid_row_gives_a_token_and_a_flag(options, bad):
    """vLLM 20531, 45060, 53029: an id outside the vocabulary, or no token."""
    rows = np.zeros((3, 7), np.float32)
    rows[:, 4] = 50
    rows[1] = bad
    result = one_request(*rows, drafts=[4, 4], config=fly_jax.FlyConfig(1, 0.0), **options)
    assert result.token_ids.tolist() == [[4, 0, -1]]
    assert result.invalid.tolist() == [True]
    rows[1, [2, 5]] = [1.0, 3.0]
    result = one_request(*rows, drafts=[4, 4], config=fly_jax.FlyConfig(1, 0.0), **options)
    assert result.token_ids.tolist() == [[4, 5, -1]]
    assert result.invalid.tolist() == [bool(np.isnan(bad))]


def test_invalid_row_leaves_others_alone():
    call = make_call(7)
    clean = jax.device_get(JOINED(**call))
    call["target_logits"][2] = np.nan
    call["draft_probs"][3] = np.nan
    result = jax.device_get(JOINED(**call))
    others = np.delete(np.arange(B), [2, 3])
    chex.assert_trees_all_equal(
        jax.tree.map(lambda leaf: leaf[others], result), jax.tree.map(lambda leaf: leaf[others], clean)
    )
    assert result.invalid.tolist() == [b == 2 for b in range(B)]


@pytest.mark.parametrize("q", [np.nan, None], ids=["NaN in q", "q equals p"])
def test_degenerate_residual_does_not_emit_the_rejected_token(q):
    """vLLM 41834: a NaN draft row re-emits the token that was just rejected."""
    rows = np.log(np.array([[0.25, 0.25, 0.5, 0.0]], np.float32) + 1e-45)
    probs = np.array([[[0.25, 0.25, 0.5, 0.0]]], np.float32)
    if q is not None:
        probs[0, 0, 0] = q
    # q equals p never rejects by itself; a u above 1 stands for rounding that does.
    options = sampling(1, u=1.5, final=1.0)
    result = one_request(*rows, *rows, drafts=[2], config=None, draft_probs=probs, **options)
    assert result.token_ids.tolist() == [[1, -1]]
    assert not result.invalid[0]


def test_zero_uniform_does_not_accept_an_excluded_token():
    """sglang 35771: u = 0 accepts what the target excludes."""
    rows = np.zeros((2, 4), np.float32)
    rows[0, 1] = -np.inf
    for draft_probs in (None, np.full((1, 1, 4), 0.25, np.float32)):
        result = one_request(*rows, drafts=[1], draft_probs=draft_probs, config=None, **sampling(1, u=0.0))
        assert result.num_accepted[0] == 0
        assert result.token_ids[0, 0] != 1
    rows[0, 1] = -200.0  # not excluded, but its probability is 0 in float32
    assert one_request(*rows, drafts=[1], config=None, **sampling(1, u=0.0)).num_accepted[0] == 0


@pytest.mark.parametrize("placeholder", [-1, -5, 7, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("options", [{}, sampling(3, u=1e-6)], ids=["greedy", "sampling"])
def test_placeholders_are_never_kept_or_read(placeholder, options):
    """vLLM 50939, and ids outside the vocabulary."""
    rows = np.zeros((4, 7), np.float32)
    rows[:, 4] = 9
    result = one_request(*rows, drafts=[4, placeholder, 4], config=fly_jax.FlyConfig(1, 0.0), **options)
    assert result.natively_accepted.tolist() == [[True, False, True]]
    assert result.num_accepted[0] == 1
    assert np.isnan(result.entropy).all()
    assert result.token_ids[0, 1] == 4


def test_columns_beyond_vocab_size_do_not_exist():
    """vLLM 55133: padded vocabularies."""
    rows = np.zeros((2, 8), np.float32)
    rows[:, 6] = 50
    rows[:, 7] = np.nan
    rows[:, 2] = 1
    for options in ({}, sampling(1)):
        result = one_request(*rows, drafts=[6], config=fly_jax.FlyConfig(1, 0.0), vocab_size=6, **options)
        assert result.num_accepted[0] == 0
        assert 0 <= result.token_ids[0, 0] < 6
        assert not result.invalid[0]


@pytest.mark.parametrize("mask", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}], ids=["top-k", "top-p", "min-p"])
def test_masked_tokens_are_never_accepted_or_deferred_to(mask):
    """vLLM 56724: drafts outside top-k and top-p."""
    rows = np.zeros((3, 7), np.float32)
    rows[:, 4], rows[:, 5] = 9, 8.95
    masks = {name: np.array([value], np.int32 if name == "top_k" else np.float32) for name, value in mask.items()}
    options = sampling(2, u=1e-7)
    config = fly_jax.FlyConfig(1, 0.0)
    result = one_request(*rows, drafts=[3, 4], config=config, **masks, **options)
    assert result.natively_accepted.tolist() == [[False, True]]
    assert result.num_accepted[0] == 0
    assert result.token_ids[0, 0] in (4, 5)
    unmasked = one_request(*rows, drafts=[3, 4], config=config, **sampling(2, u=0.9999))
    assert unmasked.natively_accepted.tolist() == [[False, False]]


def test_a_draft_the_draft_model_excludes_is_never_kept():
    rows = np.zeros((3, 4), np.float32)
    probs = np.tile(np.array([0.0, 0.5, 0.5, 0.0], np.float32), (1, 2, 1))
    result = one_request(
        *rows, drafts=[0, 1], draft_probs=probs, config=fly_jax.FlyConfig(1, 0.0), **sampling(2, u=1e-6)
    )
    assert result.natively_accepted.tolist() == [[False, True]]
    assert result.num_accepted[0] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_greedy_ties_go_to_the_lowest_index(dtype):
    """lattice 280."""
    rows = np.zeros((2, 1, 700), np.float32)
    rows[:, 0, [130, 131, 300, 699]] = 3
    logits = rows.transpose(1, 0, 2).astype(jnp.dtype(dtype))
    result = jax.device_get(fly_jax.fly_verify(logits, np.array([[130]], np.int32), config=None))
    assert result.token_ids.tolist() == [[130, 130]]
    result = jax.device_get(fly_jax.fly_verify(logits, np.array([[131]], np.int32), config=None))
    assert result.token_ids.tolist() == [[130, -1]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_widened_before_temperature(dtype):
    """DeepSpec 31: the same result as for the widened logits."""
    call = make_call(8)
    narrow = call["target_logits"].astype(jnp.dtype(dtype))
    result = jax.device_get(JOINED(**{**call, "target_logits": narrow}))
    wide = jax.device_get(JOINED(**{**call, "target_logits": narrow.astype(np.float32)}))
    chex.assert_trees_all_close(result, wide, atol=1e-6)


def test_standard_verification_of_nothing_drafted_is_plain_sampling():
    """A request without drafts gets exactly the bonus sample."""
    rows = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32))
    for final, token in ((0.05, 0), (0.15, 1), (0.5, 2), (0.9, 3)):
        result = one_request(*rows, drafts=[], config=None, **sampling(0, final=final))
        assert result.token_ids.tolist() == [[token]]
