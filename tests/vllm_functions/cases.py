"""Random calls of vLLM's verification functions: what both runners need, in numpy, in few static shapes."""

import dataclasses

import numpy as np

F32 = np.float32
OUTSIDE, MASKED, PLACEHOLDER, NO_DRAFT_MASS = 0.002, 0.02, 0.01, 0.004  # how often, of all draft positions


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a compiled program depends on. `window=None`: FLy off. `draft_vocab=0`: one-hot drafts."""

    vocab: int
    most_requests: int
    max_drafts: int
    mode: str
    draft_vocab: int
    window: int | None
    entropy_top_k: int = 3


V1_SETTINGS = [
    Setting(32, 4, 8, "greedy", 0, 1),
    Setting(97, 3, 5, "greedy", 0, 2, 1),
    Setting(200, 1, 8, "greedy", 0, None),
    Setting(97, 4, 6, "mixed", 0, 1),
    Setting(32, 3, 8, "mixed", 0, 4),
    Setting(1031, 2, 4, "sampling", 0, 2, 1),
    Setting(200, 4, 8, "mixed", 0, None),
    Setting(97, 4, 8, "sampling", 97, 1),
    Setting(32, 2, 8, "mixed", 32, 2),
    Setting(200, 1, 7, "sampling", 200, 4, 1),
    Setting(1031, 3, 2, "mixed", 1031, 1, 1),
    Setting(97, 4, 3, "sampling", 97, None),
]
# V2 allows a draft of a smaller vocabulary.
V2_SETTINGS = [
    dataclasses.replace(each, draft_vocab=90) if each.vocab == 97 and each.draft_vocab else each for each in V1_SETTINGS
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. Arrays are padded to `max_drafts` K; only the first `lengths[b]` drafts of a request count."""

    setting: Setting
    place: tuple  # the seed it is from
    threshold: float
    lengths: np.ndarray  # [B]
    temperature: np.ndarray  # [B] float32, 0: greedy
    logits: np.ndarray  # [B, K + 1, V] float32, divided by the temperature and masked
    draft_logits: np.ndarray | None  # [B, K, draft_vocab] float32, before the temperature
    drafts: np.ndarray  # [B, K] int32
    bonus: np.ndarray  # [B] int64 as on GPUs or int32 as on CPUs, V1's
    torch_seed: int
    own_generator: np.ndarray  # [B] bool, V1's
    seed: np.ndarray  # [B] int64, V2's
    positions: np.ndarray  # [B] int64, V2's, of the first row
    states: np.ndarray  # [B] int32, V2's: where in [B + 1] arrays a request's state is


def generate(seed, settings, per_setting):
    """`per_setting` cases of each setting; a case depends on the seed and its own place only."""
    for i, setting in enumerate(settings):
        for j in range(per_setting):
            yield case((seed, i, j), setting)


def case(place, setting):
    rng = np.random.default_rng(place)
    K = setting.max_drafts
    batch = int(rng.integers(min(2, setting.most_requests), setting.most_requests + 1))
    # Deferrals need room, so most drafts are long.
    lengths = np.where(rng.random(batch) < 0.6, K, rng.integers(0, K + 1, batch))
    temperature = rng.uniform(0.5, 1.5, batch).astype(F32)
    if setting.mode == "greedy":
        temperature[:] = 0
    elif setting.mode == "mixed":
        temperature[rng.permutation(batch)[: rng.integers(1, batch)]] = 0
    logits = np.stack([[row(rng, setting.vocab) for _ in range(K + 1)] for _ in range(batch)])
    draft_logits = drafts_of = None
    if setting.draft_vocab:
        scale = np.where(temperature > 0, temperature, 1)[:, None, None]
        finite = np.maximum(logits[:, :K, : setting.draft_vocab], -4)
        draft_logits = (scale * (finite + rng.normal(0, 0.7, finite.shape))).astype(F32)
        drafts_of = draft_logits / scale
    drafts = np.empty((batch, K), np.int32)
    for b in range(batch):
        for i in range(K):
            drafts[b, i] = draft(rng, logits[b, i], None if drafts_of is None else drafts_of[b, i], temperature[b])
            if drafts_of is not None and rng.random() < NO_DRAFT_MASS and drafts[b, i] >= 0:
                draft_logits[b, i, drafts[b, i]] = -np.inf
    # vLLM reads past such a row: only into another request's.
    if batch > 1 and rng.random() < OUTSIDE * batch * K:
        drafts[0, rng.integers(K)] = setting.vocab
    return Case(
        setting=setting,
        place=place,
        threshold=float(rng.choice([0.0, 0.3, 0.5, rng.uniform(0, 1.2)])),
        lengths=lengths,
        temperature=temperature,
        logits=logits,
        draft_logits=draft_logits,
        drafts=drafts,
        bonus=rng.integers(0, setting.vocab, batch, dtype=(np.int32, np.int64)[rng.integers(2)]),
        torch_seed=int(rng.integers(2**40)),
        own_generator=rng.random(batch) < 0.4,
        seed=rng.integers(-(2**63), 2**63 - 1, batch),
        positions=rng.choice([0, 5000, 2**33], batch) + rng.integers(0, 1000, batch),
        states=rng.permutation(batch).astype(np.int32),
    )


def row(rng, vocab):
    """Peaked, several near the top, or tied at the top; some columns masked."""
    logits = rng.normal(0, 1, vocab).astype(F32)
    top = rng.permutation(vocab)[: rng.integers(2, 5)]
    kind = rng.random()
    if kind < 0.5:
        logits[top] = [12, *[5] * (len(top) - 1)]
    elif kind < 0.9:
        logits[top] = 9 + rng.normal(0, 0.7, len(top))
    else:
        logits[top] = 8.5
    if rng.random() < 0.3:
        masked = rng.random(vocab) < rng.choice([0.3, 0.9])
        masked[[0, *top]] = False  # a row of a smaller vocabulary keeps something too
        logits[masked] = -np.inf
    return logits


def draft(rng, logits, draft_logits, temperature):
    """The target's likeliest token mostly, sometimes another of the likeliest, rarely something else."""
    kind = rng.random()
    if kind < PLACEHOLDER:
        return -1
    columns = len(logits) if draft_logits is None else len(draft_logits)
    logits = logits[:columns]
    if kind < PLACEHOLDER + MASKED and np.isneginf(logits).any():
        return rng.choice(np.flatnonzero(np.isneginf(logits)))
    if kind > 0.95:
        return rng.integers(columns)
    if draft_logits is not None and temperature > 0 and kind > 0.5:
        return np.argmax(draft_logits + rng.gumbel(size=columns))
    return np.argsort(-logits, kind="stable")[0 if kind < 0.75 else rng.integers(1, 3)]
