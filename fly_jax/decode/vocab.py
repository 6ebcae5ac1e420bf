"""Drafting with a model of another vocabulary: token-level intersection (TLI).

Two tokenizers have in common the tokens that stand for the same text. The draft model may propose only these, so that
every draft is a token of the target, and reads what it has no token for as its unknown token. Each token is mapped to
one token: positions and lengths stay what they are. Verification knows nothing of it, and standard verification stays
lossless. The draft's distribution is not mapped, so drafting is greedy.

In the shape descriptions, `Vt` denotes the target's vocabulary (the columns of its logits) and `Vd` the draft's.

References:
  Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
  Vocabularies", 2025, arXiv:2502.05202.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

logger = logging.getLogger("fly_jax")

SPACE_MARKERS = ("\u0120", "\u2581")
"""How tokens begin that follow a space: in byte-level BPE and in SentencePiece."""

FEW_COMMON_TOKENS = 100
"""Below this many a warning is logged, as vLLM does."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of one model.

    Attributes:
      token_ids: by token, as the tokenizer writes it.
      size: columns of the model's logits; ids at or beyond it are left out.
      space_markers: what a token may begin with in place of a space.
      unk_token_id: the unknown token, if there is one.
      eos_token_id: the end of a text; serves where there is no unknown token.
    """

    token_ids: Mapping[str, int]
    size: int
    space_markers: tuple[str, ...] = SPACE_MARKERS
    unk_token_id: int | None = None
    eos_token_id: int | None = None

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, *, size: int, unk_token_id: int | None = None, eos_token_id: int | None = None
    ) -> "Vocabulary":
        """That of a `tokenizers.Tokenizer`, which does not know the other arguments."""
        token_ids = tokenizer.get_vocab(with_added_tokens=True)
        return cls(token_ids, size, _space_markers(tokenizer), unk_token_id, eos_token_id)

    def same_tokens(self, other: "Vocabulary") -> bool:
        """Whether every token that either model can emit has the same id in both: nothing is to be mapped.

        The logits may have different numbers of columns beyond the tokens.
        """
        ours, theirs = (
            {token: token_id for token, token_id in each.token_ids.items() if token_id < each.size}
            for each in (self, other)
        )
        return ours == theirs

    def by_text(self) -> dict[str, int]:
        """The ids by token, a leading space marker replaced by a space; the lowest id of equal ones."""
        by_text: dict[str, int] = {}
        for token, token_id in self.token_ids.items():
            text = _with_space(token, self.space_markers)
            by_text[text] = min(token_id, by_text.get(text, token_id))
        return {text: token_id for text, token_id in by_text.items() if token_id < self.size}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VocabMapping:
    """Which token of the draft is which of the target. A pytree; its three methods are pure and run under `jax.jit`.

    The same as vLLM 0.33's `VocabMapping`, except that of several tokens of equal text the lowest id counts (there the
    first in the tokenizer's own order), and that vocabularies with nothing in common are refused.

    Attributes:
      target_to_draft: `[Vt]` int32, the draft's token for each of the target's; its unknown token where it has none.
      draft_to_target: `[Vd]` int32, the other way round.
      is_common: `[Vd]` bool, which of the draft's tokens the target has too.
    """

    target_to_draft: Array
    draft_to_target: Array
    is_common: Array

    @classmethod
    def between(cls, target: Vocabulary, draft: Vocabulary) -> "VocabMapping":
        """Finds the common tokens; logs a warning when there are few, and when an end token serves as unknown token.

        Raises:
          ValueError: there is no common token, or a vocabulary has neither an unknown token nor an end of a text.
        """
        target_unknown, draft_unknown = _unknown_token_id("target", target), _unknown_token_id("draft", draft)
        target_ids, draft_ids = target.by_text(), draft.by_text()
        common = [(target_ids[text], draft_ids[text]) for text in target_ids.keys() & draft_ids.keys()]
        if not common:
            raise ValueError(
                f"the draft's vocabulary of {draft.size} tokens has none in common with the target's of {target.size}; "
                "take another draft model"
            )
        if len(common) < FEW_COMMON_TOKENS:
            logger.warning(
                "The vocabularies have only %d tokens in common (target %d, draft %d): few drafts can be accepted.",
                len(common),
                target.size,
                draft.size,
            )
        common_target, common_draft = np.asarray(common, np.int32).T
        target_to_draft = np.full(target.size, draft_unknown, np.int32)
        target_to_draft[common_target] = common_draft
        draft_to_target = np.full(draft.size, target_unknown, np.int32)
        draft_to_target[common_draft] = common_target
        is_common = np.zeros(draft.size, bool)
        is_common[common_draft] = True
        return cls(jnp.asarray(target_to_draft), jnp.asarray(draft_to_target), jnp.asarray(is_common))

    @property
    def target_vocab_size(self) -> int:
        """`Vt`."""
        return self.target_to_draft.shape[0]

    @property
    def draft_vocab_size(self) -> int:
        """`Vd`."""
        return self.draft_to_target.shape[0]

    @property
    def num_common_tokens(self) -> int:
        """How many tokens the vocabularies have in common; not under a transformation."""
        return int(np.sum(np.asarray(self.is_common)))

    def map_target_to_draft_ids(self, token_ids: Array) -> Array:
        """The draft's ids for the target's, int32 of any shape; every id must be in [0, Vt)."""
        return jnp.take(self.target_to_draft, token_ids, mode="clip")

    def map_draft_to_target_ids(self, token_ids: Array) -> Array:
        """The target's ids for the draft's, int32 of any shape; every id must be in [0, Vd)."""
        return jnp.take(self.draft_to_target, token_ids, mode="clip")

    def constrain_draft_logits(self, logits: Array) -> Array:
        """The draft's logits `[B, Vd]`, -inf where the token is not a common one."""
        return jnp.where(self.is_common[None], logits, -jnp.inf)


def _space_markers(tokenizer: Any) -> tuple[str, ...]:
    """What stands for the space in the token of " a"; both known markers where there is no such token."""
    try:
        tokens = tokenizer.encode(" a", add_special_tokens=False).tokens
    except Exception:  # The tokenizers package raises plain Exception where a word has no token.
        tokens = []
    shown = tokens[:1] and len(tokens[0]) > 1 and tokens[0].endswith("a") and not tokens[0].startswith((" ", "\t"))
    return (tokens[0][:-1],) if shown else SPACE_MARKERS


def _with_space(token: str, space_markers: tuple[str, ...]) -> str:
    for marker in space_markers:
        if token.startswith(marker):
            return " " + token.removeprefix(marker)
    return token


def _unknown_token_id(name: str, vocabulary: Vocabulary) -> int:
    """The token that stands for what has none."""
    token_id = vocabulary.unk_token_id if vocabulary.unk_token_id is not None else vocabulary.eos_token_id
    if token_id is None:
        raise ValueError(
            f"the {name}'s vocabulary has neither unk_token_id nor eos_token_id; give one: it stands for the tokens "
            "that the other vocabulary lacks"
        )
    if not 0 <= token_id < vocabulary.size:
        raise ValueError(f"the {name}'s unknown token must be in [0, {vocabulary.size}), got {token_id}")
    if vocabulary.unk_token_id is None:
        logger.warning(
            "The %s's tokenizer names no unknown token: its end token %d stands for tokens that the other model lacks.",
            name,
            token_id,
        )
    return token_id
