"""vLLM's functions decided in JAX: its recorded outputs torch to torch, its noise, few programs."""

import types

import golden
import numpy as np
import pytest
import test_golden
from conftest import QUICK_COMPILATION

torch = pytest.importorskip("torch")

from fly_jax import FlyConfig  # noqa: E402
from fly_jax.bridges.vllm import programs, v1, v2  # noqa: E402

pytestmark = pytest.mark.torch


def metadata(temperature, generators=()):
    temperature = torch.tensor(temperature, dtype=torch.float32)
    return types.SimpleNamespace(
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature != 0).all()),
        temperature=temperature,
        generators=dict(generators),
    )


def columns(array, case, fill):
    """The array as a tensor with a few vocabulary sizes in all: the columns added cannot be drawn."""
    missing = test_golden.bucket(case) - array.shape[-1]
    return torch.from_numpy(np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)], constant_values=fill))


@pytest.fixture
def quick(monkeypatch):
    """Few shapes, quick to compile: there are 31 combinations of what else is static."""
    programs.forget()
    monkeypatch.setattr("fly_jax.compat.compiler_options", lambda _: QUICK_COMPILATION)
    for module in (v1, v2):
        monkeypatch.setattr(module, "request_bucket", lambda _: 8)
        monkeypatch.setattr(module, "row_bucket", lambda *_: 64)
    yield
    programs.forget()


def v1_tokens(case, monkeypatch):
    """The recorded call through the replacement, with the recorded noise in the place of what it draws."""
    noise = torch.from_numpy(case.uniform.copy()), columns(case.q, case, 1)
    monkeypatch.setattr(v1, "draw_noise", lambda *_: noise)
    fly = {}
    if case.window:
        fly = {
            "fly_window_size": case.window,
            "fly_entropy_threshold": case.threshold,
            "fly_entropy_top_k": case.entropy_top_k,
        }
    lengths = case.num_draft_tokens.tolist()
    output = v1.rejection_sample(
        torch.from_numpy(case.draft_token_ids.astype(np.int32)),
        lengths,
        max(lengths),
        torch.from_numpy(np.cumsum(lengths).astype(np.int32)),
        columns(case.draft_probs, case, 0) if case.has_draft else None,
        columns(case.target_logits, case, -np.inf),
        torch.from_numpy(case.bonus_token_ids.astype(np.int64))[:, None],
        metadata(case.temperature),
        **fly,
    )
    assert output.dtype == torch.int32
    assert output.shape == (case.batch, max(lengths) + 1)
    return [[token for token in row if token >= 0] for row in output.tolist()]


def v2_tokens(case):
    lengths = case.num_draft_tokens + 1
    request = np.arange(case.batch)
    # The states of the requests are not in their order, and there are more than the batch has.
    states = np.roll(np.arange(case.batch + 2), 1)[: case.batch]

    def by_state(values):
        tensor = torch.zeros((case.batch + 2, *values.shape[1:]), dtype=values.dtype)
        tensor[torch.from_numpy(states)] = values
        return tensor

    if case.has_draft:
        draft_logits = columns(case.draft_logits, case, -np.inf)
        draft_logits = torch.nn.functional.pad(draft_logits, (0, 0, 0, test_golden.K - case.max_drafts))
    sampled, num_sampled = v2.rejection_sample(
        columns(case.target_logits, case, -np.inf),
        by_state(draft_logits) if case.has_draft else None,
        torch.from_numpy(case.draft_sampled.astype(np.int32)),
        torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        torch.from_numpy(case.pos.astype(np.int64)),
        torch.from_numpy(states.astype(np.int32)),
        torch.from_numpy(np.repeat(states, lengths).astype(np.int32)),
        torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)),
        by_state(torch.from_numpy(case.temperature.astype(np.float32))),
        by_state(torch.from_numpy(case.seed.astype(np.int64))),
        test_golden.K,
        fly_window_size=case.window,
        fly_entropy_threshold=case.threshold,
        fly_entropy_top_k=case.entropy_top_k,
    )
    assert sampled.dtype == torch.int64
    assert num_sampled.dtype == torch.int32
    assert sampled.shape == (len(request), test_golden.K + 1)
    return [sampled[b, : num_sampled[b]].tolist() for b in request]


