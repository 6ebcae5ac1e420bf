"""Deliberate mistakes in every part of the rule and in the traces, each of which the default run must notice.

`python tests/mutations.py` runs them all; `test_mutations.py` does the same under pytest.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Mutation:
    """`old` occurs once in `file` of the package and becomes `new`; then `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "u = 0 accepts a probability of 0",
        "rule/acceptance.py",
        "may_defer & (p > 0) & (ratio >= noise.uniforms())",
        "may_defer & (ratio >= noise.uniforms())",
        "test_properties.py::test_zero_uniform_does_not_accept_an_excluded_token",
    ),
    Mutation(
        "p equal to u is rejected",
        "rule/acceptance.py",
        "ratio >= noise.uniforms()",
        "ratio > noise.uniforms()",
        "test_inputs.py::test_a_float64_uniform_is_rounded_up",
    ),
    Mutation(
        "q is ignored",
        "rule/acceptance.py",
        "p / draft.token_probability(inputs.draft_token_ids)",
        "p",
        "test_distributions.py::test_standard_verification_emits_the_target_distribution[probs-plain-10000]",
    ),
    Mutation(
        "q = 0 is accepted",
        "rule/acceptance.py",
        ">= kernels.TINY",
        ">= 0",
        "test_properties.py::test_a_draft_the_draft_model_excludes_is_never_kept",
    ),
    Mutation(
        "what the target excludes may be kept",
        "rule/acceptance.py",
        " & ~target.excludes(rows, inputs.draft_token_ids)",
        "",
        "test_properties.py::test_masked_tokens_are_never_accepted_or_deferred_to",
    ),
    Mutation(
        "one rejection in the window is overlooked",
        "rule/deferral.py",
        "== window_size\n",
        ">= window_size - 1\n",
        "test_properties.py::test_example_emits_one_token_otherwise",
    ),
    Mutation(
        "the gate is open below the threshold",
        "rule/deferral.py",
        "(entropy >= threshold[:, None])",
        "(entropy <= threshold[:, None])",
        "test_properties.py::test_example_defers_and_emits_four_tokens",
    ),
    Mutation(
        "what may not be deferred is",
        "rule/deferral.py",
        "        & native.deferrable\n",
        "",
        "test_properties.py::test_placeholders_are_never_kept_or_read",
    ),
    Mutation(
        "too few rows are looked at",
        "rule/deferral.py",
        "num_positions // (window_size + 1)",
        "num_positions // (window_size + 2)",
        "test_against_reference.py::test_fly_verify_matches[greedy]",
    ),
    Mutation(
        "a token is removed from the bonus row",
        "rule/emission.py",
        "rejected[:, None] & (columns == rejected_id[:, None])",
        "columns == rejected_id[:, None]",
        "test_properties.py::test_standard_verification_of_nothing_drafted_is_plain_sampling",
    ),
    Mutation(
        "the residual is p",
        "rule/emission.py",
        "difference = p - q",
        "difference = p + 0.0 * q",
        "test_distributions.py::test_standard_verification_emits_the_target_distribution[probs-plain-10000]",
    ),
    Mutation(
        "an invalid row is not noticed",
        "rule/emission.py",
        "invalid = ~target.valid[rows]",
        "invalid = target.valid[rows] & False",
        "test_properties.py::test_invalid_row_gives_a_token_and_a_flag",
    ),
    Mutation(
        "a negative length is taken as it is",
        "rule/edge.py",
        'value, ("B",), sizes), 0, sizes["K"])',
        'value, ("B",), sizes), None, sizes["K"])',
        "test_against_reference.py::test_fly_verify_matches[target-only, bf16, masks, vocab_size]",
    ),
    Mutation(
        "a wide id wraps into the vocabulary",
        "rule/arrays.py",
        "and value.dtype.itemsize > 4",
        "and value.dtype.itemsize > 8",
        "test_inputs.py::test_a_wide_id_is_not_wrapped_into_the_vocabulary",
    ),
    Mutation(
        "the bonus row takes no part",
        "rule/edge.py",
        "live=(position <= last_row[:, None])",
        "live=(position < last_row[:, None])",
        "test_against_reference.py::test_fly_verify_matches[target-only, bf16, masks, vocab_size]",
    ),
    Mutation(
        "columns count that only one of target and draft has",
        "rule/edge.py",
        "common = min(num_columns, draft_columns)",
        "common = max(num_columns, draft_columns)",
        "test_against_reference.py::test_fly_verify_matches[draft logits, short draft vocabulary, own temperature]",
    ),
    Mutation(
        "greedy drafts are taken for drawn ones",
        "rule/scoring.py",
        "one_hot = thresholds.is_greedy(draft.temperature)",
        "one_hot = jnp.zeros(draft.temperature.shape, bool)",
        "test_against_reference.py::test_fly_verify_matches[draft logits, vLLM V2's noise, own temperature]",
    ),
    Mutation(
        "the maximum is subtracted after the temperature, not before",
        "rule/scoring.py",
        """        difference = logits - of_rows(self.row_max)
        scaled = difference if self.scale is None else difference * of_rows(self.scale)
        return scaled - of_rows(self.log_mass)
""",
        """        scaled = logits if self.scale is None else logits * of_rows(self.scale)
        return scaled - of_rows(self.row_max) - of_rows(self.log_mass)
""",
        "test_logprobs.py::test_processed_logprobs_follow_temperature_and_top_k",
    ),
    Mutation(
        "what ties with the cut-off is masked",
        "rule/thresholds.py",
        "divide(-negated, row_divisor) >= cutoff",
        "divide(-negated, row_divisor) > cutoff",
        "test_kernels.py::test_ties_that_the_division_makes_are_kept",
    ),
    Mutation(
        "top-p counts the mass that top-k has masked",
        "rule/thresholds.py",
        "active, threshold=threshold, vocab_size",
        "active, threshold=jnp.full_like(threshold, -jnp.inf), vocab_size",
        "test_kernels.py::test_masks_in_their_order",
    ),
    Mutation(
        "a deferral is recorded as something else",
        "traces/record.py",
        "(verification.deferred, DEFERRED)",
        "(verification.deferred, DEFERRABLE)",
        "test_trace.py::test_rows_are_what_the_reference_computes",
    ),
    Mutation(
        "a cycle between two chunks is left out",
        "traces/replay.py",
        "in range(0, len(lengths), size)",
        "in range(0, len(lengths), size + 1)",
        "test_sweep.py::test_the_figures_are_those_of_a_plain_replay",
    ),
    Mutation(
        "a window must be longer than it is",
        "traces/replay.py",
        "cycles.num_accepted_after >= setting.window_sizes",
        "cycles.num_accepted_after > setting.window_sizes",
        "test_sweep.py::test_every_threshold_replayed_is_fly_verify",
    ),
    Mutation(
        "the loss has the other sign",
        "traces/replay.py",
        'loss=top_logprobs[:, :, 0] - rows["draft_logprob"]',
        'loss=rows["draft_logprob"] - top_logprobs[:, :, 0]',
        "test_sweep.py::test_the_figures_are_those_of_a_plain_replay",
    ),
]


def copy_package(folder):
    """A copy of the package and its tests that is imported instead of the installed one."""
    shutil.copytree(ROOT / "fly_jax", folder / "fly_jax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "data"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    found = _python(folder, "-c", "import fly_jax; print(fly_jax.__file__)").stdout.strip()
    if pathlib.Path(found).parent != folder / "fly_jax":
        raise RuntimeError(f"the copy is not what is imported: {found}")


def apply(mutation, folder):
    """Edits the copy; an `old` that is missing or ambiguous is an error, not a mutation that survives."""
    path = folder / "fly_jax" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise RuntimeError(f"{mutation.file} has {text.count(mutation.old)} of {mutation.old!r}, not one")
    path.write_text(text.replace(mutation.old, mutation.new))


def run(folder, tests):
    """pytest's exit status: 0 all passed, 1 some failed; anything else says that nothing was tested."""
    done = _python(
        folder, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *[f"tests/{test}" for test in tests]
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run:\n{done.stdout}\n{done.stderr}")
    return done.returncode


def _python(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("FLY_JAX_TESTS_FULL", None)  # it is the default run that has to notice
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def main():
    survivors = 0
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name).resolve()
            copy_package(folder)
            apply(mutation, folder)
            caught = run(folder, [mutation.test]) == 1
        survivors += not caught
        print(f"{'caught' if caught else 'SURVIVED'}: {mutation.file}: {mutation.name}", flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main())
