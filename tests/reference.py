"""FLy verification restated in plain numpy, one request and one row at a time.

Independent of the package: nothing is imported from it. Probabilities are computed in float64 and rounded to
float32 where the rule compares float32 values, so that the package may differ only by its float32 rounding.
Every decision that rounding could turn carries a *margin*, in units of what float32 may lose there; a result
whose `margin` is below 1 is a near-tie, and a test may set it aside.
"""

import dataclasses
import math

import numpy as np

F32 = np.float32
TINY = float(np.finfo(F32).tiny)  # smallest normal: below it a float32 probability counts as 0
FAR = math.inf  # the margin of a decision that rounding cannot turn


@dataclasses.dataclass
class Request:
    """One request. `logits` has K + 1 rows (row n is the bonus row); `window=None` is standard verification.

    Noise: `uniform` [K] with `final_uniform` [2] or `gumbel` [V]; or `seed` (int) with `positions` [K + 1].
    """

    logits: np.ndarray
    drafts: np.ndarray
    num_drafts: int
    window: int | None
    threshold: float = 0.3
    entropy_top_k: int = 3
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    draft_probs: np.ndarray | None = None
    draft_logits: np.ndarray | None = None
    draft_temperature: float | None = None
    bonus_token: int | None = None
    vocab_size: int | None = None
    uniform: np.ndarray | None = None
    final_uniform: np.ndarray | None = None
    gumbel: np.ndarray | None = None
    seed: int | None = None
    positions: np.ndarray | None = None


@dataclasses.dataclass
class Outcome:
    """What `fly_verify` must return for one request; arrays have K entries."""

    tokens: list
    num_accepted: int
    natively_accepted: np.ndarray
    deferred: np.ndarray
    entropy: np.ndarray
    entropy_slack: np.ndarray
    invalid: bool
    margin: float


@dataclasses.dataclass
class Row:
    """One processed logit row. `log_p` is float64 and -inf where the target excludes the token."""

    raw: np.ndarray
    invalid: bool
    argmax: int
    log_p: np.ndarray
    margin: float  # of the cut-offs
    slack: float  # what float32 may lose in a log-probability of this row

    @property
    def kept(self):
        return self.log_p > -np.inf

    @property
    def p(self):
        with np.errstate(under="ignore"):
            p = np.exp(self.log_p)
        return np.where(p < TINY, 0.0, p).astype(F32)


def is_greedy(temperature):
    """vLLM's sampling epsilon; NaN has no distribution to sample from."""
    return temperature is None or not F32(temperature) >= F32(1e-5)


def scale(row, temperature):
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        y = row / min(F32(temperature), np.finfo(F32).max)
    return np.where(np.abs(y) < F32(TINY), F32(0), y)  # what is below the normal range is 0, as XLA has it


def log_softmax(y):
    """float64; a row with +inf or NaN, or without anything above -inf, has no softmax: all NaN or as IEEE says."""
    y = y.astype(np.float64)
    top = y.max()
    if not np.isfinite(top):
        return np.full(y.shape, np.nan)
    with np.errstate(divide="ignore", under="ignore"):
        return (y - top) - np.log(np.sum(np.exp(y - top)))


def slack_of(y):
    """What float32 may lose in a log-probability: its own rounding, and that of `max + log(sum)` at a large max."""
    top = float(y.max())
    if not math.isfinite(top):
        return 1e-5
    return 1e-5 + min(4e-7 * abs(top), -float(log_softmax(y).max()))


