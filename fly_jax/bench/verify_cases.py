"""What `fly-jax bench verify` measures: the cases with their goals, and logits that do what a case says.

Most of the cost of FLy beyond standard verification is the entropy of rows that can be deferred, so a case states how
many requests have one, the logits are built so that they do, and `check` looks at the result.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np

from fly_jax.config import FlyConfig
from fly_jax.noise import verify_noise
from fly_jax.verify import Verification

NUM_DRAFT_TOKENS = 8
"""K."""

WINDOW_SIZE = 6
"""W."""

VOCAB_SIZE = 151936
"""V, of Qwen3."""

TEMPERATURE = 0.9
"""Of the cases that sample."""

TYPICAL_SHARE = 0.3
"""Of the requests with a rejection that can be deferred."""

CONFIG = FlyConfig(window_size=WINDOW_SIZE)

_SEED = 20
_SPREAD = 2.0  # standard deviation of the logits around the tokens that matter

# Probabilities of the draft token and of the token the target prefers. The draft distribution gives its token
# _CONFIDENT as well, so that p / q is 1 where the draft is accepted.
_CONFIDENT = 0.9
_GATE_OPEN = (0.35, 0.55)  # an entropy of 0.7 nats
_GATE_CLOSED = (0.05, 0.92)  # 0.23 nats; inside a top-p of 0.95 all the same, or it could not be deferred

# Keys are chosen so that the uniforms keep this distance from the acceptance ratios above.
_ACCEPTS_BELOW = 0.85
_REJECTS_ABOVE = 0.5


class Draft(enum.StrEnum):
    """What verification is given of the draft distribution."""

    ONE_HOT = "one-hot"
    PROBS = "probs"
    LOGITS = "logits"


@dataclasses.dataclass(frozen=True)
class Goals:
    """What a case should reach; None is no goal.

    Attributes:
      over_floor: at most this many times the time of reading the logits once.
      over_floor_with_options: the same, compiled with `compiler_options()`.
      over_torch: at least this many times faster than the torch path.
      over_torch_with_options: the same, compiled with `compiler_options()`.
      temporaries: at most this many `[B, V]` float32 arrays.
    """

    over_floor: float | None = None
    over_floor_with_options: float | None = None
    over_torch: float | None = None
    over_torch_with_options: float | None = None
    temporaries: float | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `fly_verify`.

    Attributes:
      name: as `--cases` takes it.
      sampling: at `TEMPERATURE`, with keys; False is greedy.
      draft: what is given of the draft distribution.
      num_requests: B.
      vocab_size: V.
      dtype: of the logits.
      top_p: None is off.
      top_k: None is off.
      share: of the requests that have a rejection which can be deferred; more than 0 is at least one request.
      goals: what it should reach.
    """

    name: str
    sampling: bool = False
    draft: Draft = Draft.ONE_HOT
    num_requests: int = 8
    vocab_size: int = VOCAB_SIZE
    dtype: str = "float32"
    top_p: float | None = None
    top_k: int | None = None
    share: float = TYPICAL_SHARE
    goals: Goals = Goals()

    @property
    def num_candidates(self) -> int:
        """How many requests have a rejection that can be deferred."""
        return max(round(self.share * self.num_requests), int(self.share > 0))


CASES = (
    Case("greedy", goals=Goals(1.8, None, 14, None, 1)),
    Case("greedy-none", share=0.0, goals=Goals(1.8, None, 14, None, 1)),
    Case("greedy-all", share=1.0, goals=Goals(1.8, None, 14, None, 1)),
    Case("greedy-bf16", dtype="bfloat16", goals=Goals(3.2, None, 20, None, 1)),
    Case("greedy-b1", num_requests=1, goals=Goals(3.5, None, 3, None, 1)),
    Case("target-only", sampling=True, goals=Goals(7, 3, 6, 12, 3)),
    Case("target-only-bf16", sampling=True, dtype="bfloat16", goals=Goals(12, 5, 10, None, 3)),
    Case("target-only-b1", sampling=True, num_requests=1, goals=Goals(9, None, 4, None, 3)),
    Case("draft-probs", sampling=True, draft=Draft.PROBS, goals=Goals(4.5, 2, 8, 16, 3)),
    Case("draft-logits", sampling=True, draft=Draft.LOGITS, goals=Goals(7, 4, None, None, 3)),
    Case("draft-logits-b1", sampling=True, draft=Draft.LOGITS, num_requests=1, goals=Goals(temporaries=3)),
    Case("top-p", sampling=True, top_p=0.95, goals=Goals(40, None, 15)),
    Case("top-k", sampling=True, top_k=50, goals=Goals(40, None, 15)),
)

