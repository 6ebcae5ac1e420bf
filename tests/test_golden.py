"""Every recorded request of vLLM 0.33.0 (tests/data), token for token, but for the listed differences."""

import collections

import chex
import golden
import jax
import numpy as np
import pytest
import reference

import fly_jax

B, K, N = 5, 8, 45  # every case fits: at most 5 requests of at most 8 drafts and their bonus rows
VOCAB_BUCKETS = (200, 10000)  # `vocab_size` is traced: what lies beyond a case's own columns is NaN
# W and k are static, in 31 combinations, and so is whether there is a draft array. All but the slowest variant of the
# test compile only these as target-only; other one-hot drafts are given as one-hot distributions, which must be the
# same. That leaves 39 programs of (vocabulary, whether there is an array, W, k) for each version.
TARGET_ONLY = {(0, 3), (1, 3), (2, 3), (6, 3)}
# By default a dozen: every W, every k, and every kind of draft and vocabulary among them.
BY_DEFAULT = {(200, False, window, k) for window, k in TARGET_ONLY} | {
    (200, True, 0, 3),
    (200, True, 1, 3),
    (200, True, 2, 10000),
    (200, True, 3, 5),
    (200, True, 4, 1),
    (200, True, 5, 2),
    (200, True, 6, 3),
    (10000, True, 1, 10000),
}
# What the noise of v2 changes needs no other W or k.
OF_V2_TOO = {(200, False, 0, 3), (200, False, 2, 3), (200, True, 1, 3), (200, True, 3, 5), (10000, True, 1, 10000)}
NAN = np.float32(np.nan)
JUNK = 10**6  # fills the entries that must not be read

OUTSIDE = "id outside the vocabulary"
NEAR_TIE = "near-tie of float rounding, p == u among them"
PLACEHOLDER = "placeholder with draft probabilities"
ZERO_Q = "q = 0"

# How many requests may differ, by the one reason they are listed under (semantics section 7).
ELIGIBLE = {
    "v1": {OUTSIDE: 12, NEAR_TIE: 31, PLACEHOLDER: 20},
    "v2": {OUTSIDE: 12, NEAR_TIE: 23, ZERO_Q: 18},
}


def listed_difference(case, b):
    """Why a request may differ from vLLM's output, or None."""
    drafts = case.drafts_of(b)
    if (drafts >= case.vocab).any():
        return OUTSIDE
    if case.near_tie(b):
        return NEAR_TIE
    probabilistic = case.has_draft and case.temperature[b] > 0
    if case.version == "v1" and probabilistic and (drafts < 0).any():
        return PLACEHOLDER
    if case.version == "v2" and probabilistic:
        n = len(drafts)
        q = case.draft_logits[b, np.arange(n), np.maximum(drafts, 0)]
        if (np.isneginf(q) & (drafts >= 0)).any():
            return ZERO_Q
    return None


def compare(cases, tokens_of, report):
    """`tokens_of(case)` -> a token list per request; how many requests there were, and how many listed ones of each."""
    eligible, differing, requests = collections.Counter(), collections.Counter(), 0
    wrong = []
    for case in cases:
        for b, tokens in enumerate(tokens_of(case)):
            requests += 1
            reason = listed_difference(case, b)
            eligible[reason] += reason is not None
            if list(tokens) != case.expected_of(b).tolist():
                differing[reason] += 1
                if reason is None:
                    wrong.append((case.index, case.tag, b, list(tokens), case.expected_of(b).tolist()))
    for reason, count in sorted((+eligible).items()):
        report(f"{differing[reason]} of {count} listed requests differ: {reason}")
    report(f"{requests - sum(eligible.values())} of {requests} requests had to match and {len(wrong)} did not")
    assert wrong == []
    return requests, +eligible


