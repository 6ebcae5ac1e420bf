"""FLy verification of draft tokens in plain torch: one request at a time, one function per rule, on any device.

The readable path to check others against, not a fast one. FLy: arXiv:2511.22972; where the paper is silent this follows
vLLM 0.33's V1 runner. As on backends that flush subnormals, what is below the smallest normal float32 counts as 0.
"""

import dataclasses
import math
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from fly_jax.config import FlyConfig

_FLOAT32 = torch.finfo(torch.float32)


@dataclasses.dataclass(frozen=True)
class RequestVerification:
    """The outcome for the `n` drafts of one request, and how near each decision was to its opposite."""

    token_ids: list[int]  # the kept drafts and the token after them
    num_accepted: int  # kept drafts, deferred ones included
    natively_accepted: list[bool]  # [n], past the stop too
    deferred: list[bool]  # [n], inside the accepted prefix only
    entropy: list[float]  # [n] nats, top-k and not renormalised; NaN where the row has no softmax
    target_argmax: list[int]  # [n]; over the finite entries, or 0, where the row is invalid
    target_probability: list[float]  # [n] p of the draft; NaN outside the vocabulary and without a softmax
    draft_probability: list[float]  # [n] q of the draft, 1 if one-hot; NaN outside the vocabulary
    acceptance_margin: list[float]  # [n] |log(p/q) - log(u)|, greedy: the two largest logits' gap; inf: not by rounding
    entropy_margin: list[float]  # [n] nats, |H - threshold|; inf when FLy is off or the row has no softmax
    final_margin: float  # lead of the last token's log weight + Gumbel over the next; inf where nothing was raced
    invalid: bool  # the last token came from a row that is no distribution: its finite argmax, or 0


class TargetRow(NamedTuple):
    """A processed row of the target, `[V]` float32 each: `logits` are -inf where it excludes a token."""

    logits: torch.Tensor
    log_probs: torch.Tensor
    probs: torch.Tensor
    argmax: int
    invalid: bool


class Position(NamedTuple):
    """A draft token, its row, its draft distribution `[V]` float32 (None: one-hot) and its uniform (None: greedy).

    The bonus row is one whose draft is the placeholder -1: nothing can be kept there, and the whole row is sampled.
    """

    row: TargetRow
    draft: int
    q_row: torch.Tensor | None
    u: float | None

    @property
    def in_vocabulary(self) -> bool:
        """Whether there is such a token."""
        return 0 <= self.draft < len(self.row.logits)

    @property
    def p(self) -> torch.Tensor:
        """The target's probability of the draft token, a float32 scalar; NaN outside the vocabulary."""
        return self.row.probs[self.draft] if self.in_vocabulary else torch.tensor(torch.nan)

    @property
    def q(self) -> torch.Tensor:
        """The draft's probability of its token, a float32 scalar; NaN outside the vocabulary."""
        q_row = torch.ones_like(self.row.logits) if self.q_row is None else self.q_row
        return q_row[self.draft] if self.in_vocabulary else torch.tensor(torch.nan)


def flush(values: torch.Tensor) -> torch.Tensor:
    """`values` with 0 for what is below the smallest normal float32; a NaN stays."""
    return torch.where(values.abs() < _FLOAT32.tiny, 0.0, values)


def is_greedy(temperature: float) -> bool:
    """Whether a temperature is below vLLM's 1e-5 as a float32; a NaN is greedy too."""
    return not bool(torch.tensor(temperature, dtype=torch.float32) >= torch.tensor(1e-5, dtype=torch.float32))


