import json

import pytest
import tokenizers
from tiny_models import CHAT_TEMPLATE, CONTROL_TOKENS, MERGES, TOKENS, byte_level_tokenizer, write_tokenizer

from fly_jax.decode.checkpoints.gguf import codec_from_gguf
from fly_jax.decode.checkpoints.hf import codec_from_folder
from fly_jax.decode.checkpoints.text import TextCodec
from fly_jax.errors import UserError

HELLO = [{"role": "user", "content": "hello"}]
FIELDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3 if token in CONTROL_TOKENS else 1 for token in TOKENS],
    "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
    "tokenizer.ggml.eos_token_id": 0,
}


def codec(**fields):
    return codec_from_gguf(FIELDS | {name.replace("__", "."): value for name, value in fields.items()}, "m.gguf")


def pieces(text_codec, text):
    return [text_codec.tokenizer.id_to_token(i) for i in text_codec.encode(text)]


def test_round_trip():
    text = "hello world,  1234\n\tGrüße 東京 🗼"
    assert codec().decode(codec().encode(text)) == text
    assert codec().encode("") == []


def test_special_tokens_are_parsed_and_skipped():
    text = "<|im_start|>hello<|im_end|>"
    assert pieces(codec(), text) == ["<|im_start|>", "hello", "<|im_end|>"]
    assert codec().decode(codec().encode(text)) == "hello"
    assert codec().decode(codec().encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("gpt-2", "123", ["123"]),
        ("gpt-2", "   1", ["ĠĠ", "Ġ", "1"]),
        ("gpt-2", "e\u0301", ["e", "Ì", "ģ"]),
        ("smollm", "123", ["1", "2", "3"]),
        ("smollm", "   1", ["ĠĠ", "Ġ", "1"]),
        ("smollm", "  1", ["ĠĠ", "1"]),
        ("gpt-2", "  1", ["Ġ", "Ġ", "1"]),
        ("llama-bpe", "1231", ["123", "1"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
    ],
)
def test_pre_tokenizers(kind, text, expected):
    fields = {"tokenizer__ggml__pre": kind, "tokenizer__ggml__add_bos_token": False}
    assert pieces(codec(**fields), text) == expected


def test_llama_takes_whole_tokens_whatever_the_merges_say():
    tokens = [*TOKENS, "cat"]
    fields = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": [1] * len(tokens)}
    llama = codec(tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__add_bos_token=False, **fields)
    assert pieces(llama, "cat") == ["cat"]
    assert pieces(codec(**fields), "cat") == ["c", "a", "t"]


def test_beginning_of_text_is_added_once():
    llama = codec(tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__bos_token_id=0)
    assert pieces(llama, "hello") == ["<|endoftext|>", "hello"]
    assert pieces(llama, "<|endoftext|>hello") == ["<|endoftext|>", "hello"]
    assert pieces(codec(tokenizer__ggml__bos_token_id=0), "hello") == ["hello"]
    both = codec(
        tokenizer__ggml__bos_token_id=0, tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True
    )
    assert pieces(both, "hello") == ["<|endoftext|>", "hello"]  # a prompt goes on: no token that ends it
    assert pieces(both, "") == ["<|endoftext|>"]


@pytest.mark.parametrize("adds", [{"add_bos_token": True}, {"add_eos_token": True}])
@pytest.mark.parametrize("bos", ["", "{{ bos_token }}"])
def test_a_chat_has_what_its_template_writes_and_nothing_else(adds, bos):
    fields = {f"tokenizer__ggml__{name}": value for name, value in adds.items()}
    chat = codec(
        tokenizer__ggml__bos_token_id=1, tokenizer__chat_template=bos + "{{ messages[0].content }}<|im_end|>", **fields
    )
    first = ["<|im_start|>"] if bos else []
    token_ids = chat.encode_chat([{"role": "user", "content": "hello"}])
    assert [TOKENS[token_id] for token_id in token_ids] == [*first, "hello", "<|im_end|>"]


def test_user_defined_tokens_stay_whole_and_visible():
    tokens = [*TOKENS, "<think>"]
    types = [*FIELDS["tokenizer.ggml.token_type"], 4]
    text_codec = codec(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=types)
    assert pieces(text_codec, "hello<think>") == ["hello", "<think>"]
    assert text_codec.decode(text_codec.encode("hello<think>")) == "hello<think>"
    assert text_codec.vocab_size == len(tokens)


def test_end_of_text_from_gguf():
    assert codec().eos_token_ids == {0}
    assert codec(tokenizer__ggml__eot_token_id=1).eos_token_ids == {0, 1}
    assert codec(tokenizer__chat_template=CHAT_TEMPLATE).eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    ("model", "kind"), [("llama", None), ("gpt2", "default"), ("gpt2", None), ("gpt2", "deepseek-llm"), (None, None)]
)
def test_unknown_gguf_tokenizers(model, kind):
    with pytest.raises(UserError, match=f"model {model!r} and pre-tokenizer {kind!r}: .*Hugging Face folder"):
        codec(tokenizer__ggml__model=model, tokenizer__ggml__pre=kind)


