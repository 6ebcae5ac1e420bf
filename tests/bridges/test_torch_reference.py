"""The plain-torch path against vLLM's recorded outputs and the NumPy restatement of the rule."""

import collections
import subprocess
import sys
import types

import golden
import numpy as np
import pytest
import reference
import test_golden

torch = pytest.importorskip("torch")
from fly_jax.bridges.torch_reference import verify_request, verify_rows  # noqa: E402

pytestmark = pytest.mark.torch

INF = np.inf


def fly(window_size=1, entropy_threshold=0.3, entropy_top_k=3):
    return types.SimpleNamespace(
        window_size=window_size, entropy_threshold=entropy_threshold, entropy_top_k=entropy_top_k
    )


def recorded_call(case):
    """The arguments of `verify_rows`, but for V2's Gumbel noise."""
    config = fly(case.window, case.threshold, case.entropy_top_k) if case.window else None
    sampling = case.temperature > 0
    drafts = np.concatenate([case.drafts_of(b) for b in range(case.batch)])
    call = {
        "target_logits": torch.tensor(case.target_logits),
        "draft_token_ids": torch.tensor(drafts),
        "num_draft_tokens": case.num_draft_tokens.tolist(),
        "config": config,
        "temperature": torch.tensor(sampling.astype(np.float32)),  # recorded after temperature
    }
    if case.version == "v1":
        call["bonus_token_ids"] = torch.tensor(case.bonus_token_ids)
        call["uniform"] = torch.tensor(case.uniform)
        call["gumbel"] = -torch.tensor(case.q).log()
        if case.has_draft:
            call["draft_probs"] = torch.tensor(case.draft_probs)
        return call
    rows = np.concatenate([np.arange(case.row_start[b], case.row_start[b + 1] - 1) for b in range(case.batch)])
    call["uniform"] = torch.tensor(case.u[rows])
    call["gumbel"] = torch.zeros(case.batch, case.vocab)
    if case.has_draft:
        logits = np.concatenate([case.draft_logits[b, :n] for b, n in enumerate(case.num_draft_tokens)])
        call["draft_logits"] = torch.tensor(logits)
        call["draft_temperature"] = torch.tensor(case.temperature)
    return call


def verify_recorded(case):
    call = recorded_call(case)
    results = verify_rows(**call)
    if case.version == "v1":
        return results
    # V2 has its noise by position, so the accepted length, which no Gumbel noise touches, says which.
    for b in np.flatnonzero(case.temperature > 0):
        position = int(case.pos[case.row_start[b] + results[b].num_accepted])
        call["gumbel"][b] = torch.tensor(reference.murmur_gumbel(int(case.seed[b]), position, case.vocab))
    return verify_rows(**call)


def check_recorded_details(case, b, result):
    if test_golden.listed_difference(case, b) is not None or not case.window:
        return
    n = case.num_draft_tokens[b]
    recorded = case.entropy[case.row_start[b] : case.row_start[b] + n]
    np.testing.assert_allclose(result.entropy, recorded, atol=2e-5)
    if case.version == "v1":
        recorded = case.deferred[case.draft_start[b] : case.draft_start[b] + n]
        assert result.deferred == (recorded & (np.arange(n) < result.num_accepted)).tolist()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_recorded_requests_match(version, report):
    def tokens_of(case):
        results = verify_recorded(case)
        for b, result in enumerate(results):
            assert not result.invalid
            assert len(result.token_ids) == result.num_accepted + 1
            check_recorded_details(case, b, result)
        return [result.token_ids for result in results]

    found = test_golden.compare(golden.load(version), tokens_of, report)
    assert found == (1259, test_golden.ELIGIBLE[version])


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_margins_are_those_recorded(version):
    """Where a sampling request's decision was a quotient's, the margin is vLLM's own."""
    compared = 0
    for case in golden.load(version):
        for b, result in enumerate(verify_rows(**recorded_call(case))):
            rows = slice(case.draft_start[b], case.draft_start[b + 1])
            if case.temperature[b] > 0 and test_golden.listed_difference(case, b) is None:
                ours, theirs = np.array(result.acceptance_margin), case.margin_accept[rows]
                seen = np.isfinite(ours) & (theirs < 20)
                np.testing.assert_allclose(ours[seen], theirs[seen], atol=1e-4, rtol=1e-4)
                compared += seen.sum()
            if case.window and test_golden.listed_difference(case, b) is None:
                np.testing.assert_allclose(result.entropy_margin, case.margin_entropy[rows], atol=2e-5)
    assert compared > 1000


K = 5
ODD_LOGITS = [np.nan, INF, -INF, 0.0, 7.0, 3e38, -3e38]
TEMPERATURES = [0.0, 1.0, 0.5, 1.7, 1e-5, 9e-6, 0.01, 100.0, INF, np.nan, -1.0]