def test_v1_replacement_gives_the_recorded_tokens(report, monkeypatch, quick):
    found = test_golden.compare(golden.load("v1"), lambda case: v1_tokens(case, monkeypatch), report)
    assert found == (1259, test_golden.ELIGIBLE["v1"])


def test_v2_replacement_gives_the_recorded_tokens(report, quick):
    found = test_golden.compare(golden.load("v2"), v2_tokens, report)
    assert found == (1259, test_golden.ELIGIBLE["v2"])


def random_step(rng, lengths, vocab_size=64, draft_probs=False):
    num_drafts = sum(lengths)
    # Cloned: torch aligns its memory, NumPy does not.
    logits = torch.from_numpy(rng.normal(0, 3, (num_drafts, vocab_size)).astype(np.float32)).clone()
    drafts = logits.argmax(dim=1).to(torch.int32)
    return {
        "draft_token_ids": drafts,
        "num_draft_tokens": lengths,
        "max_spec_len": max(lengths, default=0),
        "cu_num_draft_tokens": torch.tensor(lengths).cumsum(0).to(torch.int32),
        "draft_probs": logits.softmax(dim=1) if draft_probs else None,
        "target_logits": logits,
        "bonus_token_ids": torch.arange(len(lengths), dtype=torch.int32)[:, None],
    }


@pytest.mark.parametrize(("temperature", "draft_probs"), [(0.0, False), (0.8, False), (0.8, True)])
def test_two_hundred_steps_of_changing_shape_compile_at_most_eight_times(temperature, draft_probs):
    rng = np.random.default_rng(7)
    before, shapes = programs.num_programs(), set()
    for _ in range(200):
        lengths = rng.integers(0, rng.integers(2, 18), rng.integers(1, 33)).tolist()
        shapes.add((len(lengths), sum(lengths)))
        step = random_step(rng, lengths, vocab_size=40, draft_probs=draft_probs)
        v1.rejection_sample(**step, sampling_metadata=metadata([temperature] * len(lengths)))
    assert len(shapes) > 100
    assert 2 <= programs.num_programs() - before <= 8


def test_a_step_that_fits_its_bucket_crosses_without_a_copy(monkeypatch):
    crossed = {}
    to_jax = v1.dlpack.to_jax

    def record(tensor, *, name, **options):
        crossed[name] = tensor, to_jax(tensor, name=name, **options)
        return crossed[name][1]

    monkeypatch.setattr(v1.dlpack, "to_jax", record)
    step = random_step(np.random.default_rng(0), [8] * 8, draft_probs=True)
    v1.rejection_sample(**step, sampling_metadata=metadata([0.5] * 8))
    for name in ("target_logits", "draft_probs", "exponential"):
        assert v1.dlpack.shares_memory(*crossed[name])
        if name in step:
            assert crossed[name][0] is step[name]


def test_a_step_without_drafts_emits_the_bonus_tokens():
    for temperature in (0.0, 1.0):
        step = random_step(np.random.default_rng(0), [0, 0, 0])
        output = v1.rejection_sample(**step, sampling_metadata=metadata([temperature] * 3))
        assert output.tolist() == [[0], [1], [2]]


def test_noise_is_drawn_as_vllm_draws_it():
    """Uniforms, then exponential noise; each for all requests, then again for those with a generator and drafts."""
    lengths = [3, 0, 2]
    logits = torch.zeros((5, 50))
    torch.manual_seed(3)
    generators = {request: torch.Generator().manual_seed(request) for request in (1, 2)}
    uniform, exponential = v1.draw_noise(lengths, logits, generators)

    torch.manual_seed(3)
    own = torch.Generator().manual_seed(2)
    expected = torch.rand((5,), dtype=torch.float64)
    expected[3:5].uniform_(generator=own)
    q = torch.empty((3, 50)).exponential_()
    q[2].exponential_(generator=own)
    assert torch.equal(uniform, expected)
    assert torch.equal(exponential[:3], q)
    assert torch.equal(generators[2].get_state(), own.get_state())
    assert torch.equal(generators[1].get_state(), torch.Generator().manual_seed(1).get_state())


