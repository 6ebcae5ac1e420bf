"""Scripted drafts for vLLM's `custom_class` method: wrong where the script says so, whatever the target does."""

import json
import os

SCRIPT_VARIABLE = "FLY_JAX_TEST_DRAFTS"  # the path of the script: [{"prompt": [ids], "drafts": [ids]}, ...]


class ScriptedProposer:
    """Proposes, for a prompt in the script, the drafts of the positions that come next."""

    def __init__(self, vllm_config):
        self.most = vllm_config.speculative_config.num_speculative_tokens
        with open(os.environ[SCRIPT_VARIABLE]) as file:
            self.script = json.load(file)

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
        # A request without sampled tokens is still reading its prompt.
        return [
            self._next(token_ids_cpu[i, : num_tokens_no_spec[i]].tolist()) if sampled else []
            for i, sampled in enumerate(sampled_token_ids)
        ]

    def load_model(self, *args):
        """vLLM's runner for CPUs calls it."""

    def _next(self, tokens):
        for entry in self.script:
            length = len(entry["prompt"])
            if tokens[:length] == entry["prompt"]:
                start = len(tokens) - length
                return entry["drafts"][start : start + self.most]
        return []


class FailingProposer(ScriptedProposer):
    """Breaks the bridge in the process that verifies, which is where vLLM makes its proposer."""

    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        from fly_jax.bridges.vllm import v1

        def broken(step):
            raise RuntimeError("the bridge is broken on purpose")

        v1.verify = broken


def with_errors(tokens, wrong, every, first=2):
    """`tokens` with `wrong` at `first`, `first + every`, ..."""
    return [wrong if i >= first and (i - first) % every == 0 else token for i, token in enumerate(tokens)]