def scale(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Float32 logits of any shape divided by a temperature, at most the largest float32."""
    return flush(logits / torch.tensor(temperature, dtype=torch.float32, device=logits.device).clamp(max=_FLOAT32.max))


def process_logits(row: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """The logits `[V]` float32 a sampling request draws from; each step masks, by -inf, within what the former kept."""
    x = scale(row, temperature)
    if min_p > 0:
        x = _keep_from(x, x.max() + torch.tensor(min(min_p, 1.0), dtype=torch.float32, device=x.device).log())
    if 0 < top_k < len(x):
        x = _keep_from(x, x.topk(top_k).values[-1])
    if top_p < 1:
        ordered = x.sort(descending=True).values
        p = ordered.softmax(dim=0)
        # The last column that is kept: what equals it has the same mass above it, that above the first of them.
        num_kept = int((p.cumsum(dim=0) - p < top_p).sum())
        x = _keep_from(x, ordered[max(num_kept, 1) - 1])
    return x


def _keep_from(x: torch.Tensor, cutoff: torch.Tensor) -> torch.Tensor:
    return torch.where(x >= cutoff, x, -torch.inf)


def score_row(row: torch.Tensor, sampling: tuple[float, float, int, float] | None) -> TargetRow:
    """A raw float32 row `[V]`, processed with (temperature, min_p, top_k, top_p), or as it is when greedy."""
    scaled = row if sampling is None else scale(row, sampling[0])
    no_distribution = sampling is not None and bool(scaled.isposinf().any())
    if bool(row.isnan().any()) or bool((scaled == -torch.inf).all()) or no_distribution:
        finite_argmax = int(torch.where(row.isfinite(), row, -torch.inf).argmax())
        nothing = torch.full_like(row, torch.nan)
        return TargetRow(row, nothing, nothing, finite_argmax, True)
    x = row if sampling is None else process_logits(row, *sampling)
    log_probs = x.log_softmax(dim=0)
    return TargetRow(x, log_probs, flush(log_probs.exp()), int(x.argmax()), False)


def may_keep(position: Position) -> bool:
    """Whether a draft token can be kept at all: it exists, the target does not exclude it, and `q > 0`."""
    if not position.in_vocabulary or position.row.invalid:
        return False
    excluded = not bool(position.row.logits[position.draft] > -torch.inf)
    return not excluded and (position.u is None or bool(position.q > 0))


def accepts_natively(position: Position) -> bool:
    """Standard verification of a draft token that may be kept."""
    if position.u is None:
        return position.draft == position.row.argmax
    # The quotient is a float32; as a Python float it is compared exactly with a float64 u.
    return bool(position.p > 0) and float(position.p / position.q) >= position.u


def acceptance_margin(position: Position) -> float:
    """How far the native decision was from its opposite; inf where rounding cannot matter."""
    if not may_keep(position):
        return math.inf
    if position.u is None:
        return _lead(position.row.logits)
    log_ratio = float(position.row.log_probs[position.draft]) - float(position.q.log())
    return abs(log_ratio - math.log(position.u)) if position.u > 0 else math.inf


def top_k_entropy(row: TargetRow, k: int) -> float:
    """Nats, over the `k` most probable tokens without renormalising; NaN when the row has no softmax."""
    log_p = row.log_probs.topk(min(k, len(row.log_probs))).values
    p = log_p.exp()
    return float(-torch.where(p == 0, 0.0, p * log_p).sum())


def defer(native: list[bool], keepable: list[bool], entropy: list[float], window: int, threshold: float) -> list[bool]:
    """Which native rejections are deferred, past the stop too; a deferred position does not count in a window."""
    return [
        not native[i]
        and keepable[i]
        and i + window < len(native)
        and entropy[i] >= threshold
        and all(native[i + 1 : i + window + 1])
        for i in range(len(native))
    ]


def sample_instead(position: Position, gumbel: torch.Tensor) -> tuple[int, float]:
    """The token a sampling request emits where it keeps no draft token, in a valid row, and its margin."""
    p = position.row.probs.clone()
    if not position.in_vocabulary:
        return race(p, gumbel)
    if position.q_row is not None:
        difference = p - position.q_row
        # A NaN in q stays, so that the total tells.
        residual = torch.where(difference < _FLOAT32.tiny, 0.0, difference)
        if 0 < float(residual.sum()) < math.inf:
            return race(residual, gumbel)
    p[position.draft] = 0.0
    return race(p, gumbel) if bool((p > 0).any()) else (position.row.argmax, math.inf)


def race(weights: torch.Tensor, gumbel: torch.Tensor) -> tuple[int, float]:
    """The argmax of `log weights + gumbel`, `[V]` float32 each, lowest index on ties, and its lead."""
    score = torch.where(weights > 0, weights.log() + gumbel, -torch.inf)
    return int(score.argmax()), _lead(score)


def verify_request(
    target_logits: Any,
    draft_token_ids: Any,
    *,
    config: "FlyConfig | None" = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    draft_probs: Any = None,
    draft_logits: Any = None,
    draft_temperature: float | None = None,
    uniform: Any = None,
    gumbel: Any = None,
    bonus_token_id: int | None = None,
) -> RequestVerification:
    """Verifies the `n` draft tokens of one request; where `Vd` differs from `V`, columns beyond the smaller are not.

    Args:
      target_logits: `[n + 1, V]`, used as float32; `[n, V]` with `bonus_token_id`.
      draft_token_ids: `[n]` integers; an id outside the vocabulary is a placeholder, never kept.
      config: FLy's settings, or None for standard lossless verification. A window of None is `min(6, n - 1)`.
      temperature: below 1e-5 the request is greedy: no masks, no noise.
      top_k: 0 is off; min-p is applied first, then top-k, then top-p.
      top_p: 1 is off.
      min_p: 0 is off.
      draft_probs: `[n, Vd]` after the draft's own processing; neither this nor `draft_logits` is one-hot drafts.
      draft_logits: `[n, Vd]`, divided here by `draft_temperature`.
      draft_temperature: None is `temperature`; below 1e-5 the drafts are one-hot.
      uniform: `[n]` float32 or float64 on (0, 1], for sampling.
      gumbel: `[V]` standard Gumbel noise for the last token, for sampling.
      bonus_token_id: the token after a fully kept draft, when the caller has sampled it; goes through as it is.

    Raises:
      ValueError: a shape or value is wrong, noise is missing, or two arguments exclude each other.
    """
    drafts = _integers("draft_token_ids", draft_token_ids)
    n, greedy = len(drafts), is_greedy(temperature)
    logits = _floats("target_logits", target_logits, (n + (bonus_token_id is None), "V")).float()
    device, num_columns = logits.device, logits.shape[1]
    if draft_probs is not None and draft_logits is not None:
        raise ValueError("draft_probs and draft_logits exclude each other, got both; pass what the drafts came from")
    if draft_temperature is not None and draft_logits is None:
        raise ValueError(f"draft_temperature={draft_temperature} divides draft_logits, which were not given")
    q_rows = None
    if draft_probs is not None:
        q_rows = _floats("draft_probs", draft_probs, (n, "Vd")).to(device, torch.float32)
    elif draft_logits is not None:
        q_rows = _floats("draft_logits", draft_logits, (n, "Vd")).to(device, torch.float32)
    if q_rows is not None:
        num_columns = min(num_columns, q_rows.shape[1])
        q_rows = q_rows[:, :num_columns]
        if draft_logits is not None:
            divisor = temperature if draft_temperature is None else draft_temperature
            q_rows = None if is_greedy(divisor) else scale(q_rows, divisor).softmax(dim=1)
    u, noise = [None] * n, None
    if not greedy:
        if uniform is None or gumbel is None:
            raise ValueError(
                f"uniform and gumbel must be given with temperature={temperature}, which is not below 1e-5"
            )
        u = _floats("uniform", uniform, (n,)).tolist()
        noise = _floats("gumbel", gumbel, (logits.shape[1],)).to(device, torch.float32)[:num_columns]
    sampling = None if greedy else (temperature, min_p, top_k, top_p)
    rows = [score_row(row, sampling) for row in logits[:, :num_columns]]
    q_of = [None] * n if q_rows is None else flush(q_rows)
    positions = [Position(*each) for each in zip(rows, [*drafts, -1], [*q_of, None], [*u, None], strict=False)]
    return _verify(positions, n, _settings(config, n)[0], noise, bonus_token_id)


def _verify(
    positions: list[Position], n: int, settings: Any, gumbel: torch.Tensor | None, bonus_token_id: int | None
) -> RequestVerification:
    drafted = positions[:n]
    keepable = [may_keep(each) for each in drafted]
    native = [keep and accepts_natively(each) for keep, each in zip(keepable, drafted, strict=True)]
    entropy = [top_k_entropy(each.row, 3 if settings is None else settings.entropy_top_k) for each in drafted]
    deferred, entropy_margin = [False] * n, [math.inf] * n
    if settings is not None:
        deferred = defer(native, keepable, entropy, settings.window_size, settings.entropy_threshold)
        entropy_margin = [math.inf if math.isnan(h) else abs(h - settings.entropy_threshold) for h in entropy]
    accepted = [a or b for a, b in zip(native, deferred, strict=True)]
    r = accepted.index(False) if False in accepted else n

    final_margin, invalid = math.inf, False
    if r == n and bonus_token_id is not None:
        token = bonus_token_id
    else:
        token, invalid = positions[r].row.argmax, positions[r].row.invalid
        if gumbel is not None and not invalid:
            token, final_margin = sample_instead(positions[r], gumbel)
    return RequestVerification(
        token_ids=[*(each.draft for each in drafted[:r]), token],
        num_accepted=r,
        natively_accepted=native,
        deferred=[*deferred[:r], *[False] * (n - r)],
        entropy=entropy,
        target_argmax=[each.row.argmax for each in drafted],
        target_probability=[float(each.p) for each in drafted],
        draft_probability=[float(each.q) for each in drafted],
        acceptance_margin=[acceptance_margin(each) for each in drafted],
        entropy_margin=entropy_margin,
        final_margin=final_margin,
        invalid=invalid,
    )


def verify_rows(
    target_logits: Any,
    draft_token_ids: Any,
    num_draft_tokens: Any,
    *,
    bonus_token_ids: Any = None,
    config: "FlyConfig | None" = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    draft_probs: Any = None,
    draft_logits: Any = None,
    draft_temperature: Any = None,
    uniform: Any = None,
    gumbel: Any = None,
) -> list[RequestVerification]:
    """`verify_request` for `B` requests in vLLM's flattened layout: request after request, no padding.

    `num_draft_tokens` `[B]` holds each n. `target_logits` is `[sum(n), V]` with `bonus_token_ids` `[B]` (vLLM V1), and
    without `[sum(n + 1), V]`, the bonus row of a request after its drafts' rows (V2). Arguments per draft are
    `[sum(n), ...]`, sampling parameters `[B]` or None, and `gumbel` is `[B, V]`. A window of None is
    `min(6, max(n) - 1)`, that of the largest request; `config.entropy_threshold` may be `[B]`.

    Raises:
      ValueError: as `verify_request`, or the number of rows or values does not fit.
    """
    counts = _integers("num_draft_tokens", num_draft_tokens)
    if min(counts, default=0) < 0:
        raise ValueError(f"num_draft_tokens must be at least 0, got {min(counts)}")
    num_requests = len(counts)
    row_counts = [n + (bonus_token_ids is None) for n in counts]
    per_draft = {"draft_probs": draft_probs, "draft_logits": draft_logits, "uniform": uniform}
    per_request = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "gumbel": gumbel}
    per_request |= {"draft_temperature": draft_temperature, "bonus_token_id": bonus_token_ids}
    options = [("target_logits", target_logits, row_counts), ("draft_token_ids", draft_token_ids, counts)]
    options += [(name, value, counts) for name, value in per_draft.items()]
    options += [(name, value, [1] * num_requests) for name, value in per_request.items()]
    pieces = {name: _split(name, value, sizes) for name, value, sizes in options if value is not None}
    for name in per_request.keys() & pieces.keys():
        pieces[name] = [piece[0] if piece.ndim > 1 else piece.item() for piece in pieces[name]]
    settings = _settings(config, max(counts, default=0), num_requests)
    return [
        verify_request(config=settings[b], **{name: piece[b] for name, piece in pieces.items()})
        for b in range(num_requests)
    ]


def _settings(config: Any, most_drafts: int, num_requests: int = 1) -> list[Any]:
    """One for each request: the fields of a `FlyConfig`, the window and threshold (float32 nats) as single numbers."""
    if config is None:
        return [None] * num_requests
    window, k = config.window_size, config.entropy_top_k
    for name, value in (("window_size", window), ("entropy_top_k", k)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    thresholds = torch.as_tensor(config.entropy_threshold, dtype=torch.float32)
    if list(thresholds.shape) not in ([], [num_requests]):
        raise ValueError(f"entropy_threshold must be one or [{num_requests}], got shape {list(thresholds.shape)}")
    if window is None:
        # With one draft no window fits, whatever its size.
        window = max(1, min(6, most_drafts - 1))
    return [
        types.SimpleNamespace(window_size=window, entropy_threshold=threshold, entropy_top_k=k)
        for threshold in thresholds.expand(num_requests).tolist()
    ]


def _lead(scores: torch.Tensor) -> float:
    if len(scores) == 1:
        return math.inf
    first, second = scores.topk(2).values.tolist()
    return 0.0 if first == second else float(first - second)


def _integers(name: str, value: Any) -> list[int]:
    array = torch.as_tensor(value)
    if array.ndim != 1 or (len(array) > 0 and (array.is_floating_point() or array.dtype == torch.bool)):
        raise ValueError(f"{name} must be a list of integers, got {array.dtype} {list(array.shape)}")
    return [int(each) for each in array.tolist()]


def _floats(name: str, value: Any, shape: tuple[int | str, ...]) -> torch.Tensor:
    array = torch.as_tensor(value)
    fits = array.ndim == len(shape) and all(
        size == wanted or (isinstance(wanted, str) and size > 0)
        for size, wanted in zip(array.shape, shape, strict=True)
    )
    if not fits or not array.is_floating_point():
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} must be floating point of shape [{wanted}], got {array.dtype} {list(array.shape)}")
    return array


def _split(name: str, value: Any, sizes: list[int]) -> list[Any]:
    array = torch.as_tensor(value)
    if array.ndim == 0 or len(array) != sum(sizes):
        raise ValueError(f"{name} must have {sum(sizes)} rows or values, got shape {list(array.shape)}")
    return list(array.split(sizes))