def random_call(rng, vocab, draft_vocab, batch, drafts):
    """Flattened numpy arguments of `verify_rows`, with the rule's corners among them."""
    choice = lambda values, size=None: rng.choice(np.array(values), size)  # noqa: E731
    counts = rng.integers(0, K + 1, batch)
    total = int(counts.sum())
    has_bonus_ids = bool(rng.random() < 0.3)
    num_rows = total if has_bonus_ids else total + batch
    logits = rng.normal(0, choice([1.0, 0.1, 4.0, 30.0]), (num_rows, vocab)).astype(np.float32)
    if rng.random() < 0.5:
        logits = np.round(logits)
    for row in np.flatnonzero(rng.random(num_rows) < 0.05):
        logits[row, rng.integers(vocab)] = choice(ODD_LOGITS)
    for row in np.flatnonzero(rng.random(num_rows) < 0.01):
        logits[row] = choice(ODD_LOGITS)
    request = np.repeat(np.arange(batch), counts)
    draft_rows = np.arange(total) + (0 if has_bonus_ids else request)
    likely = np.argsort(-np.nan_to_num(logits[draft_rows]), axis=-1, kind="stable")
    ids = likely[np.arange(total), np.minimum(rng.geometric(choice([0.5, 0.8, 0.95]), total) - 1, vocab - 1)]
    odd = rng.random(total) < 0.05
    ids[odd] = choice([-1, -5, vocab, vocab + 7, draft_vocab - 1], int(odd.sum()))
    call = {
        "target_logits": logits,
        "draft_token_ids": ids,
        "num_draft_tokens": counts,
        "bonus_token_ids": rng.integers(0, vocab, batch) if has_bonus_ids else None,
        "temperature": choice(TEMPERATURES, batch).astype(np.float32),
        "uniform": (1 - rng.random(total)) ** choice([1, 4]),
        "gumbel": rng.gumbel(size=(batch, vocab)).astype(np.float32),
    }
    call["uniform"][rng.random(total) < 0.03] = choice([0.0, 1.0])
    if rng.random() < 0.6:
        call["top_k"] = choice([0, -1, 1, 3, 8, vocab + 2], batch)
        call["top_p"] = choice([1.0, 1.5, np.nan, 0.0, -0.5, 0.5, 0.9], batch).astype(np.float32)
        call["min_p"] = choice([0.0, -0.5, np.nan, 1.0, 1.5, 0.1, 0.01], batch).astype(np.float32)
    if drafts != "one-hot":
        shared = min(vocab, draft_vocab)
        draft = rng.normal(0, choice([0.5, 2.0]), (total, draft_vocab)).astype(np.float32)
        draft[:, :shared] += np.nan_to_num(logits[draft_rows, :shared], posinf=9, neginf=-9).clip(-30, 30)
        odd_values = ODD_LOGITS
        if drafts == "probs":
            draft = np.exp(draft - draft.max(-1, keepdims=True))
            draft[draft < 1e-30] = 0
            draft /= draft.sum(-1, keepdims=True)
            odd_values = [0.0, 1.0, np.nan, INF]
        for row in np.flatnonzero(rng.random(total) < 0.05):
            draft[row, ids[row] % draft_vocab] = choice(odd_values)
        call[f"draft_{drafts}"] = draft
        if drafts == "logits" and rng.random() < 0.5:
            call["draft_temperature"] = choice(TEMPERATURES, batch).astype(np.float32)
    if rng.random() < 0.7:
        thresholds = choice([0.0, 0.0, 0.3, 1.0, INF, np.nan], batch).astype(np.float32)
        call["config"] = fly(int(choice([1, 1, 2, 3])), thresholds, int(choice([1, 3, vocab + 4])))
    return call


def reference_requests(call):
    """The requests of a flattened call as tests/reference.py takes them."""
    counts = call["num_draft_tokens"]
    starts = np.concatenate([[0], np.cumsum(counts)])
    bonus, config = call["bonus_token_ids"], call.get("config")
    for b, n in enumerate(counts):
        drafts = slice(starts[b], starts[b + 1])
        first_row = starts[b] + (b if bonus is None else 0)
        request = reference.Request(
            logits=call["target_logits"][first_row : first_row + n + (bonus is None)],
            drafts=call["draft_token_ids"][drafts],
            num_drafts=n,
            window=config and config.window_size,
            bonus_token=None if bonus is None else int(bonus[b]),
            uniform=test_golden.round_up(call["uniform"][drafts]),
            gumbel=call["gumbel"][b],
        )
        if config:
            request.threshold, request.entropy_top_k = float(config.entropy_threshold[b]), config.entropy_top_k
        for name in ("temperature", "top_k", "top_p", "min_p", "draft_temperature"):
            if name in call:
                setattr(request, name, call[name][b].item())
        for name in ("draft_probs", "draft_logits"):
            if name in call:
                setattr(request, name, call[name][drafts])
        yield request