def test_what_leaves_is_not_the_memory_of_jax():
    step = random_step(np.random.default_rng(0), [2, 2])
    drawn = v1.draw_step(
        step["draft_token_ids"], [2, 2], None, step["target_logits"], step["bonus_token_ids"], metadata([0.0, 0.0])
    )
    verification, _ = v1.verify(drawn)
    before = np.array(verification.token_ids)
    v1.emitted(verification, 2, 2).fill_(77)
    np.testing.assert_array_equal(verification.token_ids, before)


def test_totals_count_kept_deferred_and_invalid():
    lengths = [4, 4]
    logits = torch.zeros((8, 16))
    drafts = torch.arange(8, dtype=torch.int32)
    logits[torch.arange(8), drafts.long()] = 9.0
    logits[1, 0] = 9.5  # request 0 rejects position 1, undecided
    logits[5] = torch.nan  # request 1 stops at position 1
    step = v1.Step(drafts, lengths, logits, None, torch.tensor([1, 2]), config=FlyConfig(2, 0.3))
    verification, totals = v1.verify(step)
    assert verification.num_accepted[:2].tolist() == [4, 1]
    assert totals.tolist() == [5, 1, 1]


@pytest.mark.parametrize("option", ["synthetic_mode", "use_fp64_gumbel"])
def test_what_is_not_ours_goes_to_vllm(option, monkeypatch):
    calls = []
    monkeypatch.setattr(v1, "vllm_original", lambda: lambda *args, **kwargs: calls.append(kwargs) or "vllm's")
    step = random_step(np.random.default_rng(0), [2])
    assert v1.rejection_sample(**step, sampling_metadata=metadata([0.0]), **{option: True}) == "vllm's"
    assert calls[0][option] is True
    assert "fly_window_size" not in calls[0]  # vLLM 0.32 has no such argument


def test_fly_excludes_synthetic_acceptance_and_needs_a_threshold():
    step = random_step(np.random.default_rng(0), [2])
    with pytest.raises(ValueError, match="excludes synthetic"):
        v1.rejection_sample(**step, sampling_metadata=metadata([0.0]), synthetic_mode=True, fly_window_size=1)
    with pytest.raises(ValueError, match="fly_entropy_threshold must be a number"):
        v1.rejection_sample(**step, sampling_metadata=metadata([0.0]), fly_window_size=1)


def v2_arguments(**options):
    return {
        "target_logits": torch.zeros((3, 8)),
        "draft_logits": None,
        "draft_sampled": torch.zeros(3, dtype=torch.int32),
        "cu_num_logits": torch.tensor([0, 3], dtype=torch.int32),
        "pos": torch.arange(3),
        "idx_mapping": torch.zeros(1, dtype=torch.int32),
        "expanded_idx_mapping": torch.zeros(3, dtype=torch.int32),
        "expanded_local_pos": torch.arange(3, dtype=torch.int32),
        "temperature": torch.zeros(1),
        "seed": torch.zeros(1, dtype=torch.int64),
        "num_speculative_steps": 2,
        **options,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"synthetic_conditional_rates": torch.ones(2)},
        {"use_block_verification": True},
        {"use_fp64": True},
        {"contexts": torch.zeros((3, 1)), "watermarking": torch.ones(1, dtype=torch.bool), "watermark_key": 0},
    ],
    ids=["synthetic", "block", "fp64", "watermark"],
)
def test_v2_sends_to_vllm_what_is_not_ours(options, monkeypatch):
    calls = []
    own = types.SimpleNamespace(rejection_sample=lambda *args, **kwargs: calls.append(kwargs) or "vllm's")
    monkeypatch.setattr(v2.importlib, "import_module", lambda name: own)
    assert v2.rejection_sample(**v2_arguments(**options)) == "vllm's"
    assert calls[0].keys() == options.keys()


@pytest.mark.parametrize("options", [{"synthetic_conditional_rates": torch.ones(2)}, {"use_block_verification": True}])
def test_v2_refuses_what_fly_excludes(options):
    with pytest.raises(ValueError, match="which FLy excludes"):
        v2.rejection_sample(**v2_arguments(fly_window_size=1, **options))


def test_golden_cases_have_what_these_tests_are_about():
    assert any(case.window and case.has_draft for case in golden.load("v1"))
