"""The replacements of vLLM's two `rejection_sample` functions beside vLLM's own, on random calls, token for token."""

import collections
import importlib.util
import os
import types

import numpy as np
import pytest
import reference

if "FLY_JAX_VLLM_SOURCE" not in os.environ:
    pytest.skip("FLY_JAX_VLLM_SOURCE is the folder that holds vLLM 0.33's vllm/", allow_module_level=True)
torch = pytest.importorskip("torch")
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import cases  # noqa: E402

pytestmark = pytest.mark.vllm

PER_SETTING = 25
NEAR_TIE = "near-tie of float rounding"
OUTSIDE = "id outside the vocabulary"
PLACEHOLDER = "V1: rejected placeholder with draft probabilities"
ZERO_Q = "V2: draft token of draft probability 0"


@pytest.fixture
def seed(request, report):
    seed = np.random.SeedSequence().entropy % 2**32 if request.config.getoption("--fresh") else 33
    report(f"seed {seed}")
    return seed


@pytest.fixture(scope="module")
def own_vllm():
    # Not at the top: it turns Triton's interpreter on, and every test file is imported in every run.
    import own_vllm

    return own_vllm


def drafts_of(case, b):
    return case.drafts[b, : case.lengths[b]]


def rows(case, array, extra=0):
    """A [B, ...] array as vLLM has it: the rows of the requests one after the other."""
    return torch.from_numpy(np.concatenate([array[b, : n + extra] for b, n in enumerate(case.lengths)]))


def draft_probs(case):
    """[B, K, V] float32."""
    scale = np.where(case.temperature > 0, case.temperature, 1)[:, None, None].astype(np.float32)
    return torch.from_numpy(case.draft_logits / scale).softmax(dim=-1).numpy()


def generators(case):
    return {
        int(b): torch.Generator().manual_seed(case.torch_seed + int(b) + 1) for b in np.flatnonzero(case.own_generator)
    }


def call_v1(rejection_sample, case):
    """([B, at most K + 1] tokens, the states of the generators afterwards)."""
    setting, own = case.setting, generators(case)
    torch.manual_seed(case.torch_seed)
    output = rejection_sample(
        rows(case, case.drafts),
        case.lengths.tolist(),
        int(case.lengths.max()),
        torch.from_numpy(np.cumsum(case.lengths).astype(np.int32)),
        rows(case, draft_probs(case)) if setting.draft_vocab else None,
        rows(case, case.logits),
        torch.from_numpy(case.bonus[:, None]),
        types.SimpleNamespace(
            all_greedy=setting.mode == "greedy",
            all_random=setting.mode == "sampling",
            temperature=None if setting.mode == "greedy" else torch.from_numpy(case.temperature.copy()),
            generators=own,
            top_k=None,
            top_p=None,
        ),
        fly_window_size=setting.window,
        fly_entropy_threshold=case.threshold,
        fly_entropy_top_k=setting.entropy_top_k,
    )
    assert output.shape == (len(case.lengths), case.lengths.max() + 1)
    assert output.dtype == torch.int32
    return output.numpy(), [torch.get_rng_state(), *(each.get_state() for each in own.values())]


def v1_requests(case):
    """The requests with the noise vLLM draws, drawn here once more."""
    setting, own = case.setting, generators(case)
    torch.manual_seed(case.torch_seed)
    uniform = rows(case, np.zeros(case.drafts.shape)).uniform_()
    for b, each in enumerate(uniform.split(case.lengths.tolist())):
        if b in own:
            each.uniform_(generator=own[b])
    exponential = torch.empty(len(case.lengths), setting.vocab).exponential_()
    for b, generator in own.items():
        if case.lengths[b] > 0:
            exponential[b].exponential_(generator=generator)
    for b, each in enumerate(uniform.split(case.lengths.tolist())):
        request = as_request(case, b)
        narrow = each.numpy().astype(np.float32)
        request.uniform = np.where(narrow < each.numpy(), np.nextafter(narrow, np.float32(np.inf)), narrow)
        request.gumbel = -np.log(exponential[b].numpy())
        request.bonus_token = int(case.bonus[b])
        if setting.draft_vocab:
            request.draft_probs = draft_probs(case)[b]
        yield request


def call_v2(rejection_sample, case):
    """(a token list per request, what is behind them)."""
    setting, batch = case.setting, len(case.lengths)
    by_state = {}
    for name in ("temperature", "seed", "draft_logits"):
        values = getattr(case, name)
        if values is not None:
            by_state[name] = torch.ones((batch + 1, *values.shape[1:]), dtype=torch.from_numpy(values).dtype)
            by_state[name][case.states] = torch.from_numpy(values)
    last = np.zeros((batch, 1), np.int32)
    local = np.broadcast_to(np.arange(setting.max_drafts + 1, dtype=np.int32), (batch, setting.max_drafts + 1))
    sampled, num_sampled = rejection_sample(
        rows(case, case.logits, 1),
        by_state.get("draft_logits"),
        rows(case, np.concatenate([last, case.drafts], axis=1), 1),
        torch.from_numpy(np.cumsum([0, *(case.lengths + 1)]).astype(np.int32)),
        rows(case, case.positions[:, None] + local, 1),
        torch.from_numpy(case.states),
        torch.from_numpy(np.repeat(case.states, case.lengths + 1)),
        rows(case, local, 1),
        by_state["temperature"],
        by_state["seed"],
        setting.max_drafts,
        fly_window_size=setting.window or 0,
        fly_entropy_threshold=case.threshold,
        fly_entropy_top_k=setting.entropy_top_k,
    )
    assert sampled.shape == (batch, setting.max_drafts + 1)
    assert (sampled.dtype, num_sampled.dtype) == (torch.int64, torch.int32)
    return sampled.numpy(), num_sampled.numpy()