def round_up(u):
    """float64 -> float32 that is not below: `ratio >= u` is unchanged for a float32 ratio."""
    narrow = u.astype(np.float32)
    return np.where(narrow < u, np.nextafter(narrow, np.float32(np.inf)), narrow)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_reference_matches(version, report):
    def tokens_of(case):
        return [reference.verify(as_request(case, b)).tokens for b in range(case.batch)]

    assert compare(golden.load(version), tokens_of, report) == (1259, ELIGIBLE[version])


def as_request(case, b):
    n = int(case.num_draft_tokens[b])
    drafts = slice(case.draft_start[b], case.draft_start[b + 1])
    rows = slice(case.row_start[b], case.row_start[b + 1])
    sampling = case.temperature[b] > 0
    request = reference.Request(
        logits=case.target_logits[rows],
        drafts=case.drafts_of(b),
        num_drafts=n,
        window=case.window or None,
        threshold=case.threshold,
        entropy_top_k=case.entropy_top_k,
        temperature=1.0 if sampling else 0.0,  # recorded after temperature
    )
    if case.version == "v1":
        request.bonus_token = int(case.bonus_token_ids[b])
        request.uniform = round_up(case.uniform[drafts])
        request.gumbel = -np.log(case.q[b])
        if case.has_draft:
            request.draft_probs = case.draft_probs[drafts]
    else:
        request.seed, request.positions = int(case.seed[b]), case.pos[rows]
        if case.has_draft and sampling:
            request.draft_logits, request.draft_temperature = case.draft_logits[b, :n], float(case.temperature[b])
    return request


def padded(array, shape, fill):
    out = np.full(shape, fill, array.dtype)
    out[tuple(slice(size) for size in array.shape)] = array
    return out


def words(values):
    """int64 -> [..., 2] uint32: low, high."""
    bits = values.astype(np.int64).view(np.uint64)
    return np.stack([bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)], axis=-1).astype(np.uint32)


def bucket(case):
    return next(vocab for vocab in VOCAB_BUCKETS if case.vocab <= vocab)


def call(verify, case, as_array):
    """One padded call; what lies outside the case is NaN or junk. `as_array`: one-hot drafts are given as an array."""
    vocab = bucket(case)
    row_index = np.full((B, K + 1), JUNK, np.int32)
    draft_token_ids = np.full((B, K), JUNK, np.int32)
    uniform = np.full((B, K), np.nan, np.float32)
    position = np.full((B, K + 1, 2), JUNK, np.uint32)
    for b, n in enumerate(case.num_draft_tokens):
        rows = np.arange(case.row_start[b], case.row_start[b + 1])
        row_index[b, : len(rows)] = rows
        draft_token_ids[b, :n] = case.drafts_of(b)
        if case.version == "v1":
            uniform[b, :n] = round_up(case.uniform[case.draft_start[b] : case.draft_start[b + 1]])
        else:
            position[b, : n + 1] = words(case.pos[rows])
    sampling = padded(case.temperature, (B,), 0) > 0
    options = {
        "config": None,
        "num_draft_tokens": padded(case.num_draft_tokens, (B,), 0),
        "temperature": sampling.astype(np.float32),  # recorded after temperature
        "vocab_size": np.int32(case.vocab),
    }
    if case.window:
        options["config"] = fly_jax.FlyConfig(case.window, np.float32(case.threshold), case.entropy_top_k)
    if case.version == "v1":
        options["noise"] = fly_jax.VerifyNoise(uniform, gumbel=-np.log(padded(case.q, (B, vocab), 1)))
        options["bonus_token_ids"] = padded(case.bonus_token_ids, (B,), 0)
        if case.has_draft:
            options["draft_probs"] = padded(case.draft_probs, (N, vocab), np.nan)
        elif as_array:
            one_hot = case.draft_token_ids[:, None] == np.arange(case.vocab)
            options["draft_probs"] = padded(one_hot.astype(np.float32), (N, vocab), np.nan)
    else:
        options["noise"] = fly_jax.VllmV2Noise(padded(words(case.seed), (B, 2), 0), position)
        if case.has_draft or as_array:
            logits = padded(case.draft_logits, (B, K, vocab), np.nan) if case.has_draft else np.full((B, K, vocab), NAN)
            options["draft_logits"] = logits.reshape(B * K, vocab)
            options["draft_row_index"] = np.arange(B * K, dtype=np.int32).reshape(B, K)
            # A draft temperature of 0 says that the request's drafts were greedy: one-hot.
            options["draft_temperature"] = padded(case.temperature, (B,), 0) * case.has_draft
    return verify(padded(case.target_logits, (N, vocab), np.nan), row_index, draft_token_ids, **options)