def process(raw, temperature, min_p, top_k, top_p):
    """Raw float32 logits (columns outside the vocabulary already -inf) -> Row."""
    nothing = np.full(raw.shape, -np.inf)
    greedy = is_greedy(temperature)
    y = raw if greedy else scale(raw, temperature)
    if np.isnan(raw).any() or not (y > -np.inf).any() or (not greedy and (y == np.inf).any()):
        finite = np.where(np.isfinite(raw), raw, -np.inf)
        fallback = int(np.argmax(finite)) if np.isfinite(raw).any() else 0
        return Row(raw, True, fallback, nothing, FAR, 0.0)
    argmax = int(np.argmax(y))
    top = float(y.max())
    if greedy:
        return Row(raw, False, argmax, log_softmax(y), FAR, slack_of(y))

    margin = FAR
    kept = y > -np.inf
    if min_p is not None and not math.isnan(min_p) and min_p > 0:
        with np.errstate(divide="ignore"):
            log_min_p = np.log(F32(min(min_p, 1.0)))
        cut = y.max() + log_min_p
        if log_min_p < 0:  # at 1 the cut is the maximum itself: exact
            margin = min(margin, float(np.abs(y[kept] - cut).min()) / (4e-7 * (1 + abs(float(cut)) + abs(top))))
        kept &= y >= cut
    if top_k is not None and 0 < top_k < len(y):
        ordered = np.sort(np.where(kept, y, -np.inf))[::-1]
        kept &= y >= ordered[top_k - 1]
    if top_p is not None and not math.isnan(top_p) and top_p < 1:
        p = np.exp(log_softmax(np.where(kept, y, -np.inf)))
        keep = np.zeros(len(y), bool)
        for j in np.flatnonzero(kept):
            above = p[y > y[j]].sum()
            keep[j] = above < max(top_p, 0.0) or y[j] == y.max()
            if y[j] != y.max() and top_p > 0:
                margin = min(margin, abs(above - top_p) / slack_of(y))
        kept = keep
    y = np.where(kept, y, F32(-np.inf))
    return Row(raw, False, argmax, log_softmax(y), margin, slack_of(y))


def entropy(row, k):
    """Over the k most probable tokens, without renormalising."""
    if row.invalid or not np.isfinite(row.raw.max()):
        return math.nan
    h = 0.0
    for log_p in sorted(row.log_p, reverse=True)[:k]:
        p = math.exp(log_p) if log_p > -700 else 0.0
        if p > 0:
            h -= p * log_p
    return h


def draft_distribution(request, i, columns):
    """(q [V] float64, its slack): the draft's probabilities of position i; columns it does not have are 0."""
    if request.draft_probs is not None:
        given, slack = request.draft_probs[i].astype(F32).astype(np.float64)[:columns], 0.0
    else:
        temperature = request.temperature if request.draft_temperature is None else request.draft_temperature
        y = scale(request.draft_logits[i].astype(F32)[:columns], temperature)
        given, slack = np.exp(log_softmax(y)), slack_of(y)
    q = np.zeros(request.logits.shape[1])
    q[: len(given)] = given
    return q, slack


def inverse_cdf(weight, u_block, u_token, relative, absolute):
    """(token, margin): blocks of 128 columns, then the columns of one block; the rest is the error of the weights."""

    def pick(w, u):
        positive = np.flatnonzero(w > 0)
        cumulative = np.cumsum(w)
        target = u * cumulative[-1]
        chosen = next((j for j in positive if cumulative[j] >= target), positive[-1])
        # The last entry takes whatever is left, so its upper edge decides nothing.
        edge = min((abs(cumulative[j] - target) for j in positive[:-1]), default=FAR)
        return int(chosen), edge / (relative * cumulative[-1] + absolute)

    block, block_margin = pick(np.array([weight[s : s + 128].sum() for s in range(0, len(weight), 128)]), u_block)
    column, column_margin = pick(weight[block * 128 : (block + 1) * 128], u_token)
    return block * 128 + column, min(block_margin, column_margin)


def largest(score, error):
    """(argmax, margin of its lead)."""
    best = int(np.argmax(score))
    lead = [(score[best] - score[j]) / (error[best] + error[j]) for j in np.flatnonzero(score > -np.inf) if j != best]
    return best, min(lead, default=FAR)


def philox_uniform(seed, position):
    """vLLM V2's acceptance uniform."""
    low = 0xFFFFFFFF
    c = [position & low, position >> 32 & low, 0, 0]
    k = [seed & low, seed >> 32 & low]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & low, a >> 32 ^ c[3] ^ k[1], a & low]
        k = [k[0] + 0x9E3779B9 & low, k[1] + 0xBB67AE85 & low]
    x = c[0] if c[0] < 2**31 else ~c[0] & low
    step = F32(4.6566127342e-10)
    return max(F32(x) * step, step)


