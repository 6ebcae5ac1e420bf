"""The model `fly_jax`: what the harness asks of a model, answered by `Generator` and `loglikelihood_batch`."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from fly_jax.bridges.lm_eval.options import GenerationSettings, ModelArgs
from fly_jax.config import SamplingParams
from fly_jax.decode.checkpoints.load import load_model
from fly_jax.decode.comparison import Figures
from fly_jax.decode.generate import Generator
from fly_jax.decode.loglikelihood import capacity, loglikelihood_batch
from fly_jax.decode.prepare import make_drafter
from fly_jax.errors import UserError
from fly_jax.versions import run_versions

# A child of the harness's logger, which shows what it logs.
logger = logging.getLogger("lm_eval.fly_jax")

_BREAK = "FlyJaxBreaksOffHere"


@register_model("fly_jax")
class FlyJaxLM(TemplateLM):
    """Decodes with standard or FLy verification, or target-only; scores with the target.

    A prompt too long for the context loses its beginning, with a warning.
    """

    def __init__(self, device: str | None = None, **options: Any) -> None:
        """Loads the models.

        Args:
          device: ignored, because the harness always names one; JAX chooses, see `JAX_PLATFORMS`.
          **options: see `ModelArgs`.

        Raises:
          UserError: an option is wrong, or a model cannot be read.
        """
        super().__init__()
        arguments = ModelArgs.from_harness(options)
        self.options = arguments.decode_options()
        self._batch_size = arguments.requests_together()
        if self.options.fly is not None:
            logger.warning("FLy is lossy: its text may differ from what the target alone would write.")
        self._loaded = load_model(self.options.model, progress=_report)
        self.tokenizer = self._loaded.tokenizer
        self._drafter = make_drafter(self.options, self._loaded, _report)
        self.max_length = self.options.max_model_len or self._loaded.config.max_position_embeddings
        # By capacity. The largest is made now, though it may never be used, because it checks the options.
        self._generators = {self.max_length: self._new_generator(self.max_length)}
        self._warm: set[tuple[int, Any]] = set()
        self._total: Figures | None = None

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token_id = self.tokenizer.special_token_id("eos_token")
        return min(self.tokenizer.eos_token_ids) if token_id is None else token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        token_id = self.tokenizer.special_token_id("bos_token")
        return self.eot_token_id if token_id is None else token_id

    @property
    def tokenizer_name(self) -> str:
        """The model's name, as part of a file name."""
        return self._loaded.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; by default with the first token that the model's texts begin with, if they do."""
        if add_special_tokens is False:
            return list(self.tokenizer.tokenizer.encode(string, add_special_tokens=False).ids)
        return self.tokenizer.encode(string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without `add_generation_prompt` it breaks off where its last message does.

        Raises:
          UserError: the model has no template, or it refuses the messages or does not write the last one once.
        """
        if add_generation_prompt:
            return self.tokenizer.apply_chat_template(chat_history)
        *before, last = chat_history
        # Where the answer breaks off is found by what stands there: its own words may occur elsewhere in the text.
        marked = {**last, "content": last["content"] + _BREAK}
        text = self.tokenizer.apply_chat_template([*before, marked], add_generation_prompt=False)
        if text.count(_BREAK) != 1:
            raise UserError(
                f"The model's chat template does not write the beginning of an answer {last['content']!r} once: leave "
                "gen_prefix out."
            )
        return text[: text.index(_BREAK)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """One text per request, cut before the first of its stop strings."""
        settings = [GenerationSettings.from_task(request.args[1], self.options.max_tokens) for request in requests]
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        prompts = self._truncated(prompts, [self.max_length - each.max_tokens for each in settings])
        alike: dict[GenerationSettings, list[int]] = {}
        for i, each in enumerate(settings):
            alike.setdefault(each, []).append(i)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as progress:
            for each, indices in alike.items():
                for batch in self._batches(indices, prompts):
                    for i, text in zip(batch, self._decode(batch, prompts, each), strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    progress.update(len(batch))
        if self._total is not None:
            logger.info("%s", _summary(self._total))
        return texts

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Nats of whole texts, in pieces of the context's length where they are longer."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            pieces = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for piece in pieces:
                windows.append((None, *make_disjoint_window(piece)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results: versions, options, and the counters of what was generated."""
        options = self.options.to_dict() | {"model": self._loaded.name, "max_model_len": self.max_length}
        options |= {"batch_size": self._batch_size, "max_gen_toks": options.pop("max_tokens")}
        counters = None if self._total is None else self._total.to_dict()
        return {"fly_jax": {"versions": run_versions(), "options": options, "counters": counters}}

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        results = [(0.0, False)] * len(requests)
        continuations = [each[2] for each in requests]
        room = [self.max_length + 1 - len(each) for each in continuations]
        contexts = self._truncated([each[1] for each in requests], room)
        lengths = [[*context, *rest] for context, rest in zip(contexts, continuations, strict=True)]
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as progress:
            for batch in self._batches(range(len(requests)), lengths):
                scores = loglikelihood_batch(
                    self._loaded.decoder,
                    [(contexts[i], continuations[i]) for i in batch],
                    batch_size=self._batch_size,
                )
                for i, score in zip(batch, scores, strict=True):
                    results[i] = score.value, score.is_greedy
                    if (key := requests[i][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", key, results[i])
                progress.update(len(batch))
        return results

    def _decode(
        self, batch: Sequence[int], prompts: Sequence[Sequence[int]], settings: GenerationSettings
    ) -> list[str]:
        needed = max(len(prompts[i]) for i in batch) + settings.max_tokens
        generator = self._warm_generator(capacity(needed, self.max_length), settings.sampling)
        end_token_ids = self.tokenizer.eos_token_ids | self._stop_token_ids(settings.until)
        generations = generator.generate_batch(
            [prompts[i] for i in batch],
            config=self.options.fly,
            sampling=settings.sampling,
            max_tokens=settings.max_tokens,
            eos_token_ids=end_token_ids,
            seed=[(self.options.seed + i) % 2**32 for i in batch],
            batch_size=self._batch_size,
            find_end=functools.partial(self._end, settings.until) if settings.until else None,
        )
        figures = Figures.of_batch(generations)
        self._total = figures if self._total is None else self._total + figures
        texts = []
        for generation in generations:
            token_ids = [each for each in generation.token_ids if each not in end_token_ids]
            texts.append(postprocess_generated_text(self.tokenizer.decode(token_ids), list(settings.until), None))
        return texts

    def _end(self, until: Sequence[str], token_ids: Sequence[int]) -> int | None:
        """How many of the tokens there are when the first stop string is complete; None if there is none."""

        def has_stop(count: int) -> bool:
            # A token is at least a byte, so what ends with this cycle begins within the last tokens before it.
            text = self.tokenizer.decode(token_ids[max(0, first - longest) : count])
            return any(each in text for each in until)

        longest = max(len(each.encode()) for each in until)
        first = max(0, len(token_ids) - self.options.num_speculative_tokens - 1)
        if not has_stop(len(token_ids)):
            return None
        return next(count for count in range(first + 1, len(token_ids) + 1) if has_stop(count))

    def _stop_token_ids(self, until: Sequence[str]) -> frozenset[int]:
        """Special tokens among the stop strings: they leave no text to be found in."""
        added = self.tokenizer.tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special and token.content in until)

    def _batches(self, indices: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Texts of similar length together, the longest first, so that what needs most memory fails at once."""
        ordered = sorted(indices, key=lambda i: -len(texts[i]))
        size = self._batch_size
        return [ordered[begin : begin + size] for begin in range(0, len(ordered), size)]

    def _truncated(self, texts: Sequence[list[int]], room: Sequence[int]) -> list[list[int]]:
        """The ends of the texts that do not fit.

        Raises:
          UserError: there is room for nothing.
        """
        if room and min(room) < 1:
            raise UserError(
                f"What is generated or scored leaves no room for a prompt in max_model_len={self.max_length}: "
                f"raise that by at least {1 - min(room)}, or lower max_gen_toks."
            )
        too_long = sum(len(text) > most for text, most in zip(texts, room, strict=True))
        if too_long:
            logger.warning(
                "%d of %d prompts are cut at their beginning: they do not fit max_model_len=%d.",
                too_long,
                len(texts),
                self.max_length,
            )
        return [text[-most:] for text, most in zip(texts, room, strict=True)]

    def _warm_generator(self, max_model_len: int, sampling: SamplingParams) -> Generator:
        """One of this capacity, compiled, so that the counted times are those of decoding."""
        if max_model_len not in self._generators:
            self._generators[max_model_len] = self._new_generator(max_model_len)
        generator = self._generators[max_model_len]
        kind = max_model_len, jax.tree.structure(sampling)
        if kind not in self._warm:
            logger.info("compiling for %d tokens and %d requests", max_model_len, self._batch_size)
            generator.warm_up(config=self.options.fly, sampling=sampling, batch_size=self._batch_size)
            self._warm.add(kind)
        return generator

    def _new_generator(self, max_model_len: int) -> Generator:
        return Generator(self._loaded.decoder, drafter=self._drafter, max_model_len=max_model_len)


def _summary(total: Figures) -> str:
    return (
        f"generated {total.num_tokens} tokens: {total.tokens_per_cycle:.2f} tokens/cycle, "
        f"acceptance rate {float(total.counts.acceptance_rate()):.2f}, {total.num_deferred} deferrals, "
        f"{total.tokens_per_second:.1f} tokens/s of decoding"
    )


def _report(label: str, fraction: float) -> None:
    if fraction == 0.0:
        logger.info("%s", label)
