"""Text to token ids and back, and chat messages to text."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from fly_jax.decode.vocab import Vocabulary
from fly_jax.errors import UserError

# Chat models end a turn with these, whatever their files call the end of a text.
END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>")


@dataclasses.dataclass(frozen=True)
class TextCodec:
    """A model's tokenizer and chat template.

    Attributes:
        tokenizer: of the `tokenizers` package.
        eos_token_ids: the tokens that end a generation.
        chat_template: Jinja source, or None for a model that is not for chat.
        special_tokens: what templates may refer to: "bos_token", "eos_token" and the like -> their text.
    """

    tokenizer: tokenizers.Tokenizer
    eos_token_ids: frozenset[int]
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def vocabulary(self, size: int) -> Vocabulary:
        """The tokens, for a model whose logits have `size` columns."""
        unk_token_id, eos_token_id = (self.special_token_id(name) for name in ("unk_token", "eos_token"))
        if eos_token_id is None:
            eos_token_id = min(self.eos_token_ids)
        return Vocabulary.from_tokenizer(
            self.tokenizer, size=size, unk_token_id=unk_token_id, eos_token_id=eos_token_id
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that is to be continued. Special tokens written out in it are parsed as such.

        A model that begins its texts with tokens gets them, once: not again where the text already starts with them.
        What a tokenizer puts at the end of a text is left out, because the text goes on.
        """
        token_ids, first = self._as_written(text), self._first_token_ids
        return token_ids if token_ids[: len(first)] == first else [*first, *token_ids]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, raw: bool = False) -> list[int]:
        """Token ids of a conversation, ready for an answer: of what the template writes, and nothing else.

        With `raw` those of the only message, see `encode`.

        Raises:
            UserError: see `apply_chat_template`; or `raw`, and there are several messages.
        """
        if not raw:
            return self._as_written(self.apply_chat_template(messages))
        if len(messages) > 1:
            raise UserError("raw needs a prompt, and this is a conversation of several messages.")
        return self.encode(messages[0]["content"])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Incomplete UTF-8 sequences become U+FFFD."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, ready for `encode`.

        Args:
            messages: mappings with at least "role" and "content".
            add_generation_prompt: end with the beginning of the assistant's answer.

        Raises:
            UserError: when the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise UserError("The model has no chat template: pass the text itself instead of chat messages (raw).")
        try:
            return _compile(self.chat_template).render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(
                f"The model's chat template refused the messages ({error}): change them, or pass the text itself (raw)."
            ) from error

    def _as_written(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @functools.cached_property
    def _first_token_ids(self) -> list[int]:
        """What the tokenizer's post-processor puts before a text."""
        encoding = self.tokenizer.encode("a", add_special_tokens=True)
        count = next((i for i, is_added in enumerate(encoding.special_tokens_mask) if not is_added), 0)
        return list(encoding.ids[:count])

    def special_token_id(self, name: str) -> int | None:
        """The id of "bos_token", "eos_token" and the like; None where the model has none."""
        token = self.special_tokens.get(name)
        return None if token is None else self.tokenizer.token_to_id(token)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here they are just text."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    # A template comes with the model, so it is code from strangers: it runs in a sandbox. The names below are what
    # transformers offers to templates.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