def compare(result, expected, request):
    n = request.num_drafts
    assert result.natively_accepted == expected.natively_accepted.tolist()
    assert result.deferred == expected.deferred.tolist()
    assert result.token_ids == expected.tokens
    assert result.num_accepted == expected.num_accepted
    assert result.invalid == expected.invalid
    reported = ~np.isnan(expected.entropy)
    error = np.abs(np.array(result.entropy) - expected.entropy)[reported]
    assert (error <= expected.entropy_slack[reported]).all()
    assert all(
        len(each) == n
        for each in (
            result.target_argmax,
            result.target_probability,
            result.draft_probability,
            result.acceptance_margin,
            result.entropy_margin,
        )
    )


@pytest.mark.parametrize("drafts", ["one-hot", "probs", "logits"])
@pytest.mark.parametrize(("vocab", "draft_vocab"), [(17, 17), (17, 23), (140, 131)])
def test_random_requests_match_the_reference(vocab, draft_vocab, drafts, report):
    rng = np.random.default_rng([vocab, draft_vocab, len(drafts)])
    counts = collections.Counter()
    for _ in range(120):
        call = random_call(rng, vocab, draft_vocab, 4, drafts)
        given = {name: torch.tensor(value) if isinstance(value, np.ndarray) else value for name, value in call.items()}
        for result, request in zip(verify_rows(**given), reference_requests(call), strict=True):
            expected = reference.verify(request)
            counts["requests"] += 1
            counts["deferrals"] += int(expected.deferred.sum())
            counts["invalid"] += expected.invalid
            counts["rejected"] += expected.num_accepted < request.num_drafts
            if expected.margin < 1:
                counts["near-ties"] += 1
            else:
                compare(result, expected, request)
    report(", ".join(f"{count} {what}" for what, count in counts.items()))
    assert counts["near-ties"] <= 0.08 * counts["requests"]
    assert min(counts[what] for what in ("deferrals", "invalid", "rejected")) > 0


def test_residual_that_is_empty_falls_back_to_the_target_without_the_draft():
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    q = logits[:1].softmax(dim=1)
    for draft_probs, masked in ((q, False), (torch.full((1, 3), torch.nan), False), (q, True)):
        result = verify_request(
            logits,
            [2],
            temperature=1.0,
            top_k=1 if masked else 0,
            draft_probs=torch.tensor([[1.0, 0.0, 1.0]]) if masked else draft_probs,
            uniform=torch.tensor([2.0]),
            gumbel=torch.zeros(3),
        )
        assert result.token_ids == [2 if masked else 1]


def example_logits():
    """Section 9 of the rule: argmax 5, 7, 9 and 3 for the bonus, the first row flat enough for the gate to open."""
    logits = torch.full((4, 12), -20.0)
    logits[0, [4, 5, 6]] = torch.tensor([0.9, 1.0, 0.9])
    logits[1, 7], logits[2, 9], logits[3, 3] = 1.0, 1.0, 1.0
    return logits


def test_worked_example():
    result = verify_request(example_logits(), [4, 7, 9], config=fly())
    assert result.token_ids == [4, 7, 9, 3]
    assert result.natively_accepted == [False, True, True]
    assert result.deferred == [True, False, False]
    assert result.target_argmax == [5, 7, 9]
    assert 1.0 < result.entropy[0] < 1.1
    assert result.acceptance_margin[0] == pytest.approx(0.1, abs=1e-6)
    assert result.entropy_margin[0] == pytest.approx(result.entropy[0] - 0.3, abs=1e-6)
    assert result.final_margin == INF
    assert result.draft_probability == [1.0, 1.0, 1.0]
    assert result.target_probability[0] == pytest.approx(np.exp(-0.1) / (1 + 2 * np.exp(-0.1)), abs=1e-6)


@pytest.mark.parametrize(
    ("drafts", "threshold"), [([4, 7, 9], 1.5), ([4, 6, 9], 0.3), ([4], 0.3)], ids=["gate", "window", "one draft"]
)
def test_worked_example_that_is_not_deferred(drafts, threshold):
    logits = example_logits()[: len(drafts) + 1]
    result = verify_request(logits, drafts, config=fly(entropy_threshold=threshold))
    assert result.token_ids == [5]
    assert result.deferred == [False] * len(drafts)