def murmur_gumbel(seed, position, vocab):
    """vLLM V2's Gumbel noise of one row, float32 step by step."""
    low = 0xFFFFFFFF
    noise = np.empty(vocab, F32)
    coefficients = [F32(1 / j) for j in range(8, 0, -1)]

    def rotate(x, by):
        return (x << by | x >> 32 - by) & low

    for token in range(vocab):
        h = 0
        for word in (seed & low, seed >> 32 & low, position & low, token):
            k = rotate(word * 0xCC9E2D51 & low, 15) * 0x1B873593 & low
            h = rotate(h ^ k, 13) * 5 + 0xE6546B64 & low
        h ^= 16
        h = (h ^ h >> 16) * 0x85EBCA6B & low
        h = (h ^ h >> 13) * 0xC2B2AE35 & low
        h ^= h >> 16
        w = F32(h >> 16) * F32(2**-16) + (F32(h & 0xFFFF) + F32(0.5)) * F32(2**-32)
        if w < F32(0.25):
            poly = coefficients[0]
            for coefficient in coefficients[1:]:
                poly = poly * w + coefficient
            log = -w * poly
        else:
            log = np.log(max(F32(1) - w, F32(5.960464477539063e-08)))
        noise[token] = -np.log(-log)
    return noise


def verify(request):
    """The whole rule for one request."""
    K, V = len(request.drafts), request.logits.shape[1]
    n = min(max(int(request.num_drafts), 0), K)
    columns = V
    for drafts in (request.draft_probs, request.draft_logits):
        if drafts is not None:
            columns = min(columns, drafts.shape[-1])
    if request.vocab_size is not None:
        columns = min(columns, request.vocab_size)
    greedy = is_greedy(request.temperature)
    one_hot = request.draft_probs is None and request.draft_logits is None
    if request.draft_logits is not None and request.draft_temperature is not None:
        one_hot = one_hot or is_greedy(request.draft_temperature)
    margins = []

    rows = []
    for i in range(n + 1 if request.bonus_token is None else n):
        raw = request.logits[i].astype(F32)
        raw[columns:] = -np.inf
        rows.append(process(raw, request.temperature, request.min_p, request.top_k, request.top_p))
    inside = [0 <= int(request.drafts[i]) < columns for i in range(n)]

    # 1. native acceptance
    native = np.zeros(K, bool)
    may_defer = np.zeros(K, bool)  # condition 1 of a deferral
    q_rows = {}
    for i in range(n):
        row, d = rows[i], int(request.drafts[i])
        if row.invalid or not inside[i]:
            continue
        if greedy:
            native[i] = d == row.argmax
            may_defer[i] = row.raw[d] > -np.inf
            continue
        margins.append(row.margin)
        u = F32(
            philox_uniform(request.seed, int(request.positions[i])) if request.uniform is None else request.uniform[i]
        )
        p, log_p, slack = row.p[d], row.log_p[d], row.slack
        log_q = 0.0
        if one_hot:
            native[i] = row.kept[d] and p > 0 and p >= u
            may_defer[i] = row.kept[d]
        else:
            q, q_slack = q_rows[i] = draft_distribution(request, i, columns)
            slack += q_slack
            has_q = q[d] >= TINY
            if request.draft_logits is not None and q[d] > 0:
                margins.append(abs(math.log(q[d]) - math.log(TINY)) / slack)
            with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
                native[i] = row.kept[d] and p > 0 and has_q and p / F32(q[d]) >= u
            may_defer[i] = row.kept[d] and has_q
            log_q = math.log(q[d]) if has_q else None
        if row.kept[d] and log_q is not None:
            margins.append(abs(log_p - math.log(TINY)) / slack)
            certain = one_hot and u == 1 and log_p > -1e-9  # p is 1 in float32, however it is rounded
            if u > 0 and p > 0 and not certain:
                margins.append(abs(log_p - log_q - math.log(u)) / slack)

    # 2, 3. the gate and the deferrals
    entropies, entropy_slack = np.full(K, np.nan), np.zeros(K)
    deferred = np.zeros(K, bool)
    if request.window is not None:
        W = request.window
        for i in range(n):
            if native[i] or rows[i].invalid or not may_defer[i] or not i + W < n:
                continue
            if all(native[i + 1 : i + W + 1]):
                h = entropies[i] = entropy(rows[i], request.entropy_top_k)
                entropy_slack[i] = rows[i].slack
                deferred[i] = h >= F32(request.threshold)
                if request.threshold > 0:  # H >= 0 holds for every rounding of it
                    margins.append(abs(h - F32(request.threshold)) / rows[i].slack)

    accepted = native | deferred
    r = 0
    while r < n and accepted[r]:
        r += 1
    deferred[r:] = False

    # 4. the token after the accepted prefix
    invalid = False
    if r == n and request.bonus_token is not None:
        token = request.bonus_token
    else:
        row = rows[r]
        invalid = row.invalid
        if row.invalid or greedy:
            token = row.argmax
        else:
            margins.append(row.margin)
            d = int(request.drafts[r]) if r < n and inside[r] else None
            q = None if one_hot or d is None else q_rows[r]
            token, margin = emit(request, r, row, d, q)
            margins.append(margin)

    tokens = [int(t) for t in request.drafts[:r]] + [int(token)]
    margin = min((m for m in margins if not math.isnan(m)), default=FAR)
    return Outcome(tokens, r, native, deferred, entropies, entropy_slack, invalid, margin)


