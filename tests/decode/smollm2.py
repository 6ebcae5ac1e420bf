"""The default model, and what it answers without drafts: read and decoded once in a process."""

import functools

from fly_jax.decode.checkpoints.load import load_model
from fly_jax.decode.generate import Generator

MAX_MODEL_LEN = 320  # of every test, so that they share what they compile


@functools.cache
def loaded():
    return load_model(None)


def prompt_of(messages):
    return tuple(loaded().tokenizer.encode_chat(messages))


def generator(drafter=None):
    return Generator(loaded().decoder, drafter=drafter, max_model_len=MAX_MODEL_LEN)


@functools.cache
def target_only(prompt, max_tokens):
    """The target's own answer, decoded without other prompts beside it."""
    return generator().generate(prompt, max_tokens=max_tokens, eos_token_ids=loaded().tokenizer.eos_token_ids)