def test_chat_template():
    text_codec = codec(tokenizer__chat_template=CHAT_TEMPLATE)
    expected = "<|im_start|>user\nhello<|im_end|>\n"
    assert text_codec.apply_chat_template(HELLO, add_generation_prompt=False) == expected
    assert text_codec.apply_chat_template(HELLO) == expected + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hello"),
        ("{% for m in messages %}\n  {% if loop.first %}\n  x\n  {% endif %}\n{% endfor %}", "  x\n"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "hello"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{{ '<é>' | tojson }}", '"<é>"'),
        ("{{ tools is none and documents is none }}", "True"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_what_templates_may_use(template, expected):
    text_codec = TextCodec(byte_level_tokenizer(), frozenset({0}), template, {"bos_token": "<s>"})
    assert text_codec.apply_chat_template(HELLO) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template: pass the text itself"),
        ("{{ raise_exception('roles must alternate') }}", "refused the messages .roles must alternate"),
        ("{% if %}", "refused the messages"),
        ("{{ messages[0].missing + 'x' }}", "refused the messages"),
        ("{{ messages.__class__.__mro__ }}", "refused the messages .*unsafe"),
        ("{{ messages.append(1) }}", "refused the messages .*unsafe"),
    ],
)
def test_templates_that_fail(template, message):
    with pytest.raises(UserError, match=message):
        TextCodec(byte_level_tokenizer(), frozenset({0}), template).apply_chat_template(HELLO)


def test_folder_chat_template(tmp_path):
    write_tokenizer(tmp_path)
    assert codec_from_folder(tmp_path).chat_template == CHAT_TEMPLATE
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_tokenizer(tmp_path, chat_template=templates)
    assert codec_from_folder(tmp_path).chat_template == "plain"
    write_tokenizer(tmp_path, chat_template=3)
    with pytest.raises(UserError, match="chat_template must be text, got 3"):
        codec_from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert codec_from_folder(tmp_path).chat_template == "from the file"


def test_folder_special_tokens(tmp_path):
    write_tokenizer(tmp_path, bos_token={"content": "<|im_start|>", "special": True}, chat_template=None)
    text_codec = codec_from_folder(tmp_path)
    assert text_codec.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    assert text_codec.eos_token_ids == {0}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert codec_from_folder(tmp_path).eos_token_ids == {0, 7, 8, 9}
    write_tokenizer(tmp_path)
    assert codec_from_folder(tmp_path).eos_token_ids == {0, 2, 7, 8, 9}


def test_special_tokens_are_found_where_older_folders_name_them(tmp_path):
    write_tokenizer(
        tmp_path, eos_token="<|im_end|>", chat_template=None, image_token="<|im_start|>", add_bos_token=True
    )
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<pad>"})
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": len(TOKENS), "<|im_end|>": 2}))
    text_codec = codec_from_folder(tmp_path)
    expected = {"eos_token": "<|endoftext|>", "pad_token": "<pad>", "image_token": "<|im_start|>"}
    assert text_codec.special_tokens == expected
    assert text_codec.encode("<pad>") == [len(TOKENS)]
    assert text_codec.decode([len(TOKENS)]) == ""


def test_special_tokens_map_is_not_asked_where_the_config_lists_added_tokens(tmp_path):
    listed = {str(len(TOKENS)): {"content": "<pad>", "special": True}}
    write_tokenizer(tmp_path, eos_token="<|im_end|>", added_tokens_decoder=listed)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    text_codec = codec_from_folder(tmp_path)
    assert text_codec.special_tokens == {"eos_token": "<|im_end|>"}
    assert text_codec.encode("<pad>") == [len(TOKENS)]


def test_an_added_token_with_an_id_it_cannot_have(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 7}))
    with pytest.raises(UserError, match=f"'<pad>' has the id 7, but would get {len(TOKENS)} in tokenizer.json"):
        codec_from_folder(tmp_path)


def test_files_that_begin_with_a_byte_order_mark(tmp_path):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text(), encoding="utf-8-sig")
    (tmp_path / "chat_template.jinja").write_text("plain", encoding="utf-8-sig")
    assert codec_from_folder(tmp_path).chat_template == "plain"


def test_folder_beginning_of_text_is_added_once(tmp_path):
    write_tokenizer(tmp_path, bos_token="<|im_start|>")
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text_codec = codec_from_folder(tmp_path)
    assert pieces(text_codec, "hello") == ["<|im_start|>", "hello"]
    assert pieces(text_codec, "<|im_start|>hello") == ["<|im_start|>", "hello"]


def test_folder_truncation_is_off(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(codec_from_folder(tmp_path).encode("abcdef")) == 6


def test_folders_without_an_end(tmp_path):
    write_tokenizer(tmp_path, eos_token=None, chat_template=None)
    with pytest.raises(UserError, match=r"names no eos_token in tokenizer_config.json, special_tokens_map.json"):
        codec_from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(UserError, match="eos_token_id must be token ids, got 'end'"):
        codec_from_folder(tmp_path)
