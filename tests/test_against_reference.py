"""`fly_verify` against the plain-numpy restatement of the rule: fixed shapes, free values."""

import collections
import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import FULL_COMPILATION

import fly_jax

B = 4


@dataclasses.dataclass(frozen=True)
class Mode:
    """Everything that is static in one compiled program."""

    name: str
    vocab: int
    num_drafts: int
    window: int | None  # None: standard verification
    entropy_top_k: int = 3
    dtype: str = "float32"
    drafts: str = "one-hot"  # or "probs", "logits"
    draft_vocab: int | None = None
    noise: str | None = None  # None: greedy, no temperature at all; "uniform", "gumbel", "v2"
    masks: bool = False
    vocab_size: bool = False
    draft_temperature: bool = False
    examples: int = 80


MODES = [
    Mode("greedy", 17, 4, 1),
    Mode("greedy, bf16, two windows, vocab_size", 130, 6, 2, 5, "bfloat16", vocab_size=True),
    Mode("greedy, f16, window as long as the draft", 17, 3, 3, 1, "float16"),
    Mode("greedy, one draft, k above V", 5, 1, 1, 9),
    Mode("target-only, masks", 17, 4, 1, noise="uniform", masks=True),
    Mode(
        "target-only, bf16, masks, vocab_size", 300, 6, 2, 5, "bfloat16", noise="uniform", masks=True, vocab_size=True
    ),
    Mode("target-only, f16, standard, Gumbel", 130, 3, None, dtype="float16", noise="gumbel"),
    Mode("target-only, vLLM V2's noise", 17, 4, 1, noise="v2", masks=True),
    Mode("draft probabilities, masks", 17, 4, 1, drafts="probs", noise="uniform", masks=True),
    Mode("draft probabilities, bf16, Gumbel", 130, 6, 2, 130, "bfloat16", "probs", noise="gumbel", masks=True),
    Mode("draft probabilities, standard, short drafts vocabulary", 17, 3, None, 3, "float32", "probs", 13, "uniform"),
    Mode("draft logits, masks", 17, 4, 1, drafts="logits", noise="uniform", masks=True),
    Mode(
        "draft logits, f16, long draft vocabulary, vocab_size",
        17,
        4,
        1,
        3,
        "float16",
        "logits",
        23,
        "gumbel",
        False,
        True,
    ),
    Mode(
        "draft logits, short draft vocabulary, own temperature",
        140,
        4,
        1,
        3,
        "float32",
        "logits",
        131,
        "uniform",
        draft_temperature=True,
    ),
    Mode(
        "draft logits, vLLM V2's noise, own temperature", 17, 4, 1, drafts="logits", noise="v2", draft_temperature=True
    ),
]

temperatures = st.sampled_from([1.0, 0.5, 2.0, 0.0, 1e-5, 9e-6, 0.01, 100.0, -1.0, np.inf, np.nan]) | st.floats(0.1, 3)
thresholds = st.sampled_from([0.0, 0.0, 0.3, 1.0, np.inf, np.nan]) | st.floats(0, 2)
top_ps = st.sampled_from([1.0, 1.5, np.nan, 0.0, -0.5]) | st.floats(0.5, 1)
min_ps = st.sampled_from([0.0, -0.5, np.nan, 1.0, 1.5]) | st.floats(0.001, 0.3)
# Nothing below float32's normal range: XLA flushes it to zero and numpy does not.
odd_logits = st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 7.0, 65504.0, -65504.0, 3e38, -3e38])


def per_request(elements):
    return st.lists(elements, min_size=B, max_size=B)


