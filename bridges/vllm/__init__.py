"""fly_jax inside vLLM: replacements for its verification functions, the plugin that hooks them, the cross-check."""

V1_MODULE = "vllm.v1.sample.rejection_sampler"
"""Where vLLM's V1 runner verifies."""