ODD_VOCABULARY = "odd-vocabulary"
"""The name, for `--cases`, of V=50257 against V=50304."""

ODD_SIZES = (50257, 50304)
ODD_GOAL = 1.3
ODD_CASES = (Case("greedy"), Case("target-only", sampling=True))

OVER_STANDARD_GOAL = 1.15
"""FLy over standard verification of the same logits, greedy."""


@dataclasses.dataclass(frozen=True)
class CaseData:
    """The arrays of a case, on the host, and what verification makes of them.

    Attributes:
      target_logits: `[B, K + 1, V]` float32, to be cast to the case's dtype.
      draft_token_ids: `[B, K]` int32.
      draft_logits: `[B, K, V]` float32, to be divided by the temperature; None for one-hot drafts.
      keys: `[B]` typed keys; None for a greedy case.
      accepted: `[B, K]` bool: what is natively accepted.
      gate_open: `[B]` bool: the request's deferral happens.
    """

    target_logits: np.ndarray
    draft_token_ids: np.ndarray
    draft_logits: np.ndarray | None
    keys: jax.Array | None
    accepted: np.ndarray
    gate_open: np.ndarray


def make_data(case: Case) -> CaseData:
    """Draws the case's logits and drafts; the same ones whenever it is called.

    The first `num_candidates` requests reject their first draft token, keep the rest, and every other one of them has
    an open gate. Every other one of the remaining requests rejects a draft token in the middle, where no window fits:
    so both kinds of last token, after a rejection and after a kept draft, are sampled.
    """
    random = np.random.default_rng(_SEED)
    num_requests, num_positions, vocab_size = case.num_requests, NUM_DRAFT_TOKENS, case.vocab_size
    request, candidate = np.arange(num_requests), np.arange(num_requests) < case.num_candidates
    gate_open = candidate & (request % 2 == 0)
    accepted = np.ones((num_requests, num_positions), bool)
    accepted[candidate, 0] = False
    accepted[~candidate & ((request - case.num_candidates) % 2 == 1), num_positions // 2] = False

    temperature = TEMPERATURE if case.sampling else 1.0
    target = random.standard_normal((num_requests, num_positions + 1, vocab_size), np.float32) * np.float32(_SPREAD)
    # Column 0 is the draft token, column 1 the one the target prefers to it; the bonus row has just one of them.
    tokens = random.integers(0, vocab_size // 2, (num_requests, num_positions + 1, 2)) * 2 + np.arange(2)
    p = np.where(accepted[..., None], (_CONFIDENT, 0.0), _GATE_CLOSED)
    p[gate_open, 0] = _GATE_OPEN
    p = np.concatenate([p, np.broadcast_to((_CONFIDENT, 0.0), (num_requests, 1, 2))], axis=1)
    _set_probabilities(target, tokens, p, temperature)
    draft_logits = None
    if case.draft != Draft.ONE_HOT:
        shape = (num_requests, num_positions, vocab_size)
        draft_logits = random.standard_normal(shape, np.float32) * np.float32(_SPREAD)
        q = np.broadcast_to((_CONFIDENT, 0.0), (num_requests, num_positions, 2))
        _set_probabilities(draft_logits, tokens[:, :-1], q, temperature)
    draft_token_ids = tokens[:, :-1, 0].astype(np.int32)
    keys = _keys(accepted) if case.sampling else None
    return CaseData(target, draft_token_ids, draft_logits, keys, accepted, gate_open)


def verify_arguments(case: Case, data: CaseData) -> dict[str, jax.Array]:
    """The arrays `fly_verify` is called with, on the device."""
    arguments = {
        "target_logits": jnp.asarray(data.target_logits, case.dtype),
        "draft_token_ids": jnp.asarray(data.draft_token_ids),
    }
    if not case.sampling:
        return arguments
    assert data.keys is not None
    arguments |= {"key": data.keys, "temperature": jnp.full(case.num_requests, TEMPERATURE, jnp.float32)}
    if case.draft == Draft.LOGITS:
        arguments["draft_logits"] = jnp.asarray(data.draft_logits, case.dtype)
    if case.draft == Draft.PROBS:
        assert data.draft_logits is not None
        arguments["draft_probs"] = jax.nn.softmax(jnp.asarray(data.draft_logits) / TEMPERATURE, axis=-1)
    if case.top_p is not None:
        arguments["top_p"] = jnp.full(case.num_requests, case.top_p, jnp.float32)
    if case.top_k is not None:
        arguments["top_k"] = jnp.full(case.num_requests, case.top_k, jnp.int32)
    return arguments


def floor_arrays(arguments: dict[str, jax.Array]) -> list[jax.Array]:
    """The logits the floor of a case reads: the target's, and the draft's where they are given."""
    return [arguments[name] for name in ("target_logits", "draft_logits") if name in arguments]


def check(case: Case, data: CaseData, result: Verification) -> int:
    """How many requests had a rejection that could be deferred, from FLy's result.

    Raises:
      RuntimeError: the result is not what the case is meant to measure.
    """
    candidates = ~np.isnan(np.asarray(result.entropy))
    expected = np.zeros_like(data.accepted)
    expected[: case.num_candidates, 0] = True
    deferred = np.zeros_like(data.accepted)
    deferred[data.gate_open, 0] = True
    kept = np.cumprod(data.accepted | deferred, axis=1).sum(1)
    if not (
        np.array_equal(candidates, expected)
        and np.array_equal(np.asarray(result.natively_accepted), data.accepted)
        and np.array_equal(np.asarray(result.deferred), deferred)
        and np.array_equal(np.asarray(result.num_accepted), kept)
        and not np.asarray(result.invalid).any()
    ):
        raise RuntimeError(
            f"case {case.name} does not hold what it claims: {candidates.any(1).sum()} of {case.num_requests} requests "
            f"have a rejection that can be deferred, expected {case.num_candidates}; kept {result.num_accepted}, "
            f"expected {kept}"
        )
    return int(candidates.any(axis=1).sum())


def _set_probabilities(logits: np.ndarray, tokens: np.ndarray, p: np.ndarray, temperature: float) -> None:
    """Sets the logits of `tokens` `[B, T, 2]` in place, so that softmax(logits / temperature) gives them `p`."""
    for b, i in np.ndindex(*tokens.shape[:2]):
        row, chosen = logits[b, i], p[b, i] > 0
        row[tokens[b, i][chosen]] = -np.inf
        row_max = row.max()
        log_others = row_max / temperature + np.log(np.exp((row - row_max) / temperature).sum(dtype=np.float64))
        row[tokens[b, i][chosen]] = temperature * (log_others + np.log(p[b, i][chosen] / (1 - p[b, i].sum())))


def _keys(accepted: np.ndarray) -> jax.Array:
    """`[B]` keys whose uniforms accept and reject as `accepted` says, the first that do."""
    num_requests, num_positions = accepted.shape
    pool = jax.random.split(jax.random.key(_SEED), 64 * num_requests)
    uniform = np.asarray(jax.jit(verify_noise, static_argnums=1)(pool, num_positions).uniform)
    chosen: list[int] = []
    for wanted in accepted:
        fits = np.all(np.where(wanted, uniform < _ACCEPTS_BELOW, uniform > _REJECTS_ABOVE), axis=1)
        chosen.append(next(int(i) for i in np.flatnonzero(fits) if i not in chosen))
    return pool[np.asarray(chosen)]