def emit(request, r, row, d, q):
    """(token, margin) sampled after r kept drafts. d: the rejected draft token, None after a placeholder or on the
    bonus row; q: (its draft distribution, slack) in p/q verification."""
    p = row.p.astype(np.float64)
    weight = p.copy()
    if d is not None:
        weight[d] = 0.0
    error, absolute = np.full(len(p), row.slack), 0.0  # of log weight, and of weight
    if q is not None:
        q, q_slack = q
        residual = np.maximum(p - q, 0.0)
        total = float(residual.sum())
        noise = float((p * row.slack + np.nan_to_num(q, posinf=0.0) * q_slack).max())
        if 0 < total < 5 * noise:
            return 0, 0.0  # whether anything is left is itself a matter of rounding
        if total > 0:
            weight, absolute = residual, noise
            with np.errstate(divide="ignore", invalid="ignore"):
                error = np.where(weight > 0, (p * row.slack + q * q_slack) / weight, 0.0)
    if not weight.any():
        return row.argmax, FAR
    if request.final_uniform is not None:
        u_block, u_token = (float(F32(u)) for u in request.final_uniform)
        return inverse_cdf(weight, u_block, u_token, row.slack, absolute)
    gumbel = request.gumbel
    if gumbel is None:
        gumbel = murmur_gumbel(request.seed, int(request.positions[r]), len(p))
    with np.errstate(divide="ignore"):
        return largest(np.log(weight) + gumbel.astype(np.float64), error)


def requests(target_logits, draft_token_ids, *, config, num_draft_tokens=None, noise=None, vocab_size=None, **options):
    """The requests of one `fly_verify` call with padded numpy arguments; `config` needs an explicit window."""
    batch, K = draft_token_ids.shape
    for b in range(batch):
        request = Request(
            logits=target_logits[b],
            drafts=draft_token_ids[b],
            num_drafts=K if num_draft_tokens is None else int(num_draft_tokens[b]),
            window=None,
            vocab_size=None if vocab_size is None else int(vocab_size),
        )
        if config is not None:
            request.window, request.entropy_top_k = config.window_size, config.entropy_top_k
            request.threshold = float(np.broadcast_to(config.entropy_threshold, (batch,))[b])
        for name in ("temperature", "draft_temperature", "top_p", "min_p"):
            if options.get(name) is not None:
                setattr(request, name, float(options[name][b]))
        if options.get("top_k") is not None:
            request.top_k = int(options["top_k"][b])
        for name in ("draft_probs", "draft_logits"):
            if options.get(name) is not None:
                setattr(request, name, options[name][b])
        if hasattr(noise, "uniform"):
            request.uniform = noise.uniform[b]
            request.final_uniform = None if noise.final_uniform is None else noise.final_uniform[b]
            request.gumbel = None if noise.gumbel is None else noise.gumbel[b]
        elif noise is not None:
            request.seed = int(noise.seed[b, 0]) | int(noise.seed[b, 1]) << 32
            request.positions = [int(low) | int(high) << 32 for low, high in noise.position[b]]
        yield request


def compare(result, expected, b):
    """Asserts that request b of a `Verification` is `expected`, an Outcome."""
    K = len(expected.deferred)
    tokens = expected.tokens + [-1] * (K + 1 - len(expected.tokens))
    np.testing.assert_array_equal(result.natively_accepted[b], expected.natively_accepted, "natively_accepted")
    np.testing.assert_array_equal(np.isnan(result.entropy[b]), np.isnan(expected.entropy), "entropy reported")
    error = np.nan_to_num(np.abs(result.entropy[b] - expected.entropy))
    assert (error <= expected.entropy_slack).all(), (result.entropy[b], expected.entropy)
    np.testing.assert_array_equal(result.deferred[b], expected.deferred, "deferred")
    assert result.num_accepted[b] == expected.num_accepted, (result.num_accepted[b], expected.num_accepted)
    assert result.num_tokens[b] == expected.num_accepted + 1
    np.testing.assert_array_equal(result.token_ids[b], tokens, "token_ids")
    assert bool(result.invalid[b]) == expected.invalid, "invalid"