@st.composite
def calls(draw, mode):
    """The keyword arguments of one `fly_verify` call, numpy arrays all of them."""
    V, K = mode.vocab, mode.num_drafts
    Vd = mode.draft_vocab or V
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sharpness = draw(st.sampled_from([1.0, 0.1, 4.0, 30.0]))
    logits = rng.normal(0, sharpness, (B, K + 1, V)).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    for b, i, j, value in draw(st.lists(places(K + 1, V, odd_logits), max_size=4)):
        logits[b, i, j] = value
    for b, i, _, value in draw(st.lists(places(K + 1, V, odd_logits), max_size=1)):
        logits[b, i] = value
    with np.errstate(over="ignore"):
        logits = logits.astype(jnp.dtype(mode.dtype))

    # Drafts that the target often agrees with, so that windows close.
    likely = np.argsort(-np.nan_to_num(logits[:, :K].astype(np.float32)), axis=-1, kind="stable")
    rank = np.minimum(rng.geometric(draw(st.sampled_from([0.8, 0.5, 0.95])), (B, K)) - 1, V - 1)
    draft_token_ids = np.take_along_axis(likely, rank[..., None], axis=-1)[..., 0].astype(np.int32)
    odd_ids = st.sampled_from([-1, -5, V - 1, V, V + 7, Vd, 2**31 - 1, -(2**31)])
    for b, i, _, value in draw(st.lists(places(K, V, odd_ids), max_size=3)):
        draft_token_ids[b, i] = value

    call = {
        "target_logits": logits,
        "draft_token_ids": draft_token_ids,
        "num_draft_tokens": np.array(
            draw(per_request(st.sampled_from([K, K, K, K + 3, -2]) | st.integers(0, K))), np.int32
        ),
        "config": None,
    }
    if mode.window is not None:
        theta = np.array(draw(per_request(thresholds)), np.float32)
        call["config"] = fly_jax.FlyConfig(mode.window, jnp.asarray(theta), mode.entropy_top_k)
    if mode.vocab_size:
        call["vocab_size"] = np.int32(draw(st.sampled_from([V, V + 9, V // 2, 1]) | st.integers(V - 3, V)))
    if mode.noise is None:
        return call

    call["temperature"] = np.array(draw(per_request(temperatures)), np.float32)
    if mode.masks:
        call["top_k"] = np.array(draw(per_request(st.sampled_from([0, -1, V + 2, 4]) | st.integers(1, V))), np.int32)
        call["top_p"] = np.array(draw(per_request(top_ps)), np.float32)
        call["min_p"] = np.array(draw(per_request(min_ps)), np.float32)
    if mode.drafts != "one-hot":
        draft = np.zeros((B, K, Vd), np.float32)
        shared = min(V, Vd)
        draft[..., :shared] = np.nan_to_num(logits[:, :K, :shared].astype(np.float32), posinf=9, neginf=-9).clip(
            -30, 30
        )
        draft += rng.normal(0, draw(st.sampled_from([0.5, 2.0])), draft.shape).astype(np.float32)
        odd = odd_logits
        if mode.drafts == "probs":
            draft = np.exp(draft - draft.max(-1, keepdims=True))
            draft[draft < 1e-30] = 0
            draft /= draft.sum(-1, keepdims=True)
            odd = st.sampled_from([0.0, 1.0, np.nan, -np.nan, np.inf])
        for b, i, j, value in draw(st.lists(places(K, Vd, odd), max_size=3)):
            draft[b, i, j] = value
        call[f"draft_{mode.drafts}"] = draft
    if mode.draft_temperature:
        call["draft_temperature"] = np.array(draw(per_request(temperatures)), np.float32)
    call["noise"] = draw(noises(mode, rng))
    return call


def places(rows, columns, values):
    return st.tuples(st.integers(0, B - 1), st.integers(0, rows - 1), st.integers(0, columns - 1), values)


@st.composite
def noises(draw, mode, rng):
    K = mode.num_drafts
    if mode.noise == "v2":
        word = lambda *shape: rng.integers(0, 2**32, shape, dtype=np.uint32)  # noqa: E731
        return fly_jax.VllmV2Noise(word(B, 2), word(B, K + 1, 2))
    leniency = draw(st.sampled_from([1, 4]))  # windows close more often where u is small
    uniform = ((1 - rng.random((B, K))) ** leniency).astype(np.float32)
    for b, i, _, value in draw(st.lists(places(K, 1, st.sampled_from([0.0, 1.0, 1e-30])), max_size=3)):
        uniform[b, i] = value
    if mode.noise == "gumbel":
        return fly_jax.VerifyNoise(uniform, gumbel=rng.gumbel(size=(B, mode.vocab)).astype(np.float32))
    final_uniform = (1 - rng.random((B, 2))).astype(np.float32)
    for b, i, _, value in draw(st.lists(places(2, 1, st.sampled_from([0.0, 1.0, 1e-30])), max_size=2)):
        final_uniform[b, i] = value
    return fly_jax.VerifyNoise(uniform, final_uniform=final_uniform)


def check(verify, call, counts):
    result = jax.device_get(verify(**call))
    for b, request in enumerate(reference.requests(**call)):
        expected = reference.verify(request)
        counts["requests"] += 1
        counts["deferrals"] += int(expected.deferred.sum())
        counts["invalid"] += expected.invalid
        counts["rejected"] += expected.num_accepted < min(max(request.num_drafts, 0), len(request.drafts))
        if expected.margin < 1:
            counts["near-ties"] += 1
        else:
            reference.compare(result, expected, b)


# What only these have is in other modes, in the golden replay or in the tests of the kernels too.
SLOW_MODES = {
    "greedy, one draft, k above V",
    "draft probabilities, bf16, Gumbel",
    "target-only, masks",
    "draft probabilities, standard, short drafts vocabulary",
    "draft logits, f16, long draft vocabulary, vocab_size",
}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, id=mode.name, marks=pytest.mark.slow if mode.name in SLOW_MODES else ()) for mode in MODES],
)
def test_fly_verify_matches(mode, count_traces, report):
    verify, traces = count_traces(fly_jax.fly_verify)
    counts = collections.Counter()

    @hypothesis.settings(max_examples=mode.examples)
    @hypothesis.given(calls(mode))
    def run(call):
        check(verify, call, counts)

    run()
    report(", ".join(f"{count} {what}" for what, count in counts.items()))
    assert counts["near-ties"] <= 0.08 * counts["requests"]
    assert counts["rejected"] > 0
    assert counts["invalid"] > 0
    if mode.window is not None and mode.window < mode.num_drafts:
        assert counts["deferrals"] > 0
    assert len(traces) == 1


ROWS_MODES = [
    Mode("greedy", 17, 4, 1, vocab_size=True),
    Mode("draft probabilities", 17, 4, 1, drafts="probs", noise="uniform"),
]


@pytest.mark.parametrize(
    ("mode", "bonus"),
    [
        pytest.param(ROWS_MODES[0], False, id="greedy-bonus row"),
        pytest.param(ROWS_MODES[0], True, id="greedy-bonus token", marks=pytest.mark.slow),
        pytest.param(ROWS_MODES[1], False, id="draft probabilities-bonus row", marks=pytest.mark.slow),
        pytest.param(ROWS_MODES[1], True, id="draft probabilities-bonus token"),
    ],
)
def test_fly_verify_rows_matches(mode, bonus, count_traces, report):
    """Rows in any order, entries that are not needed pointing nowhere, rows that nobody owns full of NaN."""
    verify, traces = count_traces(fly_jax.fly_verify_rows)
    K, V = mode.num_drafts, mode.vocab
    counts = collections.Counter()

    @hypothesis.settings(max_examples=40)
    @hypothesis.given(calls(mode), st.permutations(range(B * (K + 1) + 3)), per_request(st.integers(0, V + 5)))
    def run(call, order, bonus_tokens):
        order = np.array(order, np.int32)[: B * (K + 1)].reshape(B, K + 1)
        logits = np.full((B * (K + 1) + 3, V), np.nan, np.float32)
        logits[order] = call["target_logits"]
        n = np.clip(call["num_draft_tokens"], 0, K)[:, None]
        needed = np.arange(K + 1)[None] < (n if bonus else n + 1)
        junk = np.array([-7, 10**6, 0, -(2**31), 2**31 - 1], np.int32)
        rows = {
            **{name: value for name, value in call.items() if name not in ("target_logits", "draft_probs")},
            "target_logits": logits,
            "row_index": np.where(needed, order, np.resize(junk, (B, K + 1))),
            "bonus_token_ids": np.array(bonus_tokens, np.int32) if bonus else None,
        }
        if mode.drafts == "probs":
            rows["draft_probs"] = call["draft_probs"].reshape(B * K, -1)
            rows["draft_row_index"] = np.arange(B * K, dtype=np.int32).reshape(B, K)
        result = jax.device_get(verify(**rows))
        for b, request in enumerate(reference.requests(**call)):
            if bonus:
                request.bonus_token = bonus_tokens[b]
            expected = reference.verify(request)
            counts["requests"] += 1
            counts["near-ties"] += expected.margin < 1
            if expected.margin >= 1:
                reference.compare(result, expected, b)

    run()
    report(f"{counts['near-ties']} near-ties of {counts['requests']} requests")
    assert counts["near-ties"] <= 0.08 * counts["requests"]
    assert len(traces) == 1


LONG_ROWS = {"greedy": (50257, False), "sampling": (50257, True), "whole blocks": (65536, False)}
LONG_ROWS_BY_DEFAULT = {("greedy", "float32"), ("sampling", "bfloat16")}


@pytest.mark.parametrize(
    ("vocab", "sampling", "dtype"),
    [
        pytest.param(
            *case, dtype, id=f"{name}-{dtype}", marks=() if (name, dtype) in LONG_ROWS_BY_DEFAULT else pytest.mark.slow
        )
        for dtype in ("float32", "bfloat16", "float16")
        for name, case in LONG_ROWS.items()
    ],
)
def test_long_rows(vocab, sampling, dtype):
    """XLA's CPU maximum loses NaN in long rows, by sign and position; nothing may be accepted there."""
    rng = np.random.default_rng(vocab)
    K, W = 2, 1
    batch = 12
    logits = rng.normal(0, 2, (batch, K + 1, vocab)).astype(np.float32)
    logits[:, :, 77] = 30.0
    columns = [0, 1, 127, 128, 5000, 31999, vocab // 2, vocab - 129, vocab - 128, vocab - 2, vocab - 1]
    for b, column in enumerate(columns):
        logits[b, 0, column] = np.copysign(np.nan, 1 if b % 2 else -1)
    call = {
        "target_logits": logits.astype(jnp.dtype(dtype)),
        "draft_token_ids": np.full((batch, K), 77, np.int32),
        "config": fly_jax.FlyConfig(W, 0.0),
    }
    if sampling:
        call["temperature"] = np.full(batch, 1.0, np.float32)
        call["noise"] = fly_jax.VerifyNoise(np.full((batch, K), 0.5, np.float32), np.full((batch, 2), 0.5, np.float32))
    result = jax.device_get(jax.jit(fly_jax.fly_verify, compiler_options=FULL_COMPILATION)(**call))
    for b, request in enumerate(reference.requests(**call)):
        expected = reference.verify(request)
        assert expected.invalid == (b < len(columns))
        reference.compare(result, expected, b)


@pytest.mark.parametrize(("batch", "num_drafts"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_nothing_to_verify(batch, num_drafts, sampling):
    rng = np.random.default_rng(0)
    call = {
        "target_logits": rng.normal(size=(batch, num_drafts + 1, 17)).astype(np.float32),
        "draft_token_ids": np.zeros((batch, num_drafts), np.int32),
        "config": fly_jax.FlyConfig(1),
    }
    if sampling:
        call["temperature"] = np.ones(batch, np.float32)
        call["noise"] = fly_jax.VerifyNoise(
            np.full((batch, num_drafts), 0.5, np.float32), np.full((batch, 2), 0.25, np.float32)
        )
    result = jax.device_get(fly_jax.fly_verify(**call))
    assert result.token_ids.shape == (batch, num_drafts + 1)
    assert result.entropy.shape == result.deferred.shape == result.natively_accepted.shape == (batch, num_drafts)
    for b, request in enumerate(reference.requests(**call)):
        reference.compare(result, reference.verify(request), b)


def test_no_rows_at_all():
    result = fly_jax.fly_verify_rows(
        np.zeros((0, 17), np.float32), np.zeros((0, 4), np.int32), np.zeros((0, 3), np.int32)
    )
    assert result.token_ids.shape == (0, 4)
