import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fly_jax import FlyConfig

FLY = {"rejection_sample_method": "fly", "num_speculative_tokens": 8}


def test_defaults_are_vllms():
    assert FlyConfig() == FlyConfig(window_size=None, entropy_threshold=0.3, entropy_top_k=3)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"window_size": 0}, ValueError, "window_size must be at least 1, got 0"),
        ({"window_size": 1.5}, TypeError, "window_size must be an int"),
        ({"window_size": True}, TypeError, "window_size must be an int"),
        ({"entropy_top_k": 0}, ValueError, "entropy_top_k must be at least 1, got 0"),
        ({"entropy_top_k": None}, TypeError, "entropy_top_k must be an int"),
        ({"entropy_threshold": -0.1}, ValueError, "entropy_threshold must be at least 0 nats .* got -0.1"),
        ({"entropy_threshold": math.nan}, ValueError, "entropy_threshold must be at least 0 nats .* got nan"),
        ({"entropy_threshold": [0.2, math.nan]}, ValueError, "entropy_threshold must be at least 0 nats .* got nan"),
        ({"entropy_threshold": np.ones(2, bool)}, TypeError, "entropy_threshold must be a number"),
        ({"entropy_threshold": 1j}, TypeError, "entropy_threshold must be a number"),
        ({"entropy_threshold": "high"}, TypeError, "entropy_threshold must be a number"),
        ({"entropy_threshold": np.array([0.1, -2.0])}, ValueError, "got -2.0"),
    ],
)
def test_bad_fields_are_refused(fields, error, words):
    with pytest.raises(error, match=words):
        FlyConfig(**fields)


def test_threshold_is_the_only_leaf_and_may_be_anything_a_pytree_holds():
    config = FlyConfig(4, 0.5, 7)
    leaves, structure = jax.tree.flatten(config)
    assert leaves == [0.5]
    assert jax.tree.unflatten(structure, [None]) == FlyConfig(4, None, 7)
    assert jax.jit(lambda c: c.entropy_threshold * 2)(config) == 1.0
    # Device values are never checked.
    assert FlyConfig(entropy_threshold=jnp.float32(-1)).entropy_threshold == -1


@pytest.mark.parametrize("method", [{}, {"rejection_sample_method": None}, {"rejection_sample_method": "standard"}])
def test_standard_verification_is_no_config(method):
    assert FlyConfig.from_vllm({"method": "ngram", "num_speculative_tokens": 4, **method}) is None


@pytest.mark.parametrize(("num_speculative_tokens", "window_size"), [(2, 1), (3, 2), (6, 5), (7, 6), (8, 6), (32, 6)])
def test_default_window_fits_the_draft(num_speculative_tokens, window_size):
    config = FlyConfig.from_vllm(FLY | {"num_speculative_tokens": num_speculative_tokens})
    assert config == FlyConfig(window_size, 0.3, 3)


def test_all_fields_are_read():
    fields = {"fly_window_size": 2, "fly_entropy_threshold": 1, "fly_entropy_top_k": 5}
    others = {"method": "draft_model", "model": "m", "draft_sample_method": "probabilistic"}
    assert FlyConfig.from_vllm(FLY | fields | others) == FlyConfig(2, 1, 5)
    assert FlyConfig.from_vllm(FLY | {"fly_entropy_threshold": math.inf}).entropy_threshold == math.inf


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"rejection_sample_method": "synthetic"}, ValueError, "rejection_sample_method .* got 'synthetic'"),
        ({"rejection_sample_method": "block"}, ValueError, "rejection_sample_method .* got 'block'"),
        ({"num_speculative_tokens": None}, ValueError, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 1}, ValueError, "num_speculative_tokens must be at least 2 .* got 1"),
        ({"num_speculative_tokens": "8"}, TypeError, "num_speculative_tokens must be an int"),
        ({"fly_window_size": 0}, ValueError, "fly_window_size must be at least 1, got 0"),
        ({"fly_window_size": 8}, ValueError, r"fly_window_size must be less than num_speculative_tokens \(8\), got 8"),
        ({"fly_window_size": 2.0}, TypeError, "fly_window_size must be an int"),
        ({"fly_entropy_threshold": -1.0}, ValueError, "fly_entropy_threshold must be at least 0"),
        ({"fly_entropy_threshold": math.nan}, ValueError, "fly_entropy_threshold must be at least 0"),
        ({"fly_entropy_threshold": "0.3"}, TypeError, "fly_entropy_threshold must be a number"),
        ({"fly_entropy_top_k": 0}, ValueError, "fly_entropy_top_k must be at least 1, got 0"),
        ({"fly_windowsize": 3}, ValueError, "fly_windowsize is not a field"),
        ({"draft_sample_method": "beam"}, ValueError, "draft_sample_method .* got 'beam'"),
        (
            {"use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"},
            ValueError,
            "use_heterogeneous_vocab=True works with draft_sample_method='greedy' only",
        ),
        (
            {"use_heterogeneous_vocab": True, "method": "ngram"},
            ValueError,
            "use_heterogeneous_vocab=True works with method='draft_model' only, got 'ngram'",
        ),
        (
            {"use_heterogeneous_vocab": True, "use_local_argmax_reduction": True},
            ValueError,
            "use_heterogeneous_vocab=True excludes use_local_argmax_reduction=True",
        ),
    ],
)
def test_what_vllm_refuses_is_refused(fields, error, words):
    with pytest.raises(error, match=words):
        FlyConfig.from_vllm(FLY | fields)


def test_a_string_is_no_mapping():
    with pytest.raises(TypeError, match=r"speculative_config must be a mapping .* got str"):
        FlyConfig.from_vllm('{"rejection_sample_method": "fly"}')


def test_heterogeneous_vocabulary_with_greedy_drafts_is_allowed():
    assert FlyConfig.from_vllm(FLY | {"use_heterogeneous_vocab": True}) == FlyConfig(6)
