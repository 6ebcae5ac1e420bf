"""Standard verification emits exactly the target distribution: chi-square with fixed seeds, and the float32 error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fly_jax
from fly_jax.decode.sampling import draft_token
from fly_jax.noise import verify_noise
from fly_jax.rule.emission import inverse_cdf

V, K = 16, 2
TRIALS, MANY_TRIALS, MOST_TRIALS = 10_000, 50_000, 200_000
SIGNIFICANCE = 1e-4  # seeds are fixed: a failure is a fault, not chance

MASKS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "min_p": 0.02, "top_k": 9, "top_p": 0.9},
}


def target_rows():
    """[K + 1, V] float32; the masks' cut-offs are far from every value."""
    return np.random.default_rng(5).normal(0, 1.5, (K + 1, V)).astype(np.float32)


def processed(logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """float64 probabilities of one row."""
    y = logits.astype(np.float64) / temperature
    p = np.exp(y - y.max())
    p[p < min_p * p.max()] = 0
    if top_k:
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    above = np.array([p[p > value].sum() for value in p])
    p[above >= top_p] = 0
    return p / p.sum()


def assert_distributed(tokens, p):
    """Chi-square of tokens against p; nothing may come out that p excludes."""
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    counts, expected = counts[p > 0], p[p > 0] * len(tokens)
    rare = expected < 10
    if rare.sum() > 1:
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(counts, expected).pvalue > SIGNIFICANCE


@functools.cache
def program(drafting):
    """One program for every mask: the parameters are per request."""

    @jax.jit
    def trial(keys, logits, draft_logits, options):
        def draft(i):
            # At position 0 the keys are the very ones that verify.
            position_keys = keys if i == 0 else jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.uint32(i))
            return draft_token(jnp.broadcast_to(draft_logits[i], (len(keys), V)), position_keys, temperature=1.0)

        shape = (len(keys), K, V)
        if drafting == "one-hot":
            drafts = {}
            ids = jnp.broadcast_to(jnp.argmax(draft_logits[:K], axis=1).astype(jnp.int32), shape[:2])
        else:
            drawn = [draft(i) for i in range(K)]
            ids = jnp.stack([token for token, _ in drawn], axis=1)
            drafts = {"draft_probs": jnp.stack([probs for _, probs in drawn], axis=1)}
        if drafting == "logits":
            drafts = {"draft_logits": jnp.broadcast_to(draft_logits[:K], shape), "draft_temperature": 1.0}
        target = jnp.broadcast_to(logits, (len(keys), K + 1, V))
        return fly_jax.fly_verify(target, ids, config=None, key=keys, **drafts, **options)

    return trial


def run(logits, draft_logits, drafting, masks, seed, trials):
    """Many requests with the same logits: token_ids [trials, K + 1] and num_tokens."""
    off = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    options = {name: np.full(trials, masks.get(name, value), np.float32) for name, value in off.items()}
    options["top_k"] = np.full(trials, masks.get("top_k", 0), np.int32)
    keys = jax.random.split(jax.random.key(seed), trials)
    result = jax.device_get(program(drafting)(keys, logits, draft_logits, options))
    return result.token_ids, result.num_tokens


def few_and_slow(many):
    """By default few trials, which show any fault but the smallest."""
    return [TRIALS, pytest.param(many, marks=pytest.mark.slow)]


CASES = [(drafting, mask) for drafting in ("one-hot", "probs") for mask in MASKS] + [("logits", "all")]


@pytest.mark.parametrize("trials", few_and_slow(MANY_TRIALS))
@pytest.mark.parametrize(("drafting", "mask"), CASES)
def test_standard_verification_emits_the_target_distribution(drafting, mask, trials):
    """The first token; the second wherever there is one; and that they are independent, as the rows are."""
    logits = target_rows()
    draft_logits = (logits + np.random.default_rng(11).normal(0, 1, logits.shape)).astype(np.float32)
    token_ids, num_tokens = run(logits, draft_logits, drafting, MASKS[mask], 1, trials)
    p = [processed(row, **MASKS[mask]) for row in logits]
    longer = token_ids[num_tokens >= 2]
    assert 0.1 < len(longer) / trials < 0.95
    assert_distributed(token_ids[:, 0], p[0])
    assert_distributed(longer[:, 1], p[1])
    pairs = np.zeros((V, V), np.int64)
    np.add.at(pairs, (longer[:, 0], longer[:, 1]), 1)
    often = trials / 100
    pairs = pairs[pairs.sum(1) > often][:, pairs.sum(0) > often]
    if len(pairs) > 1:  # with one-hot drafts the first of a longer pair is always the draft
        assert stats.chi2_contingency(pairs).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("trials", few_and_slow(MOST_TRIALS))
