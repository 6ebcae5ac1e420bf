"""What is recorded of a verification, against the NumPy reference; the writer's bound; the file and what it refuses."""

import json

import jax
import numpy as np
import pytest
import reference

from fly_jax import FlyConfig, VerifyNoise, fly_verify
from fly_jax.traces.file import Trace, TraceWriter, load_trace, save_trace
from fly_jax.traces.record import DEFERRABLE, DEFERRED, NATIVELY_ACCEPTED, TOP_K, trace_flattened_rows, trace_rows

B, K, V = 16, 8, 40
CONFIG = FlyConfig(1, 0.6, 3)


def make_call(seed, mode):
    """A batch in which everything happens, a NaN too; `mode` is "greedy", "one-hot" or "probs"."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.5, (B, K + 1, V)).astype(np.float32)
    rank = rng.choice(3, (B, K), p=[0.75, 0.15, 0.1])
    ids = np.take_along_axis(np.argsort(-logits[:, :K], axis=-1), rank[..., None], axis=-1)[..., 0].astype(np.int32)
    ids[0, 3], ids[1, 4], logits[2, 2, 5] = -1, V, np.nan
    call = {
        "target_logits": logits,
        "draft_token_ids": ids,
        "num_draft_tokens": rng.choice([K, K, K, 5, 0], B).astype(np.int32),
    }
    if mode == "greedy":
        return call
    call["temperature"] = rng.choice([0.0, 0.7, 1.0], B).astype(np.float32)
    uniform = (1 - rng.random((B, K))).astype(np.float32) ** 5
    call["noise"] = VerifyNoise(uniform, (1 - rng.random((B, 2))).astype(np.float32))
    call["min_p"] = np.full(B, 0.1, np.float32)
    if mode == "probs":
        weights = np.exp(logits[:, :K] + rng.normal(0, 1, (B, K, V)))
        call["draft_probs"] = np.nan_to_num(weights / weights.sum(-1, keepdims=True), nan=0.1).astype(np.float32)
    return call


def without_noise(call):
    return {name: value for name, value in call.items() if name != "noise"}


@jax.jit
def record(call, config):
    verification = fly_verify(**call, config=config)
    return verification, trace_rows(verification=verification, **without_noise(call))


def written(calls, config, num_positions=K, **options):
    """The trace of some calls under one setting."""
    writer = TraceWriter(config, num_speculative_tokens=num_positions, source="a test", **options)
    for i, call in enumerate(calls):
        writer.add(record(call, config)[1], request=np.arange(B), cycle=i)
    return writer.trace()


@pytest.mark.parametrize("mode", ["greedy", "probs"])
def test_rows_are_what_the_reference_computes(mode):
    call = make_call(3, mode)
    verification, rows = jax.device_get(record(call, CONFIG))
    np.testing.assert_array_equal(rows.num_accepted, verification.num_accepted)
    np.testing.assert_array_equal(rows.entropy, verification.entropy)
    flags = rows.flags.astype(int)
    np.testing.assert_array_equal((flags & NATIVELY_ACCEPTED) > 0, verification.natively_accepted)
    np.testing.assert_array_equal((flags & DEFERRED) > 0, verification.deferred)
    assert verification.deferred.any()
    min_p = None if mode == "greedy" else 0.1
    for b in range(B):
        temperature = None if mode == "greedy" else float(call["temperature"][b])
        for i in range(rows.num_draft_tokens[b]):
            row = reference.process(call["target_logits"][b, i].copy(), temperature, min_p, None, None)
            d = int(call["draft_token_ids"][b, i])
            inside = 0 <= d < V
            assert rows.draft_token_id[b, i] == (d if inside else -1)
            samples = not reference.is_greedy(temperature)
            q = call["draft_probs"][b, i, d] if mode == "probs" and samples and inside else np.nan
            np.testing.assert_equal(rows.draft_prob[b, i], np.float32(q))
            if row.invalid:
                assert rows.argmax_token_id[b, i] == -1
                assert np.isnan(rows.top_logprobs[b, i]).all()
                assert np.isnan(rows.draft_logprob[b, i])
                assert not flags[b, i] & DEFERRABLE
                continue
            assert rows.argmax_token_id[b, i] == row.argmax
            top = np.sort(row.log_p)[::-1][:TOP_K]
            np.testing.assert_allclose(rows.top_logprobs[b, i], top, rtol=2e-6, atol=row.slack)
            expected = row.log_p[d] if inside else np.nan
            np.testing.assert_allclose(rows.draft_logprob[b, i], expected, rtol=2e-6, atol=row.slack)
            assert bool(flags[b, i] & DEFERRABLE) == (inside and row.kept[d])


def test_flattened_rows_are_the_same():
    call = make_call(4, "greedy")
    verification, rows = record(call, CONFIG)
    order = np.random.default_rng(0).permutation(B * (K + 1)).astype(np.int32)
    index = np.argsort(order).astype(np.int32).reshape(B, K + 1)
    flat = {**call, "target_logits": call["target_logits"].reshape(-1, V)[order]}
    flat_rows = jax.jit(trace_flattened_rows)(row_index=index, verification=verification, **flat)
    for name, value in vars(jax.device_get(rows)).items():
        np.testing.assert_array_equal(getattr(flat_rows, name), value, name)


def test_a_verification_of_other_shapes_is_refused():
    call = make_call(0, "greedy")
    verification = jax.eval_shape(fly_verify, **call)
    shorter = {**call, "target_logits": call["target_logits"][:, 1:], "draft_token_ids": call["draft_token_ids"][:, 1:]}
    with pytest.raises(ValueError, match=r"verification must be of \[B, K\] = \[16, 7\], got \[16, 8\]"):
        trace_rows(verification=verification, **shorter)


def test_a_cycle_without_drafts_has_no_row_and_finished_requests_no_cycle():
    call = make_call(0, "greedy")
    call = {**call, "target_logits": call["target_logits"][:, :1], "draft_token_ids": call["draft_token_ids"][:, :0]}
    writer = TraceWriter(None, num_speculative_tokens=K, source="a test")
    writer.add(record(call, None)[1], request=np.where(np.arange(B) < 3, np.arange(B), -1), cycle=5)
    trace = writer.trace()
    assert trace.cycles["request"].tolist() == [0, 1, 2]
    assert trace.cycles["cycle"].tolist() == [5, 5, 5]
    assert trace.cycles["num_draft_tokens"].tolist() == [0, 0, 0]
    assert len(trace.rows["flags"]) == 0


def test_the_file_gives_back_what_was_written(tmp_path):
    trace = written([make_call(seed, "probs") for seed in (0, 1)], CONFIG, model="tiny", sampling={"temperature": 0.7})
    path = tmp_path / "trace.npz"
    save_trace(trace, path)
    loaded = load_trace(path)
    assert [each.name for each in tmp_path.iterdir()] == ["trace.npz"]
    for name, value in {**trace.cycles, **trace.rows}.items():
        np.testing.assert_array_equal({**loaded.cycles, **loaded.rows}[name], value)
    assert loaded.meta == trace.meta
    assert loaded.config == CONFIG
    assert (loaded.num_speculative_tokens, loaded.meta["model"], loaded.meta["sampling"]) == (
        8,
        "tiny",
        {"temperature": 0.7},
    )
    assert {"fly-jax", "jax", "numpy"} <= loaded.meta["versions"].keys()
    # What the documentation says of its size.
    assert sum(each.nbytes for each in loaded.rows.values()) == 53 * len(loaded.rows["flags"])
    assert sum(each.nbytes for each in loaded.cycles.values()) == 16 * len(loaded.cycles["request"])


def test_the_oldest_are_kept_up_to_the_bound():
    calls = [make_call(seed, "greedy") for seed in range(4)]
    rows = [int(np.maximum(call["num_draft_tokens"], 1).sum()) for call in calls]
    writer = TraceWriter(CONFIG, num_speculative_tokens=K, source="a test", max_rows=rows[0] + rows[1] + 1)
    for i, call in enumerate(calls):
        assert writer.is_full == (i > 2)
        writer.add(record(call, CONFIG)[1], request=np.arange(B), cycle=i)
    trace = writer.trace()
    assert set(trace.cycles["cycle"]) == {0, 1}
    assert trace.meta["is_full"] is True


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (FlyConfig(2, 0.3, 9), "entropy_top_k must be at most 8 to be recorded"),
        (FlyConfig(2, np.full(B, 0.3, np.float32)), "entropy_threshold must be one number"),
    ],
)
def test_a_setting_that_cannot_be_replayed_is_refused(config, words):
    with pytest.raises(ValueError, match=words):
        TraceWriter(config, num_speculative_tokens=K, source="a test")


def test_what_is_not_standard_by_name_only_is_standard():
    assert TraceWriter(FlyConfig(2, np.inf), num_speculative_tokens=K, source="a test").trace().config is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays: {"a": np.zeros(2)}, "it has no 'meta'"),
        (lambda arrays: {**arrays, "meta": np.asarray("[]")}, "list indices"),
        (lambda arrays: with_meta(arrays, version=2), "its version is 2, this fly_jax reads 1"),
        (lambda arrays: with_meta(arrays, format="other"), "its format is 'other'"),
        (lambda arrays: with_meta(arrays, num_speculative_tokens=3), "num_speculative_tokens is 3"),
        (lambda arrays: {**arrays, "flags": arrays["flags"][1:]}, "rows that num_draft_tokens adds up to"),
        (lambda arrays: {**arrays, "num_accepted": arrays["num_accepted"] + 9}, "num_accepted is not between"),
        (lambda arrays: {**arrays, "entropy": arrays["entropy"].astype(float)}, "entropy is float64"),
        (lambda arrays: {**arrays, "cycle": arrays["cycle"][1:]}, "same number of cycles"),
    ],
)
def test_other_files_are_refused(tmp_path, change, words):
    trace = written([make_call(0, "greedy")], CONFIG)
    arrays = {"meta": np.asarray(json.dumps(trace.meta)), **trace.cycles, **trace.rows}
    path = tmp_path / "other.npz"
    np.savez(path, **change(arrays))
    with pytest.raises(ValueError, match=f"other.npz is not a trace that fly_jax can read: .*{words}"):
        load_trace(path)


def with_meta(arrays, **changes):
    return {**arrays, "meta": np.asarray(json.dumps({**json.loads(str(arrays["meta"])), **changes}))}


def test_damaged_files_are_refused_and_a_failed_write_leaves_nothing(tmp_path):
    trace = written([make_call(0, "greedy")], CONFIG)
    whole = tmp_path / "trace.npz"
    save_trace(trace, whole)
    for name, content in (("cut.npz", whole.read_bytes()[:-300]), ("text.npz", b"no"), ("empty.npz", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a trace"):
            load_trace(tmp_path / name)
    before = whole.read_bytes()
    with pytest.raises(TypeError):
        save_trace(Trace(trace.cycles, trace.rows, {"no": object()}), whole)
    assert whole.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 4