def program(case, as_array):
    return bucket(case), case.has_draft or as_array, case.window, case.entropy_top_k


def given_as_array(case):
    return (case.window, case.entropy_top_k) not in TARGET_ONLY


def replay(cases, as_array, report, count_traces):
    """Each case through `fly_verify_rows`, compiled once for each program; what `compare` returns."""
    verify, traces = count_traces(fly_jax.fly_verify_rows)
    programs = {program(case, as_array(case)) for case in cases}

    def tokens_of(case):
        result = jax.device_get(call(verify, case, as_array(case)))
        chex.assert_trees_all_equal(result.num_tokens, result.num_accepted + 1)
        assert (result.num_accepted <= padded(case.num_draft_tokens, (B,), 0)).all()
        assert not result.invalid[: case.batch].any()
        check_recorded_details(case, result)
        return [result.token_ids[b, : result.num_tokens[b]].tolist() for b in range(case.batch)]

    found = compare(cases, tokens_of, report)
    assert len(traces) == len(programs)
    return found


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_fly_verify_rows_matches(version, report, count_traces):
    programs = BY_DEFAULT & OF_V2_TOO if version == "v2" else BY_DEFAULT
    cases = [case for case in golden.load(version) if program(case, given_as_array(case)) in programs]
    assert {program(case, given_as_array(case)) for case in cases} == programs
    requests, listed = replay(cases, given_as_array, report, count_traces)
    assert requests == {"v1": 511, "v2": 221}[version]
    assert listed.keys() == ELIGIBLE[version].keys()


@pytest.mark.slow
@pytest.mark.parametrize("as_array", [True, False], ids=["one-hot arrays", "target-only"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_every_recorded_request_matches(version, as_array, report, count_traces):
    given = given_as_array if as_array else lambda case: False
    assert replay(golden.load(version), given, report, count_traces) == (1259, ELIGIBLE[version])


def check_recorded_details(case, result):
    """vLLM's own entropies and deferrals, which its tokens show only in part."""
    for b, n in enumerate(case.num_draft_tokens):
        if not case.window or listed_difference(case, b) is not None:
            continue
        reported = result.entropy[b, :n]
        seen = ~np.isnan(reported)
        recorded = case.entropy[case.row_start[b] : case.row_start[b] + n]
        np.testing.assert_allclose(reported[seen], recorded[seen], atol=2e-5)
        if case.version == "v1":
            recorded = case.deferred[case.draft_start[b] : case.draft_start[b] + n]
            in_prefix = np.arange(n) < result.num_accepted[b]
            np.testing.assert_array_equal(result.deferred[b, :n], recorded & in_prefix)
            np.testing.assert_array_equal(seen & (reported >= np.float32(case.threshold)), recorded)


def test_bonus_token_of_the_caller_goes_through_as_it_is():
    """V1 samples the bonus itself; whatever it passes is what is emitted, for requests that keep every draft."""
    logits = np.zeros((1, 4), np.float32)
    logits[0, 2] = 1.0
    result = fly_jax.fly_verify_rows(
        logits, np.array([[0, JUNK]], np.int32), np.array([[2]], np.int32), bonus_token_ids=np.array([77], np.int32)
    )
    assert result.token_ids.tolist() == [[2, 77]]