def test_default_window_is_that_of_the_largest_request():
    """With 3 drafts W is 2: alone, a request of 2 drafts has W = 1, but not beside one of 3."""
    logits = example_logits()
    config = fly(window_size=None)
    assert verify_request(logits[:3], [4, 7], config=config).deferred == [True, False]
    both = torch.cat([logits[:3], logits])
    results = verify_rows(both, [4, 7, 4, 7, 9], [2, 3], config=config)
    assert [result.deferred[0] for result in results] == [False, True]
    assert verify_request(logits[:2], [4], config=config).token_ids == [5]
    assert verify_request(logits[3:], [], config=config).token_ids == [3]
    assert verify_rows(logits[:0], [], [], config=config) == []


def test_float64_uniform_is_compared_exactly():
    logits = torch.zeros(2, 2)
    tie = {"temperature": 1.0, "gumbel": torch.zeros(2)}
    at = verify_request(logits, [0], uniform=torch.tensor([0.5], dtype=torch.float64), **tie)
    above = verify_request(logits, [0], uniform=torch.tensor([0.5 + 1e-12], dtype=torch.float64), **tie)
    assert (at.natively_accepted, above.natively_accepted) == ([True], [False])
    assert at.acceptance_margin == pytest.approx([0.0], abs=1e-6)
    assert at.final_margin == 0.0


LOGITS = torch.zeros(3, 4)
NOISE = {"uniform": torch.ones(2), "gumbel": torch.zeros(4)}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"temperature": 0.7}, "uniform and gumbel must be given with temperature=0.7"),
        ({"temperature": 0.7, "uniform": torch.ones(2)}, "uniform and gumbel must be given"),
        ({"temperature": 0.7, **NOISE, "uniform": torch.ones(3)}, r"uniform must be .* \[2\], got torch.float32 \[3\]"),
        ({"temperature": 0.7, **NOISE, "gumbel": torch.ones(3)}, r"gumbel must be .* \[4\], got torch.float32 \[3\]"),
        ({"draft_probs": LOGITS[:2], "draft_logits": LOGITS[:2]}, "draft_probs and draft_logits exclude each other"),
        ({"draft_probs": LOGITS}, r"draft_probs must be .* \[2, Vd\], got torch.float32 \[3, 4\]"),
        ({"draft_logits": LOGITS[0]}, r"draft_logits must be .* \[2, Vd\], got torch.float32 \[4\]"),
        ({"draft_temperature": 0.5}, "draft_temperature=0.5 divides draft_logits"),
        ({"target_logits": LOGITS[:2]}, r"target_logits must be .* \[3, V\], got torch.float32 \[2, 4\]"),
        ({"target_logits": LOGITS.long()}, r"target_logits must be floating point .* got torch.int64"),
        ({"target_logits": LOGITS[:, :0]}, r"target_logits must be .* got torch.float32 \[3, 0\]"),
        ({"bonus_token_id": 1}, r"target_logits must be .* \[2, V\], got torch.float32 \[3, 4\]"),
        ({"draft_token_ids": torch.ones(2)}, "draft_token_ids must be a list of integers, got torch.float32"),
        ({"config": fly(window_size=0)}, "window_size must be at least 1, got 0"),
        ({"config": fly(entropy_top_k=0)}, "entropy_top_k must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_of_a_request(call, text):
    with pytest.raises(ValueError, match=text):
        verify_request(**{"target_logits": LOGITS, "draft_token_ids": [1, 2], **call})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"num_draft_tokens": [3, -1]}, "num_draft_tokens must be at least 0, got -1"),
        ({"num_draft_tokens": [1, 1]}, r"target_logits must have 4 rows or values, got shape \[3, 4\]"),
        ({"bonus_token_ids": [1]}, r"target_logits must have 2 rows or values, got shape \[3, 4\]"),
        ({"draft_token_ids": [1]}, r"draft_token_ids must have 2 rows or values, got shape \[1\]"),
        ({"temperature": torch.ones(2)}, r"temperature must have 1 rows or values, got shape \[2\]"),
        ({"temperature": 1.0}, r"temperature must have 1 rows or values, got shape \[\]"),
        ({"gumbel": torch.zeros(2, 4)}, r"gumbel must have 1 rows or values, got shape \[2, 4\]"),
        ({"temperature": torch.ones(1)}, "uniform and gumbel must be given with temperature=1.0"),
        ({"config": fly(1, np.zeros(2, np.float32))}, r"entropy_threshold must be one or \[1\], got shape \[2\]"),
    ],
)
def test_wrong_arguments_of_rows(call, text):
    with pytest.raises(ValueError, match=text):
        verify_rows(**{"target_logits": LOGITS, "draft_token_ids": [1, 2], "num_draft_tokens": [2], **call})


def test_importing_it_imports_neither_jax_nor_triton():
    code = "import sys, fly_jax.bridges.torch_reference; print([m for m in ('jax', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