@pytest.mark.parametrize("drafting", ["probs", "logits"])
def test_drafting_and_verifying_share_request_keys_but_no_noise(drafting, trials):
    """A draft that ranks the tokens in the opposite order: a residual drawn with the draft's noise would show."""
    logits = np.tile(np.linspace(0, 2.5, V, dtype=np.float32), (K + 1, 1))
    token_ids, num_tokens = run(logits, logits[:, ::-1].copy(), drafting, {}, 2, trials)
    assert (num_tokens == 1).mean() > 0.3
    p = processed(logits[0])
    assert_distributed(token_ids[:, 0], p)
    assert_distributed(token_ids[num_tokens >= 2, 1], p)


GRID = 2**23  # the uniforms are j / GRID, j = 1 .. GRID


def shares(pick, outcomes, groups):
    """The share of the grid that `pick` sends to each outcome of its group; `pick` is monotone in the uniform."""
    low, high = np.zeros(len(outcomes), np.int64), np.full(len(outcomes), GRID)  # the last grid point up to each
    while (low < high).any():
        middle = (low + high + 1) // 2
        below = pick((middle / GRID).astype(np.float32)) <= outcomes
        low, high = np.where(below, middle, low), np.where(below, high, middle - 1)
    before = np.where(np.diff(groups, prepend=-1) > 0, 0, np.roll(low, 1))
    return (low - before) / GRID


def total_variation(logits):
    """Exact: between softmax in float64, and what the package's sampler does with every pair of grid uniforms."""
    exact = processed(logits)
    weights = jax.nn.softmax(jnp.asarray(logits))
    sample = jax.jit(lambda uniforms: inverse_cdf(jnp.broadcast_to(weights, (len(uniforms), len(logits))), uniforms)[0])
    columns = np.arange(len(logits))
    blocks = columns // 128

    def pick_block(u):
        return np.asarray(sample(np.stack([u, np.ones_like(u)], axis=1))) // 128

    block = np.unique(blocks)
    block_share = shares(pick_block, block, np.zeros_like(block))
    # A uniform in the middle of each block's share, and then the columns inside: all blocks at once.
    middle = (np.cumsum(block_share) - block_share / 2).astype(np.float32)[blocks]

    def pick_column(u):
        token = np.asarray(sample(np.stack([middle, u], axis=1)))
        assert (token // 128 == blocks).all()
        return token

    share = block_share[blocks] * shares(pick_column, columns, blocks)
    return 0.5 * np.abs(share - exact).sum()


@pytest.mark.parametrize("vocab", [16, pytest.param(600, marks=pytest.mark.slow)])
def test_float32_sampling_error_is_a_rounding_of_the_edges(vocab, report):
    """Half a grid step, and as much for the sums, at each edge between blocks and between the columns of one."""
    rng = np.random.default_rng(vocab)
    worst = max(total_variation(rng.normal(0, scale, vocab).astype(np.float32)) for scale in (0.5, 3))
    report(f"V = {vocab}: total variation {worst:.1e}")
    edges = min(vocab, 128) + -(-vocab // 128)
    assert worst < edges / GRID / 2


def test_uniforms_are_on_the_grid_the_bound_assumes():
    """(0, 1] in steps of 2**-23, so that u = 0 cannot accept everything and 1 - u cannot be 0."""
    noise = jax.device_get(verify_noise(jax.random.split(jax.random.key(0), 4000), 16))
    for uniform in (noise.uniform, noise.final_uniform):
        assert uniform.min() > 0
        assert uniform.max() <= 1
        np.testing.assert_array_equal(uniform * 2**23, np.round(uniform * 2**23))
    assert stats.kstest(noise.uniform.ravel(), "uniform").pvalue > SIGNIFICANCE
    assert stats.kstest(noise.final_uniform.ravel(), "uniform").pvalue > SIGNIFICANCE
    flat = np.concatenate([noise.uniform, noise.final_uniform], axis=1)
    correlation = np.corrcoef(flat.T) - np.eye(flat.shape[1])
    assert np.abs(correlation).max() < 0.08
