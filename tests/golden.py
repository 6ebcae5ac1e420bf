"""Reads tests/data/golden_*.npz; tests/data/README.md describes the fields."""

import dataclasses
import functools
import pathlib

import numpy as np

DATA = pathlib.Path(__file__).parent / "data"
MARGIN = 1e-4  # below it, a decision may fall either way by float rounding


@dataclasses.dataclass(frozen=True)
class Case:
    """One recorded call. Row arrays are flattened over requests; `draft_start` and `row_start` cut them."""

    version: str
    index: int
    tag: str
    out_of_vocabulary: bool
    vocab: int
    batch: int
    max_drafts: int
    window: int  # 0: FLy was off
    entropy_top_k: int
    threshold: float
    has_draft: bool
    arrays: dict

    def __getattr__(self, name):
        try:
            return self.__dict__["arrays"][name]
        except KeyError:
            raise AttributeError(name) from None

    @functools.cached_property
    def draft_start(self):
        """[B+1]: request b's drafts are draft_start[b] : draft_start[b + 1]."""
        return np.concatenate([[0], np.cumsum(self.num_draft_tokens)])

    @functools.cached_property
    def row_start(self):
        """[B+1]: request b's logit rows; the v2 file has a bonus row after each request's drafts."""
        bonus = 1 if self.version == "v2" else 0
        return np.concatenate([[0], np.cumsum(self.num_draft_tokens + bonus)])

    def drafts_of(self, b):
        """The n[b] draft tokens of a request."""
        if self.version == "v1":
            return self.draft_token_ids[self.draft_start[b] : self.draft_start[b + 1]]
        return self.draft_sampled[self.row_start[b] + 1 : self.row_start[b + 1]]

    def expected_of(self, b):
        """The tokens vLLM emitted for a request, without padding."""
        if self.version == "v1":
            return self.output[b][self.output[b] >= 0]
        return self.sampled[b][: self.num_sampled[b]]

    def near_tie(self, b):
        """Whether any decision of the request is within rounding of its opposite."""
        rows = slice(self.draft_start[b], self.draft_start[b + 1])
        close = (self.margin_accept[rows] < MARGIN).any() or (self.margin_entropy[rows] < MARGIN).any()
        if self.version == "v1":
            return bool(close or (self.recover_gap[rows] < MARGIN).any())
        return bool(close or self.resample_gap[b] < MARGIN)


def _case(z, version, i):
    ragged = [name[: -len("__off")] for name in z if name.endswith("__off")]
    arrays = {name: z[name][z[f"{name}__off"][i] : z[f"{name}__off"][i + 1]] for name in ragged}
    vocab, batch, max_drafts = int(z["V"][i]), int(z["B"][i]), int(z["S"][i])
    has_draft = bool(z["has_draft"][i])
    arrays["target_logits"] = arrays["target_logits"].reshape(-1, vocab)
    if version == "v1":
        arrays["q"] = arrays["q"].reshape(batch, vocab)
        arrays["output"] = arrays["output"].reshape(batch, max_drafts + 1)
        arrays["draft_probs"] = arrays["draft_probs"].reshape(-1, vocab) if has_draft else None
    else:
        arrays["sampled"] = arrays["sampled"].reshape(batch, max_drafts + 1)
        arrays["draft_logits"] = arrays["draft_logits"].reshape(batch, max_drafts, vocab) if has_draft else None
    return Case(
        version=version,
        index=i,
        tag=str(z["tag"][i]),
        out_of_vocabulary=bool(z["oob"][i]),
        vocab=vocab,
        batch=batch,
        max_drafts=max_drafts,
        window=int(z["W"][i]),
        entropy_top_k=int(z["top_k"][i]),
        threshold=float(z["threshold"][i]),
        has_draft=has_draft,
        arrays=arrays,
    )


@functools.cache
def load(version):
    """All cases of golden_v1 or golden_v2, in file order."""
    with np.load(DATA / f"golden_{version}.npz") as file:
        z = {name: file[name] for name in file.files}
    return [_case(z, version, i) for i in range(len(z["V"]))]