def v2_requests(case):
    for b in range(len(case.lengths)):
        request = as_request(case, b)
        request.seed = int(case.seed[b])
        request.positions = case.positions[b] + np.arange(case.setting.max_drafts + 1)
        if case.draft_logits is not None:
            request.draft_logits, request.draft_temperature = case.draft_logits[b], float(case.temperature[b])
        yield request


def as_request(case, b):
    return reference.Request(
        logits=case.logits[b],
        drafts=drafts_of(case, b),
        num_drafts=int(case.lengths[b]),
        window=case.setting.window,
        threshold=case.threshold,
        entropy_top_k=case.setting.entropy_top_k,
        temperature=float(case.temperature[b] > 0),  # the logits are divided by it already
    )


def listed_difference(version, case, b, expected):
    """Why a request may differ from vLLM's output (docs of the rule: where its runners differ), or None."""
    drafts, r = drafts_of(case, b), expected.num_accepted
    if (drafts >= case.setting.vocab).any():
        return OUTSIDE
    if expected.margin < 1:
        return NEAR_TIE
    if case.draft_logits is None or case.temperature[b] == 0:
        return None
    if version == "v1":
        return PLACEHOLDER if r < len(drafts) and drafts[r] < 0 else None
    q = case.draft_logits[b, np.arange(len(drafts)), np.maximum(drafts, 0)]
    return ZERO_Q if (np.isneginf(q) & (drafts >= 0)).any() else None


class Tally:
    """Requests by what happened to them, and those that must match and did not."""

    def __init__(self, version):
        self.version = version
        self.counts, self.listed, self.differing = (collections.Counter() for _ in range(3))
        self.wrong = []

    def add(self, case, b, expected, ours, theirs):
        """`expected` is the reference's outcome; `ours` and `theirs` are tokens without padding."""
        ours, theirs = ours.tolist(), theirs.tolist()
        kept_all = expected.num_accepted == case.lengths[b]
        self.counts["requests"] += 1
        self.counts["deferrals"] += int(expected.deferred.sum())
        self.counts["bonus tokens" if kept_all else "rejections"] += 1
        self.counts["residual samples"] += bool(not kept_all and case.temperature[b] > 0)
        reason = listed_difference(self.version, case, b, expected)
        self.listed[reason] += reason is not None
        self.differing[reason] += reason is not None and ours != theirs
        if reason is None and not ours == theirs == expected.tokens:
            self.wrong.append(
                (case.setting, case.place, b, {"ours": ours, "vllm": theirs, "reference": expected.tokens})
            )

    def check(self, report):
        report(", ".join(f"{count} {what}" for what, count in self.counts.items()))
        for reason, count in sorted((+self.listed).items()):
            report(f"{self.differing[reason]} of {count} listed requests differ: {reason}")
        report(f"{len(self.wrong)} real mismatches")
        assert self.wrong == []
        assert self.listed.total() < 0.05 * self.counts["requests"]
        assert self.counts["deferrals"] > 60
        for what in ("rejections", "bonus tokens", "residual samples"):
            assert self.counts[what] > 100, what


def test_v1(seed, own_vllm, report):
    from fly_jax.bridges.vllm import v1

    tally = Tally("v1")
    for case in cases.generate(seed, cases.V1_SETTINGS, PER_SETTING):
        ours, our_states = call_v1(v1.rejection_sample, case)
        theirs, their_states = call_v1(own_vllm.v1_rejection_sample, case)
        assert all(map(torch.equal, our_states, their_states)), "the generators are left in other states"
        for b, request in enumerate(v1_requests(case)):
            tally.add(case, b, reference.verify(request), *(tokens[tokens >= 0] for tokens in (ours[b], theirs[b])))
            assert padded_at_the_end(ours[b])
    tally.check(report)


def test_v2(seed, own_vllm, report):
    from fly_jax.bridges.vllm import v2

    tally = Tally("v2")
    for case in cases.generate(seed, cases.V2_SETTINGS, PER_SETTING):
        ours, our_lengths = call_v2(v2.rejection_sample, case)
        theirs, their_lengths = call_v2(own_vllm.v2_rejection_sample, case)
        for b, request in enumerate(v2_requests(case)):
            kept = ours[b, : our_lengths[b]], theirs[b, : their_lengths[b]]
            tally.add(case, b, reference.verify(request), *kept)
            assert padded_at_the_end(ours[b])
            assert (ours[b] >= 0).sum() == our_lengths[b]
    tally.check(report)


def padded_at_the_end(tokens):
    return (np.diff((tokens >= 0).astype(int)) <= 0).all()
